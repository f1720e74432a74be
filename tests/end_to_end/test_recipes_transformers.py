"""Trained models of transformers, converted to the hub's names and back. The loaders of transformers, DCP and DeepSpeed
are the judges, and `save_pretrained` of the trained model."""

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import ckpt_tools
from ckpt_tools.recipes.index import list_recipes
from fixtures import hub_runs, launch
from fixtures.hub_runs import MOMENTS, Family
from tests.recipes import families
from tests.support.hub_judges import assert_is_hub_folder, assert_same_bits, assert_same_values

pytestmark = pytest.mark.extended

RANKS = 2


@dataclass(frozen=True, slots=True)
class Case:
    """A family of `tests.recipes.families`, and how it is trained: its dtype, by ZeRO-3 or FSDP2, with changes of its
    configuration."""

    name: str
    is_zero: bool = False
    dtype: str = "fp32"
    config: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return "-".join([self.name, "zero3" if self.is_zero else "fsdp2", self.dtype, *self.config])

    @property
    def family(self) -> Family:
        is_half = self.dtype == "bf16" and not self.is_zero
        build = partial(_half if is_half else families.build, self.name, **self.config)
        return Family(build, families.batch, families.loss, families.output)


def _half(name: str, **config: Any) -> Any:
    """The model in bf16, but for the tensors that transformers keeps in fp32."""
    model = families.build(name, **config)
    kept = [*(model._keep_in_fp32_modules or ()), *(model._keep_in_fp32_modules_strict or ())]
    for tensor_name, tensor in model.state_dict(keep_vars=True).items():
        if tensor.is_floating_point() and not any(part in tensor_name for part in kept):
            tensor.data = tensor.data.bfloat16()
    model.config.dtype = torch.bfloat16
    return model


CASES = [
    Case("gpt_oss"),
    Case("vit"),
    Case("deepseek_v3", dtype="bf16"),
    Case("qwen3_moe", is_zero=True, dtype="bf16", config={"tie_word_embeddings": True}),
]


@dataclass(frozen=True, slots=True)
class Trained:
    """A case, the folder that its run filled, and the losses of the steps after it."""

    case: Case
    folder: Path
    losses: list[float]

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoint"

    def convert(self, source: Path, target: Path, *, inverse: bool = False, **options: Any) -> None:
        """By the family's recipe, if its live names are not those of the hub."""
        if _has_recipe(self.case.name):
            options |= {"recipe": self.case.name, "inverse": inverse}
        if options["to"] == "safetensors" or "recipe" in options:
            options["config"] = self.folder / "config"
        ckpt_tools.convert(source, target, **options)

    def resumed(self, checkpoint: Path) -> list[float]:
        """The losses of the same steps after loading."""
        family, pool = self.case.family, launch.pool(RANKS)
        if self.case.is_zero:
            losses = pool.run(hub_runs.resume_in_zero3, family, self.case.dtype, str(checkpoint))
        else:
            losses = pool.run(hub_runs.resume_in_fsdp2, family, str(checkpoint))
        return list(losses[0])


@pytest.fixture(scope="module", params=CASES, ids=str)
def trained(request, tmp_path_factory):
    case, folder = request.param, str(tmp_path_factory.mktemp("trained"))
    if case.is_zero:
        losses = launch.pool(RANKS).run(hub_runs.train_in_zero3, case.family, case.dtype, folder)
    else:
        losses = launch.pool(RANKS).run(hub_runs.train_in_fsdp2, case.family, folder)
    return Trained(case, Path(folder), losses[0])


def _has_recipe(model_type: str) -> bool:
    return any(model_type in recipe.model_aliases for recipe in list_recipes())


def test_the_hub_folder_is_that_of_save_pretrained(trained, card, tmp_path):
    weights = "model" if trained.case.dtype == "bf16" else "master"
    trained.convert(trained.checkpoint, tmp_path / "hub", to="safetensors", weights=weights)
    assert_is_hub_folder(trained.case.family, tmp_path / "hub", trained.folder)
    if _has_recipe(trained.case.name):
        card(trained.case.name, ["transformers"], f"tiny {trained.case.name}", "the files of save_pretrained")


def test_training_goes_on_after_a_way_over_hub_names(trained, card, tmp_path):
    trained.convert(trained.checkpoint, tmp_path / "hub", to="dcp")
    assert_has_moments(tmp_path / "hub", trained.folder)
    how: dict[str, Any] = {"to": "zero3", "world_size": RANKS} if trained.case.is_zero else {"to": "dcp"}
    if trained.case.is_zero and trained.case.dtype == "bf16":
        how["dtype"] = "bfloat16"  # the hub's weights are the masters
    trained.convert(tmp_path / "hub", tmp_path / "back", **how, inverse=True)
    assert trained.resumed(tmp_path / "back") == trained.losses
    if _has_recipe(trained.case.name):
        judges = ["transformers", "deepspeed" if trained.case.is_zero else "torch"]
        told = f"tiny {trained.case.name}", "the moments that save_pretrained makes, and the next losses"
        card(trained.case.name, judges, *told, way="both", optimizer=True)


@pytest.mark.parametrize("trained", CASES[:-1], ids=str, indirect=True, scope="module")
def test_weights_of_the_hub_load_into_the_live_model(trained, tmp_path):
    trained.convert(trained.folder / "pretrained", tmp_path / "live", to="dcp", inverse=True)
    job = hub_runs.load_weights_in_fsdp2, trained.case.family, str(tmp_path / "live")
    logits, _ = launch.pool(RANKS).run(*job)
    assert_same_bits(logits, torch.load(trained.folder / "logits.pt"))


def assert_has_moments(checkpoint: Path, folder: Path) -> None:
    """A DCP with hub names: weights are those of `save_pretrained`, moments what it makes of them in place of weights.
    A DCP has tied tensors under each of their names.

    Each parameter has moments and a step. What has none is no parameter that was trained: `save_pretrained` wrote the
    weight itself.
    """
    dcp_to_torch_save(checkpoint, checkpoint.with_suffix(".pt"))
    state = torch.load(checkpoint.with_suffix(".pt"))
    state = state.get("app", state)
    weights = load_file(folder / "pretrained" / "model.safetensors")
    owners = {name: tensor for name, tensor in state["model"].items() if name in weights}
    assert_same_values(owners, weights)
    tied = [tensor for name, tensor in state["model"].items() if name not in weights]
    assert all(any(torch.equal(tensor, owner) for owner in owners.values()) for tensor in tied)
    slots = state["optim"]["state"]
    assert {name for group in state["optim"]["param_groups"] for name in group["params"]} >= slots.keys()
    for moment in MOMENTS:
        wanted = load_file(folder / moment / "model.safetensors")
        untrained = {name: weights[name] for name in weights.keys() - slots.keys()}
        assert_same_values({name: state[moment] for name, state in slots.items()} | untrained, wanted)
    assert all(state["step"] == hub_runs.STEPS for state in slots.values())

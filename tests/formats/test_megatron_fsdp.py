"""Checkpoints of Megatron-FSDP (`--ckpt-format fsdp_dtensor`) with their optimizer. Megatron-FSDP of megatron-core
0.16.1 trains and saves the models on the CPU; the judges are torch's own `dcp.load` of all entries, the run's tensors
from before Megatron splits them, and `from_pretrained`."""

import argparse
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import ckpt_tools
from ckpt_tools.errors import UnsupportedError
from fixtures import launch
from fixtures import megatron_fsdp as mf
from fixtures import megatron_models as mm
from fixtures.truth import raw_bytes

pytestmark = [pytest.mark.filterwarnings("ignore:torch.distributed is disabled"), pytest.mark.extended]

DATA, TENSOR, EXPERT = {}, {"tensor_model_parallel_size": 2}, {"expert_model_parallel_size": 2}
SAMPLE = [("llama", TENSOR), ("qwen3_moe", EXPERT)]
ALL = [("llama", DATA), ("qwen3", DATA)]
MOMENTS = ("exp_avg", "exp_avg_sq")
CUT = {"embedding": 0, "output_layer": 0, "linear_qkv": 0, "linear_fc1": 0, "linear_proj": 1, "linear_fc2": 1}
"""The axis of a weight that tensor parallelism cuts."""
BOUND = 2e-6
"""Megatron and transformers add in another order."""


@dataclass(frozen=True, slots=True)
class Trained:
    """A run, and what each of its two ranks held when it was saved."""

    name: str
    sizes: Mapping[str, int]
    folder: Path
    ranks: list[dict[str, Tensor]]

    @property
    def source(self) -> Path:
        return self.folder / f"run/iter_{mf.STEPS:07d}"

    def converted(self, out: Path, **options: Any) -> Any:
        ckpt_tools.convert(self.source, out, state="all", **options)
        return torch.load(out, weights_only=False)

    @property
    def weights(self) -> dict[str, Tensor]:
        """Those of Megatron's model on one rank."""
        names = {name for name in self.ranks[0] if " of " not in name}
        # The second rank numbers its experts from 0 on too.
        names |= {re.sub(r"(?<=local_experts\.)\d", lambda found: str(int(found[0]) + 2), name) for name in names}
        return {name: self.whole(name) for name in names}

    def whole(self, name: str) -> Tensor:
        """The parts of both ranks, or the one part; of fc1 the gates of both before their rows up."""
        parts = [rank[name] for rank in self.ranks] if self.sizes == TENSOR else [self.ranks[0].get(name)]
        if "experts." in name:
            (number,) = re.findall(r"local_experts\.(\d+)\.", name)
            local = name.replace(f"local_experts.{number}.", f"local_experts.{int(number) % 2}.")
            parts = [self.ranks[int(number) // 2][local]]
        if "linear_fc1.weight" in name:
            return torch.cat(
                [half for halves in zip(*(part.chunk(2) for part in parts), strict=True) for half in halves]
            )
        axis = next((axis for layer, axis in CUT.items() if f"{layer}." in name), None)
        return parts[0] if axis is None else torch.cat(parts, axis)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "trained" in metafunc.fixturenames:
        cases = [*SAMPLE, *ALL] if metafunc.config.getoption("--soak") else SAMPLE
        # The modules of experts cannot be built as these tests do since megatron-core 0.19.
        rows = [pytest.param(case, marks=[pytest.mark.judges] if case[0] == "llama" else []) for case in cases]
        ids = ["-".join([name, *(size.partition("_")[0] for size in sizes)]) for name, sizes in cases]
        metafunc.parametrize("trained", rows, ids=ids, indirect=True, scope="module")


@pytest.fixture(scope="module")
def trained(request, tmp_path_factory):
    name, sizes = request.param
    folder = tmp_path_factory.mktemp("fsdp")
    return Trained(name, sizes, folder, launch.pool(2).run(mf.produce, name, {}, folder, sizes))


def test_every_tensor_is_the_one_that_torch_loads(trained, tmp_path):
    found = trained.converted(tmp_path / "found.pt")
    dcp_to_torch_save(trained.source, tmp_path / "raw.pt")
    raw = torch.load(tmp_path / "raw.pt", weights_only=False)
    assert found["model"].keys() == raw["model"].keys()
    assert all(raw_bytes(found["model"][name]) == raw_bytes(tensor) for name, tensor in raw["model"].items())
    state = found["optim"]["state"]
    assert {f"module.module.{name}" for name in state} == raw["optimizer"]["state"].keys()
    for name, slots in state.items():
        wanted = raw["optimizer"]["state"][f"module.module.{name}"]
        assert slots.keys() == {*wanted, "step"}
        assert slots["step"] == mf.STEPS
        assert all(raw_bytes(slots[slot]) == raw_bytes(wanted[slot]) for slot in wanted), name
    of = {name: group for group in found["optim"]["param_groups"] for name in group["params"]}
    assert of.keys() == found["model"].keys()
    for name, group in raw["optimizer"]["param_to_group_meta"].items():
        parts = [part for part in (name, f"{name}_w", f"{name}_v") if part.removeprefix("module.module.") in of]
        assert parts in ([name], [f"{name}_w", f"{name}_v"])
        wanted = {key: value for key, value in group.items() if key != "step"}
        for part in parts:
            options = of[part.removeprefix("module.module.")]
            assert {key: value for key, value in options.items() if key != "params"} == wanted


def test_transformers_computes_the_same_logits(trained, tmp_path):
    ckpt_tools.convert(
        trained.source,
        tmp_path / "hub",
        to="safetensors",
        recipe=f"megatron_{trained.name}",
        strip="auto",
        config=trained.folder / "config",
    )
    ((logits, wrong),) = launch.pool(1).run(mm.twin, tmp_path / "hub")
    assert not wrong
    (wanted,) = launch.pool(1).run(mf.logits, trained.name, trained.weights)
    assert (logits - wanted).abs().max() <= BOUND * wanted.abs().max()


OPTIONS = {"lr": 0.1, "weight_decay": 0.0, "step": 3}


def save(
    folder: Path,
    weights: Mapping[str, Any],
    state: Mapping[str, Any],
    groups: list[str],
    options: Mapping[str, Any] = OPTIONS,
    **args: Any,
) -> Path:
    """A checkpoint of Megatron-FSDP that no run of it here would write."""
    tree = {
        "args": argparse.Namespace(ckpt_format="fsdp_dtensor", **args),
        "model": {f"module.{name}": torch.full(shape, 2.0) for name, shape in weights.items()},
        "optimizer": {
            "state": {f"module.module.{name}": slots for name, slots in state.items()},
            "param_to_group_meta": {f"module.module.{name}": options for name in groups},
        },
    }
    dcp.save(tree, checkpoint_id=folder, no_dist=True)
    return folder


def moments(*shape: int, **more: Tensor) -> dict[str, Tensor]:
    return {**{slot: torch.ones(shape) for slot in MOMENTS}, **more}


@pytest.mark.parametrize(
    ("parts", "whole"),
    [
        (["mlp.experts.linear_fc1.weight11_w", "mlp.experts.linear_fc1.weight11_v"], "mlp.experts.linear_fc1.weight11"),
        (["a.linear_q_down_proj.weight", "a.linear_kv_down_proj.weight"], "a.linear_qkv_down_proj.weight"),
        (["input_layernorm.weight"], "self_attention.linear_qkv_down_proj.layer_norm_weight"),
        (["a.in_proj.weight.query", "a.in_proj.weight.z"], "a.in_proj.weight"),
        (["mtp.0.transformer_layer.fc1.weight_w"], "mtp.0.mtp_model_layer.fc1.weight"),
    ],
    ids=["experts", "latent attention", "its norm", "delta net", "multi-token prediction"],
)
def test_groups_have_the_names_from_before_splitting(parts, whole, tmp_path):
    names = [f"layers.0.{part}" for part in parts]
    state = {name: moments(2, 3) for name in names}
    save(tmp_path / "in", dict.fromkeys(names, (2, 3)), state, [f"layers.0.{whole}"])
    ckpt_tools.convert(tmp_path / "in", tmp_path / "out.pt", state="all")
    found = torch.load(tmp_path / "out.pt", weights_only=False)["optim"]
    (group,) = found["param_groups"]
    assert group["params"] == [f"module.{name}" for name in names]
    assert group["lr"] == 0.1
    assert [float(slots["step"]) for slots in found["state"].values()] == [3.0] * len(names)


REFUSED: Mapping[str, tuple[str, dict[str, Any]]] = {
    "whole state under a half": (
        r"state\.module\.module\.a_w\.master_param: it has the shape \[4, 3\], and its weight \[2, 3\]",
        {
            "weights": {"a_w": (2, 3), "a_v": (2, 3)},
            "state": {f"a_{half}": moments(2, 3, master_param=torch.ones(4, 3)) for half in "wv"},
        },
    ),
    "moments with scales": ("precision-aware optimizer", {"state": {"a": {"exp_avg": torch.ones(2, 3).half()}}}),
    "masters": ("precision-aware optimizer", {"state": {"a": moments(2, 3, master_param=torch.ones(2, 3))}}),
    "another parameter": ("the model does not have", {"state": {"a": moments(2, 3), "b": moments(2, 3)}}),
    "two of one weight": (
        r"state of the same weight as module\.module\.",
        {"state": {"a": moments(2, 3), "module.a": moments(2, 3)}},
    ),
    "two weights": (r"it has the name of module\.a", {"weights": {"a": (2, 3), "model.a": (2, 3)}}),
    "no group": (
        r"module\.b: it has optimizer state, but no entry in param_to_group_meta",
        {"weights": {"a": (2, 3), "b": (2, 3)}, "state": {"b": moments(2, 3)}},
    ),
    "group without a weight": ("does not have this parameter of param_to_group_meta", {"groups": ["a", "b"]}),
    "a step that float32 cannot count": ("its step .* is not a whole number up to", {"options": {"step": 10**400}}),
    "pipeline stages": ("of one stage alone", {"pipeline_model_parallel_size": 2}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name, tmp_path):
    sentence, more = REFUSED[name]
    given: dict[str, Any] = {"weights": {"a": (2, 3)}, "state": {"a": moments(2, 3)}, "groups": ["a"]}
    save(tmp_path / "in", **(given | more))
    with pytest.raises(UnsupportedError, match=sentence):
        ckpt_tools.convert(tmp_path / "in", tmp_path / "out", to="dcp")
    assert not (tmp_path / "out").exists()


def test_halves_of_ranks_in_turn(tmp_path):
    """Megatron-FSDP splits no other gated layer than SwiGLU, and stores the parts of tensor parallel ranks in turn."""
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    sizes = {"num_attention_heads": 4, "quick_geglu": True, "tensor_model_parallel_size": 2}
    save(tmp_path / "in", {name: (8, 3)}, {name: moments(8, 3)}, [name], **sizes)
    ckpt_tools.convert(tmp_path / "in", tmp_path / "as it is", to="dcp")
    with pytest.raises(UnsupportedError, match=rf"{name}: its rows are gate and up of 2 tensor parallel ranks"):
        ckpt_tools.convert(tmp_path / "in", tmp_path / "out", to="dcp", recipe="megatron_gpt_oss", strip="auto")

"""``prune`` never removes the newest checkpoint with an optimizer, also where no reader can place it."""

from __future__ import annotations

import json
import re
import warnings
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed

import ckpt_tools
from ckpt_tools.errors import IncompleteError
from ckpt_tools.trainers.all import TRAINERS
from ckpt_tools.trainers.names import holds_optimizer

WEIGHTS = {"a.weight": torch.ones(4, 4), "b.weight": torch.ones(4, 4), "b.bias": torch.ones(4)}


def adam(kind: Any = torch.optim.AdamW, **options: Any) -> dict[str, Any]:
    """Its parameters are numbered, and two of them have one shape."""
    params = [torch.nn.Parameter(tensor.clone()) for tensor in (WEIGHTS["b.weight"], *WEIGHTS.values())][:3]
    torch.stack([each.sum() for each in params]).sum().backward()  # type: ignore[no-untyped-call]
    optimizer = kind(params, **options)
    optimizer.step()
    state: dict[str, Any] = optimizer.state_dict()
    return state


def named_state() -> dict[str, Any]:
    state = {name: {"exp_avg": torch.ones_like(tensor)} for name, tensor in WEIGHTS.items()}
    return {"state": state, "param_groups": [{"params": list(WEIGHTS), "lr": 0.1}]}


def save(value: object, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(value, path)


def save_dcp(state: dict[str, Any], folder: Path) -> None:
    with warnings.catch_warnings(action="ignore"):
        save_distributed(state, checkpoint_id=folder, no_dist=True)


def beside(path: str, content: Callable[[], object] = adam, shards: int = 1) -> Callable[[Path, bool], None]:
    """The Trainer's folder, with an optimizer in a file or folder beside the weights."""

    def lay(folder: Path, has_optimizer: bool) -> None:
        folder.mkdir(parents=True)
        files = ["model.safetensors", *(f"model-{n + 1:05d}-of-{shards:05d}.safetensors" for n in range(shards))]
        places = dict.fromkeys(WEIGHTS, files[0]) if shards == 1 else dict(zip(WEIGHTS, files[1:], strict=True))
        for file in {*places.values()}:
            save_file({name: WEIGHTS[name] for name in WEIGHTS if places[name] == file}, folder / file)
        if shards > 1:
            (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
        (folder / "trainer_state.json").write_text("{}")
        save({"last_epoch": 1, "_step_count": 2}, folder / "scheduler.pt")
        if has_optimizer and path.endswith("/"):
            save_dcp({"optimizer": content()}, folder / path)
        elif has_optimizer and path.endswith(".safetensors"):
            save_file({f"{name}.exp_avg": tensor for name, tensor in WEIGHTS.items()}, folder / path)
        elif has_optimizer:
            save(content(), folder / path)

    return lay


def in_one_file(**content: Any) -> Callable[[Path, bool], None]:
    def lay(path: Path, has_optimizer: bool) -> None:
        save({"state_dict": dict(WEIGHTS), "global_step": 1, **(content if has_optimizer else {})}, path)

    return lay


def in_dcp(model: str, optimizer: str = "") -> Callable[[Path, bool], None]:
    """Model and optimizer in one DCP, or each in a folder of its own."""

    def lay(folder: Path, has_optimizer: bool) -> None:
        state = {"optim": named_state()} if has_optimizer else {}
        save_dcp({"model": dict(WEIGHTS), **({} if optimizer else state)}, folder / model)
        if has_optimizer and optimizer:
            save_dcp(state, folder / optimizer)
        if "model_and_optim" in model:
            save({}, folder / "train" / "rank0.pt")
            (folder / ".metadata.json").write_text("{}")

    return lay


def of_ranks(form: str, model: str, optimizer: str, extra: str = "") -> Callable[[Path, bool], None]:
    def lay(folder: Path, has_optimizer: bool) -> None:
        for rank in range(2):
            save(dict(WEIGHTS), folder / form.format(item=model, rank=rank))
            if has_optimizer:
                save(adam(), folder / form.format(item=optimizer, rank=rank))
            if extra:
                save({}, folder / form.format(item=extra, rank=rank))

    return lay


def deepspeed(folder: Path, has_optimizer: bool) -> None:
    """The Trainer's folder, with one of DeepSpeed in it that is not read, so that sizes are compared."""
    beside("")(folder, False)
    (folder / "trainer_state.json").write_text(json.dumps({"log_history": ["x" * 9999]}))
    if has_optimizer:
        model = {"module": dict(WEIGHTS), "dp_world_size": 1, "mp_world_size": 1}
        save(model, folder / "global_step1" / "mp_rank_00_model_states.pt")
        (folder / "latest").write_text("global_step1")
        name = "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
        save({"optimizer_state_dict": adam()}, folder / "global_step1" / name)


LAYOUTS: dict[str, tuple[str, Callable[[Path, bool], None]]] = {
    "Trainer": ("checkpoint-{}", beside("optimizer.pt")),
    "Trainer, in shards": ("checkpoint-{}", beside("optimizer.pt", shards=3)),
    "SGD without state": ("checkpoint-{}", beside("optimizer.pt", lambda: adam(torch.optim.SGD, lr=0.1))),
    "an optimizer that cannot be read": ("checkpoint-{}", beside("optimizer.pt", lambda: Namespace(state=adam()))),
    "accelerate": ("checkpoint_{}", beside("optimizer.bin")),
    "accelerate, in shards": ("checkpoint_{}", beside("optimizer.bin", shards=3)),
    "accelerate, a second model": ("checkpoint_{}", beside("optimizer_1.bin")),
    "accelerate, a DCP": ("checkpoint_{}", beside("optimizer_0/")),
    "accelerate, two DCPs": ("checkpoint_{}", in_dcp("pytorch_model_fsdp_0", "optimizer_0")),
    "accelerate, files of ranks": ("checkpoint_{}", of_ranks("{item}_rank{rank}.bin", "pytorch_model_fsdp",
        "optimizer")),
    "a file of each rank": ("checkpoint-{}", beside("optimizer_rank_0.pt")),
    "safetensors": ("checkpoint-{}", beside("optimizer.safetensors")),
    "DeepSpeed in the Trainer's folder": ("checkpoint-{}", deepspeed),
    "Lightning": ("epoch={0}-step={0}.ckpt", in_one_file(optimizer_states=[adam()])),
    "a file with an optimizer as an object": ("step_{}.pt", in_one_file(optimizer=Namespace(state=adam()))),
    "a file with an optimizer by numbers": ("step_{}.pt", in_one_file(opt=adam())),
    "a DCP": ("step-{}", in_dcp("")),
    "OLMo-core": ("step{}", in_dcp("model_and_optim")),
    "verl": ("global_step_{}", of_ranks("actor/{item}_world_size_2_rank_{rank}.pt", "model", "optim", "extra_state")),
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_newest_optimizer_stays(layout, tmp_path):
    name, lay = LAYOUTS[layout]
    for step in (1, 2, 3):
        lay(tmp_path / name.format(step), step < 3)
    report = ckpt_tools.prune(tmp_path, keep_last=1)
    newest, second, oldest = (each.reason for each in report.checkpoints)
    assert newest == "the newest complete one"
    unknown = layout in ("a file of each rank", "safetensors")
    assert second.startswith("it holds what no trainer writes" if unknown else "the newest with optimizer state")
    assert unknown or oldest == "older than those that stay"
    lay(tmp_path / "later" / name.format(2), True)
    lay(tmp_path / "later" / name.format(3), True)
    assert ckpt_tools.prune(tmp_path / "later", keep_last=1).num_staying == 1 + unknown


@pytest.mark.parametrize("key", ["optimizer_states", "optimizers"])
def test_two_optimizers_are_not_read_and_stay(key, tmp_path):
    """Sizes of files decide, also where the newest is large enough."""
    for step in (1, 2, 3):
        in_one_file(**{key: [adam(), adam()]})(tmp_path / f"step_{step}.pt", step < 3)
    with pytest.raises(IncompleteError, match=r"step_3.pt, which is to stay, holds less .*: its files have"):
        ckpt_tools.prune(tmp_path, keep_last=1, yes=True)
    in_one_file(notes="x" * 9999)(tmp_path / "step_3.pt", True)
    assert [each.stays for each in ckpt_tools.prune(tmp_path, keep_last=1).checkpoints] == [True, True, False]


@pytest.mark.parametrize("name", ["epoch={0}-step={0}.ckpt", "step_{}.pt"])
def test_models_alone_leave_no_second_one(name, tmp_path):
    """Random states, schedulers and averages are no optimizer."""
    others = {"lr_schedulers": [{"last_epoch": 1}], "rng": torch.ones(9), "ema": dict(WEIGHTS), "optimizer_states": []}
    for step in (1, 2, 3):
        in_one_file(**others)(tmp_path / name.format(step), True)
    assert [each.stays for each in ckpt_tools.prune(tmp_path, keep_last=1).checkpoints] == [True, False, False]


def test_each_one_is_asked_until_one_has_an_optimizer(tmp_path):
    """Not only the newest one that would go, and the largest."""
    for step in (1, 2, 3, 4):
        state = {"opt": adam(torch.optim.SGD, lr=0.1)} if step == 2 else {"notes": "x" * 9999} if step == 1 else {}
        in_one_file(**state)(tmp_path / f"step_{step}.pt", True)
    assert [each.stays for each in ckpt_tools.prune(tmp_path, keep_last=1).checkpoints] == [True, False, True, False]


NAMES = """
optimizer.pt optimizer.bin optimizer_0.bin optimizer_12.bin
optimizer_0/.metadata optimizer_1/__0_0.distcp optim/.metadata optimizer/dist_ckpt/__0_0.distcp
optimizer_rank0.bin optimizer_rank_3.pt optim_world_size_2_rank_0.pt optimizer_0.pt optim_0.safetensors
global_step5/zero_pp_rank_0_mp_rank_00_optim_states.pt bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt
expp_rank_0_mp_rank_00_optim_states.pt zero/optimizer_state.pt distrib_optim.pt Optimizer.npz opt_state/d/0f
optimizer.safetensors optimizer/optimizer_pp-0-of-1_dp-0-of-1_tp-0-of-1.pt pytorch_optim-00001.bin
"""
OTHERS = """
model.safetensors scheduler.pt lr_scheduler.pt rng_state.pth random_states_0.pkl optimizer_config.json
model_and_optim/.metadata model_optim_rng.pt optimal.pt options.pt opt-125m/model.safetensors data.pt
trainer_state.json training_args.bin optimizer/config.yaml
"""


def test_names_of_optimizers():
    """Also those of the trainers' records, of all of which an example is here."""
    names, others = NAMES.split(), OTHERS.split()
    forms = [re.compile(trainer.optimizer) for trainer in TRAINERS if trainer.optimizer]
    assert all(any(map(form.fullmatch, names)) for form in forms)
    assert [name for name in names if not holds_optimizer(name)] == []
    assert [name for name in others if holds_optimizer(name)] == []

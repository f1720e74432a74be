"""Names of parameters may have parts of wrappers that the model's state dict leaves out."""

from __future__ import annotations

import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

import ckpt_tools
from ckpt_tools.core.names import without_parts
from ckpt_tools.errors import IncompleteError

PART = "_checkpoint_wrapped_module"


def wrapped(name: str) -> str:
    """As ``named_parameters()`` of torch's ``checkpoint_wrapper`` has it, and its ``state_dict()`` has not."""
    module, _, last = name.rpartition(".")
    return f"{module}.{PART}.{last}" if module else name


def renamed(checkpoint: Path, made: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    shutil.copytree(checkpoint, made)
    for path in made.rglob("*_model_states.pt"):
        content = torch.load(path, weights_only=False)
        change(content)
        torch.save(content, path)
    return made


def wrap(content: dict[str, Any]) -> None:
    for key in ("frozen_param_shapes", "frozen_param_fragments"):
        if content.get(key):
            content[key] = {wrapped(name): value for name, value in content[key].items()}
    content["param_shapes"] = [{wrapped(n): shape for n, shape in group.items()} for group in content["param_shapes"]]
    content["buffer_names"] = [wrapped(name) for name in content["buffer_names"]]
    content["shared_params"] = {wrapped(alias): wrapped(owner) for alias, owner in content["shared_params"].items()}


@pytest.mark.parametrize("kind", ["zero1-fp32", "zero2-fp32", "zero3-bf16"])
def test_wrapped_modules_are_the_same_model(kind, checkpoint, tmp_path):
    plain = checkpoint(kind, "awkward", 2).checkpoint
    made = renamed(plain, tmp_path / "wrapped", wrap)
    assert ckpt_tools.diff(plain, made).equal
    judge = get_fp32_state_dict_from_zero_checkpoint(str(made))
    assert any(PART in name for name in judge)
    found = ckpt_tools.open(made)
    for name, tensor in judge.items():
        ours = found[without_parts(name)].torch().float()
        assert torch.equal(ours.view(torch.int32), tensor.float().view(torch.int32)), name


@pytest.mark.parametrize("kind", ["zero1-fp32", "zero2-fp32", "zero3-bf16"])
def test_a_hook_may_put_a_prefix_before_names(kind, checkpoint, tmp_path):
    def change(content: dict[str, Any]) -> None:
        content["module"] = {f"hooked.{name}": value for name, value in content["module"].items()}

    plain = checkpoint(kind, "awkward", 2).checkpoint
    made = renamed(plain, tmp_path / "hooked", change)
    found = ckpt_tools.open(made)
    assert set(found) == {f"hooked.{name}" for name in ckpt_tools.open(plain)}
    for name, tensor in get_fp32_state_dict_from_zero_checkpoint(str(made)).items():
        ours = found[f"hooked.{name}"].torch().float()
        assert torch.equal(ours.view(torch.int32), tensor.float().view(torch.int32)), name


@pytest.mark.parametrize("hooked", ["other_name", "a.{} b.{}"])
def test_other_names_that_a_hook_gives_are_refused(hooked, checkpoint, tmp_path):
    """A name with nothing in common, and two names that one parameter could have."""

    def change(content: dict[str, Any]) -> None:
        name = next(iter(content["param_shapes"][0]))
        value = content["module"].pop(name)
        content["module"] |= {other.format(name): value for other in hooked.split()}

    made = renamed(checkpoint("zero2-fp32", "awkward", 2).checkpoint, tmp_path / "hooked", change)
    with pytest.raises(IncompleteError, match=r"in param_shapes but not in module: .* a hook of the model"):
        ckpt_tools.inspect(made)


def test_names_of_very_many_parts_cost_no_more_than_others(checkpoint, tmp_path):
    def change(content: dict[str, Any]) -> None:
        name = next(iter(content["param_shapes"][0]))
        value = content["module"].pop(name)
        content["module"] |= {f"{number}.{'a.' * 5_000}{name}": value for number in range(100)}

    made = renamed(checkpoint("zero2-fp32", "awkward", 2).checkpoint, tmp_path / "hooked", change)
    tracemalloc.start()
    with pytest.raises(IncompleteError, match="in param_shapes but not in module"):
        ckpt_tools.inspect(made)
    assert tracemalloc.get_traced_memory()[1] < 100 << 20
    tracemalloc.stop()

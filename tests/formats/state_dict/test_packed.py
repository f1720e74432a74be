"""A whole state in a safetensors file: the user's tensors stay the user's."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch.distributed.checkpoint.state_dict import get_state_dict

import ckpt_tools
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.manifest import Kind, Manifest, StateKey, TensorRef
from ckpt_tools.core.options import ReadOptions
from ckpt_tools.core.values import StorageRef, StoredTensor
from ckpt_tools.errors import FormatError
from ckpt_tools.formats.safetensors.files import STATE_KEY
from ckpt_tools.runs.opening import read_checkpoint
from ckpt_tools.serialization.pickle.load import dumps

RNG = torch.arange(5, dtype=torch.uint8)
EMA = torch.rand(3)


def read(path: Path) -> Manifest:
    return read_checkpoint(path, ReadOptions())[1]


@pytest.fixture
def whole(tmp_path):
    """A state with the user's tensors at the top, in a dict, and in a list."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    weights, state = get_state_dict(model, optimizer)
    own = {"rng": RNG, "ema": {"weight": EMA}, "seeds": ["first", (RNG, EMA), RNG], "best": EMA.double()}
    torch.save({"model": weights, "optim": state, **own}, tmp_path / "in.pt")
    return tmp_path / "in.pt"


def names(manifest: Manifest) -> set[str]:
    return {key.fqn for key in manifest.of_kind(Kind.PARAMETER, Kind.BUFFER)}


def references(value: Any) -> Iterator[TensorRef]:
    if isinstance(value, TensorRef):
        yield value
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ():
        yield from references(part)


def test_the_users_tensors_are_no_weights(whole, tmp_path):
    notes = ckpt_tools.convert(whole, tmp_path / "all.safetensors", state="all").plan.notes
    assert not notes
    manifest = read(tmp_path / "all.safetensors")
    assert names(manifest) == {"weight", "bias"}
    assert len(list(references(dict(manifest.extra)))) == len(list(references(dict(read(whole).extra)))) == 6
    ckpt_tools.convert(tmp_path / "all.safetensors", tmp_path / "model.safetensors")
    assert set(safetensors.torch.load_file(tmp_path / "model.safetensors")) == {"weight", "bias"}


def test_they_come_back_with_their_bits(whole, tmp_path):
    ckpt_tools.convert(whole, tmp_path / "all.safetensors", state="all")
    ckpt_tools.convert(tmp_path / "all.safetensors", tmp_path / "back.pt", state="all")
    found = torch.load(tmp_path / "back.pt", weights_only=True)
    assert torch.equal(found["rng"], RNG) and torch.equal(found["ema"]["weight"], EMA)
    assert torch.equal(found["best"], EMA.double())
    assert found["seeds"][0] == "first"
    assert torch.equal(found["seeds"][1][0], RNG) and torch.equal(found["seeds"][1][1], EMA)
    assert ckpt_tools.diff(whole, tmp_path / "back.pt").equal


def packed(text: bytes, tmp_path: Path) -> Path:
    """A file with a state of its own making."""
    tensors = {"w": torch.ones(2), "optim.state.w.exp_avg": torch.zeros(2), "rng": RNG}
    metadata = {STATE_KEY: base64.b64encode(text).decode()}
    safetensors.torch.save_file(tensors, tmp_path / "x.safetensors", metadata=metadata)
    return tmp_path / "x.safetensors"


PATHS = {"w": ("w",), "optim.state.w.exp_avg": ("optim", "state", "w", "exp_avg"), "rng": ("rng",)}
PATHS |= {"optim.param_groups.0.params": ("optim", "param_groups", 0, "params"), "seeds": ("seeds",)}
OBJECTS: dict[str, Any] = {"optim.param_groups.0.params": ["w"], "seeds": [1]}


def test_a_file_of_an_older_version_opens_as_it_did(tmp_path):
    """It does not say which tensors are the user's, so that all at the top are weights."""
    manifest = read(packed(dumps({"paths": PATHS, "objects": OBJECTS}), tmp_path))
    assert names(manifest) == {"w", "rng"}
    assert manifest.extra == {"seeds": [1]} and StateKey("w", "exp_avg") in manifest.tensors


def _tensor(name: str, dtype: DType = DType.UINT8, numel: int = 5) -> StoredTensor:
    return StoredTensor(StorageRef.holding(name, dtype, numel), dtype, 0, (numel,), (1,))


@pytest.mark.parametrize(
    "changed",
    [
        {"own": "rng"},
        {"own": [1]},
        {"objects": {**OBJECTS, "seeds": [_tensor("absent")]}},
        {"objects": {**OBJECTS, "seeds": [_tensor("rng", numel=4)]}},
        {"objects": {**OBJECTS, "seeds": [_tensor("rng", DType.INT8)]}},
    ],
)
def test_what_does_not_fit_the_file_is_an_error(changed, tmp_path):
    with pytest.raises(FormatError):
        read(packed(dumps({"paths": PATHS, "objects": OBJECTS, "own": ["rng"], **changed}), tmp_path))


def test_names_in_the_list_that_are_no_tensors_mean_nothing(tmp_path):
    content = {"paths": PATHS, "objects": OBJECTS, "own": ["rng", "other", "seeds"]}
    assert names(read(packed(dumps(content), tmp_path))) == {"w"}

"""Odd names of tensors: a format that cannot hold one refuses it before anything is written; else it is read back, by
our reader and by the library that the format belongs to."""

from collections.abc import Callable, Collection
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from gguf import GGUFReader
from safetensors import safe_open

import ckpt_tools
from ckpt_tools.errors import CkptError, UnsafeError
from ckpt_tools.formats.index import load_all_formats

NAMES = [
    "__metadata__", "", " ", ".", "..", "/", "/abs", "a/b", "b/", "a//b", "../x", "a/../b", ".hidden", "..a", "a\0b",
    "\0", "a\nb", "a\\b", "a://b", "C:x", "-", "x" * 255, "x" * 256, "é" * 128, "größe", "a.npy", ".npy", "b.pt", "a.",
    "b.pt/a", "optimizer_state.pt", "param_groups", "state", "model", "optimizer", "step", "0", "ckpt_tools.state",
    "format", "general.architecture", "data.pkl", "\U0001f600",
]  # fmt: skip

ENDINGS = {"safetensors": ".safetensors", "torch": ".pt", "npz": ".npz", "gguf": ".gguf"}


def of_safetensors(path: Path) -> Collection[str]:
    with safe_open(path, "np") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def of_dcp(path: Path) -> Collection[str]:
    names = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    state = {name: torch.zeros(2, 2) if name != "ok.weight" else torch.zeros(2) for name in names}
    dcp.load(state, checkpoint_id=path)
    assert torch.equal(state["ok.weight"], torch.ones(2))
    return state


def of_npz(path: Path) -> Collection[str]:
    with np.load(path) as arrays:
        return {name: arrays[name] for name in arrays.files}


JUDGES: dict[str, Callable[[Path], Collection[str]]] = {
    "safetensors": of_safetensors,
    "torch": lambda path: torch.load(path, weights_only=True),
    "npz": of_npz,
    "gguf": lambda path: {tensor.name for tensor in GGUFReader(path).tensors},
    "dcp": of_dcp,
}

TARGETS = [each.name for each in load_all_formats() if each.writes and each.name not in ("meta", "peft", "deepspeed")]


FEW = {"__metadata__", "", ".", "/abs", "../x", "a\0b", "a://b", "x" * 255, "x" * 256, "b.pt/a", "optimizer_state.pt"}
FEW |= {"größe", "a.npy", "param_groups"}
"""One name of each kind, with which ``make test`` tries every format."""


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folder = tmp_path_factory.mktemp("names")
    for number, name in enumerate(NAMES):
        torch.save({name: torch.full((2, 2), 3.0), "ok.weight": torch.ones(2)}, folder / f"{number}.pt")
    return {name: folder / f"{number}.pt" for number, name in enumerate(NAMES)}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("names", [FEW, pytest.param({*NAMES} - FEW, marks=pytest.mark.extended)], ids=["few", "more"])
@pytest.mark.parametrize("to", TARGETS)
def test_a_name_is_read_back_or_refused_before_writing(to, names, sources, tmp_path):
    refused: dict[str, CkptError] = {}
    for number, name in enumerate(names):
        source = sources[name]
        out = tmp_path / f"{number}{ENDINGS.get(to, '')}"
        try:
            ckpt_tools.convert(source, out, to=to)  # type: ignore[arg-type]
        except CkptError as error:
            refused[name] = error
            continue
        assert ckpt_tools.verify(source, out).equal, name
        assert name in ckpt_tools.open(out)
        if to in JUDGES:
            assert set(JUDGES[to](out)) == {name, "ok.weight"}
    longest = {"x" * 256, "é" * 128}
    climbing = {"..", "/", "/abs", "../x", "a/../b", "a\0b", "\0", "a\\b"}
    wanted = {
        "safetensors": {"__metadata__"},
        "npz": {"", *climbing} - {".."},  # "...npy" is a name like any other
        "gguf": {"x" * 255, "a\0b", "\0", *longest},
        "universal": {"", ".", "b/", "a//b", "a://b", ".hidden", "..a", ".npy", *climbing, *longest}
        | {"b.pt", "b.pt/a", "optimizer_state.pt"},
    }
    assert refused.keys() == wanted.get(to, set()) & names
    leading_out = {name for name, error in refused.items() if isinstance(error, UnsafeError)}
    assert leading_out <= {*climbing, "a://b"}
    others = [error for name, error in refused.items() if name not in leading_out]
    assert all(error.exit_code == 4 and "rename" in str(error) for error in others), refused
    assert len(list(tmp_path.iterdir())) == len(names) - len(refused), "nothing is left of what is refused"


def test_two_names_of_which_numpy_would_take_the_other(tmp_path):
    torch.save({"a": torch.ones(2), "a.npy": torch.zeros(2)}, tmp_path / "in.pt")
    with pytest.raises(CkptError, match=r"'a\.npy', which cannot be a member of npz"):
        ckpt_tools.convert(tmp_path / "in.pt", tmp_path / "out.npz")

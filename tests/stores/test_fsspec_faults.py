"""A store of fsspec that is full, or whose files fail as they close: the old output stays, or the new one is kept."""

import errno
import os
import re
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem

import ckpt_tools
from ckpt_tools.errors import StoreError

pytestmark = pytest.mark.extended

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class FailingFile(MemoryFile):
    """Says only as it is closed that its bytes are lost."""

    def close(self) -> None:
        raise FULL


class FillingFileSystem(MemoryFileSystem):
    """A store that has room for so many files more, and that fails in one of its moves."""

    protocol = ("filling",)
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    files, moves, failing_move = 1000, 0, -1

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.removeprefix("filling:/"))

    def mv(self, old: str, new: str, **more: Any) -> None:
        type(self).moves += 1
        if type(self).moves - 1 == type(self).failing_move:
            raise FULL
        super().mv(old, new, **more)

    def _open(self, path: str, mode: str = "rb", **more: Any) -> Any:
        opened = super()._open(path, mode, **more)
        if mode == "wb":
            type(self).files -= 1
            if type(self).files < 0:
                return FailingFile(self, path)
        return opened


@pytest.fixture
def filling():
    fsspec.register_implementation("filling", FillingFileSystem, clobber=True)
    FillingFileSystem.store.clear()
    FillingFileSystem.pseudo_dirs[:] = [""]
    FillingFileSystem.files, FillingFileSystem.moves, FillingFileSystem.failing_move = 1000, 0, -1
    return FillingFileSystem


@pytest.fixture
def weights(tmp_path):
    torch.save({name: torch.rand(50, 50) for name in "abc"}, tmp_path / "weights.pt")
    return tmp_path / "weights.pt"


def files() -> dict[str, bytes]:
    fs = fsspec.filesystem("filling")
    return {path: fs.cat_file(path) for path in fs.find("/")}


def make(weights: Path, *, overwrite: bool = False, world_size: int = 3) -> None:
    ckpt_tools.convert(weights, "filling://run/out", to="dcp", world_size=world_size, overwrite=overwrite)


@pytest.mark.parametrize("num_files", [0, 2, 3])
@pytest.mark.parametrize("overwrite", [False, True], ids=["fresh", "overwrite"])
def test_files_that_cannot_be_closed(num_files, overwrite, filling, weights):
    if overwrite:
        make(weights, world_size=1)
    before, filling.files = files(), num_files
    with pytest.raises(StoreError, match=r"writing failed: .*No space left on device") as caught:
        make(weights, overwrite=overwrite)
    assert (caught.value.exit_code, files()) == (5, before)


@pytest.mark.parametrize("move", [0, 1, 3])
def test_moves_that_fail_leave_nothing_or_keep_what_was_to_replace_something(move, filling, weights):
    """It is moved back where that is possible."""
    filling.failing_move = move
    with pytest.raises(StoreError, match=r"No space left on device$") as caught:
        make(weights)
    assert (caught.value.exit_code, files()) == (5, {})
    make(weights)
    expected = {path.removeprefix("/run/out/"): data for path, data in files().items()}
    make(weights, overwrite=True, world_size=1)
    filling.failing_move = filling.moves + move
    with pytest.raises(StoreError, match=r"No space left on device; the old checkpoint is being replaced") as caught:
        make(weights, overwrite=True)
    staging = re.search(r"kept in filling:/+(run/out/\.ckpt-tools-partial/\w+): move", str(caught.value))
    assert staging is not None
    assert {path.removeprefix(f"/{staging[1]}/"): data for path, data in files().items()} == expected
    ckpt_tools.clean("filling://run/out")
    assert files() == {}


def test_a_file_that_cannot_be_replaced_stays(filling, weights):
    ckpt_tools.convert(weights, "filling://run/out.safetensors")
    before, filling.failing_move = files(), filling.moves
    with pytest.raises(StoreError, match=r"No space left on device$"):
        ckpt_tools.convert(weights, "filling://run/out.safetensors", dtype="bfloat16", overwrite=True)
    assert files() == before

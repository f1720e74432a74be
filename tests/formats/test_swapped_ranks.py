"""A rank's file under another rank's name is refused: only the archive's own name tells."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

import ckpt_tools
from ckpt_tools.errors import MalformedError


@pytest.mark.parametrize("kind", ["zero1-fp32", "zero2-fp32", "zero3-bf16"])
def test_swapped_ranks_are_refused(kind: str, checkpoint: Any, tmp_path: Path) -> None:
    shutil.copytree(checkpoint(kind, "awkward", 2).checkpoint, tmp_path / "run")
    one, other = sorted((tmp_path / "run").rglob("*optim_states.pt"))
    data = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(data)
    with pytest.raises(MalformedError, match=r"it was saved as .*rank_1_mp_rank_00.*another rank's"):
        ckpt_tools.inspect(tmp_path / "run")


def test_what_we_write_keeps_its_names(checkpoint: Any, tmp_path: Path) -> None:
    ckpt_tools.convert(checkpoint("fsdp2", "plain", 2).checkpoint, tmp_path / "run", to="zero3", world_size=3)
    assert ckpt_tools.inspect(tmp_path / "run").world_size == 3

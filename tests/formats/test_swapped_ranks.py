"""A rank's file under another rank's name is refused: only the archive's own name tells."""

from __future__ import annotations

import shutil
import zipfile

import pytest
import torch

import ckpt_tools
from ckpt_tools.errors import MalformedError


@pytest.mark.parametrize("kind", ["zero1-fp32", "zero2-fp32", "zero3-bf16"])
def test_swapped_ranks_are_refused(kind, checkpoint, tmp_path):
    shutil.copytree(checkpoint(kind, "awkward", 2).checkpoint, tmp_path / "run")
    one, other = sorted((tmp_path / "run").rglob("*optim_states.pt"))
    data = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(data)
    with pytest.raises(MalformedError, match=r"it was saved as .*rank_1_mp_rank_00.*another rank's"):
        ckpt_tools.inspect(tmp_path / "run")


@pytest.mark.parametrize("kind", ["zero1", "zero2", "zero3"])
@pytest.mark.parametrize("names", ["*_optim_states.pt", "zero_pp_rank_*_model_states.pt"])
def test_swapped_ranks_of_what_we_wrote_are_refused(kind, names, checkpoint, tmp_path):
    """More than ten ranks, whose names are of two lengths."""
    ckpt_tools.convert(checkpoint("fsdp2", "awkward", 2).checkpoint, tmp_path / "run", to=kind, world_size=12)  # type: ignore[arg-type]
    files = sorted((tmp_path / "run").rglob(names))
    assert bool(files) == (kind == "zero3" or "optim" in names)
    for path in files:
        records = zipfile.ZipFile(path).namelist()
        assert {name.partition("/")[0] for name in records} == {path.stem}, "as torch.save names them"
        assert torch.load(path, weights_only=False)
    for one, other in [files[:2], files[-2:]] if files else []:
        one.rename(tmp_path / "aside"), other.rename(one), (tmp_path / "aside").rename(other)
        with pytest.raises(MalformedError, match=r"it was saved as .*rank_\d+_mp_rank_00.*another rank's"):
            ckpt_tools.inspect(tmp_path / "run")
        one.rename(tmp_path / "aside"), other.rename(one), (tmp_path / "aside").rename(other)
    assert ckpt_tools.inspect(tmp_path / "run").world_size == 12


def test_what_we_write_keeps_its_names(checkpoint, tmp_path):
    ckpt_tools.convert(checkpoint("fsdp2", "plain", 2).checkpoint, tmp_path / "run", to="zero3", world_size=3)
    assert ckpt_tools.inspect(tmp_path / "run").world_size == 3

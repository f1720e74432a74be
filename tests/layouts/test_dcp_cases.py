"""States and writers of torch's own tests of DCP, read exactly. The judge is torch's own loader."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

import ckpt_tools
from ckpt_tools.core.manifest import StateKey
from ckpt_tools.errors import MalformedError
from fixtures import dcp_cases
from tests.layouts.contents import Contents, contents, of_tensor

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.extended]

SAMPLE = ("placements-of-two-dims", "sharded-tensors", "pipeline", "experts", "nested", "dtypes", "over-more-ranks")
"""In the normal run; ``--soak`` runs all."""

BY_NUMBER = ("ddp", "ddp-unflattened")
"""Their optimizers number parameters. ckpt-tools writes names, if it can prove them."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        every = [name for name, case in dcp_cases.CASES.items() if case.is_dcp and name not in BY_NUMBER]
        metafunc.parametrize("case", every if metafunc.config.getoption("--soak") else SAMPLE)


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """The leaves of a tree in a form that can be compared, tensors as their bits."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else None
    if inner is not None:
        for key, item in inner:
            yield from leaves(item, (*path, key))
    elif isinstance(value, torch.Tensor):
        yield path, of_tensor(value)
    else:
        yield path, value.getvalue() if isinstance(value, io.BytesIO) else value


def as_torch_loads(folder: Path, out: Path) -> dict[tuple[Any, ...], Any]:
    dcp_to_torch_save(folder, out)
    return dict(leaves(torch.load(out, weights_only=False)))


def test_it_is_what_torch_loads(case, tmp_path):
    """Written again for other ranks; of tensors, each one that ckpt-tools reads is one that torch gives."""
    source, _ = dcp_cases.made(case)
    wanted = as_torch_loads(source, tmp_path / "wanted.pt")
    ckpt_tools.convert(source, tmp_path / "out", to="dcp")
    assert as_torch_loads(tmp_path / "out", tmp_path / "found.pt") == wanted
    tensors = [value for value in wanted.values() if isinstance(value, tuple)]
    assert tensors and all(found in tensors for found in contents(source)[1].values())


def moments(name: str) -> tuple[Contents, Contents]:
    """First moments that ckpt-tools reads, and those of the optimizer, by the names of their parameters."""
    source, truth = dcp_cases.made(name)
    found = {key: value for key, value in contents(source)[1].items() if key.slot == "exp_avg"}
    return found, {StateKey(name, "exp_avg"): of_tensor(tensor) for name, tensor in truth.items()}


def test_an_optimizer_by_number_has_the_order_of_the_saved_state_dict():
    """torch lists tensors that every rank has by the rank that writes each."""
    found, truth = moments("ddp")
    assert found == truth


def test_in_no_order_numbers_are_not_names():
    found, truth = moments("ddp-unflattened")
    assert truth and not found
    (note,) = ckpt_tools.inspect(dcp_cases.made("ddp-unflattened")[0]).notes
    assert note.what == "optim" and "nothing here proves which ones are meant" in note.why


@pytest.mark.parametrize("name", ["hf-pieces", "hf-consolidated"])
def test_safetensors_of_ranks_are_what_torchs_reader_gives(name, tmp_path):
    source, _ = dcp_cases.made(name)
    reader = HuggingFaceStorageReader(str(source))
    state = _load_state_dict_from_keys(storage_reader=reader, checkpoint_id=source)
    wanted = {StateKey(name): of_tensor(tensor) for name, tensor in state.items()}
    assert contents(source)[1] == wanted
    ckpt_tools.consolidate(source, tmp_path / "out.safetensors")
    assert {StateKey(name): of_tensor(each) for name, each in load_file(tmp_path / "out.safetensors").items()} == wanted


def test_shards_of_an_earlier_save_are_named():
    with pytest.raises(
        MalformedError, match=r"^shard-0000\d-\S+: w: .* overlap; files of an earlier save by more ranks"
    ):
        ckpt_tools.inspect(dcp_cases.made("hf-over-more-ranks")[0])

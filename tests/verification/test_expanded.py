"""Tensors that are far larger than the files that hold them are refused before any work, by every command that would
read their elements. Those that models keep, such as a mask expanded over a batch, are used.
"""

import json
import pickle
import resource
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo

import ckpt_tools
from ckpt_tools.errors import FormatError, UnsupportedError
from tests.serialization.archives import saved, zipped
from tests.support.cost import slowness
from tests.support.sweep import tiered

HUGE = 1 << 60
COMMANDS: dict[str, Callable[[Path, Path], object]] = {
    "convert": lambda path, out: ckpt_tools.convert(path, out / "out.safetensors"),
    "convert whole": lambda path, out: ckpt_tools.convert(path, out / "whole.pt", state="all"),
    "plan": lambda path, out: ckpt_tools.plan(path, out / "out.safetensors"),
    "reshard": lambda path, out: ckpt_tools.convert(path, out / "dcp", to="dcp"),
    "diff": lambda path, out: ckpt_tools.diff(path, path),
    "verify": lambda path, out: ckpt_tools.verify(path),
    "verify pair": lambda path, out: ckpt_tools.verify(path, path),
    "checksum": lambda path, out: ckpt_tools.checksum(path, output="-"),
    "inspect": lambda path, out: ckpt_tools.inspect(path, stats=True),
}
Files = dict[str, bytes]


def expanded(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(1, dtype=dtype).expand(shape)


def pt(value: object, **options: Any) -> Files:
    return {"a.pt": saved(value, **options)}


def dcp_files(size: tuple[int, ...], item: bytes | None, shape: tuple[int, ...] | None = None) -> Files:
    """A DCP of one tensor of this size, in one item or in none."""
    origin = torch.Size([0] * len(size))
    chunks = [dcp.ChunkStorageMetadata(origin, torch.Size(shape or size))] if item else []
    tensor = dcp.TensorStorageMetadata(dcp.TensorProperties(torch.float32), torch.Size(size), chunks)
    at = {dcp.MetadataIndex("a", origin, 0): _StorageInfo("__0_0.distcp", 0, len(item))} if item else {}
    return {".metadata": pickle.dumps(dcp.Metadata({"a": tensor}, {}, at)), "__0_0.distcp": item or b""}


def safetensors(*shape: int) -> Files:
    header = json.dumps({"a": {"dtype": "F32", "shape": shape, "data_offsets": [0, 64]}}).encode()
    return {"a.safetensors": struct.pack("<Q", len(header)) + header + bytes(64)}


def npz(*shape: int) -> Files:
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    data = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode() + bytes(64)
    return {"a.npz": zipped({"a.npy": data})}


def gguf(*dims: int) -> Files:
    name = b"a"
    head = b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + struct.pack("<Q", len(name)) + name
    data = head + struct.pack("<I", len(dims)) + struct.pack(f"<{len(dims)}Q", *dims) + struct.pack("<IQ", 0, 0)
    return {"a.gguf": data + bytes(-len(data) % 32) + bytes(64)}


def universal(fp32: torch.Tensor) -> Files:
    zero = {f"zero/a/{name}.pt": saved({"param": fp32}) for name in ("fp32", "exp_avg", "exp_avg_sq")}
    head = saved({"module": {"a": torch.zeros(1)}, "param_shapes": [{"a": torch.Size(fp32.shape)}]})
    return {**zero, "mp_rank_00_model_states.pt": head}


def optimizer_state(state: torch.Tensor) -> object:
    adam = {"state": {"a": {"exp_avg": state, "exp_avg_sq": state}}, "param_groups": [{"params": ["a"], "lr": 0.1}]}
    return {"model": {"a": state}, "optimizer": adam}


BASE = torch.ones(1000)
VARIANTS: dict[str, Callable[[], Files]] = {
    "one dim": lambda: pt({"a": expanded(HUGE)}),
    "the most bytes": lambda: pt({"a": expanded(1 << 62, dtype=torch.uint8)}),
    "many dims": lambda: pt({"a": expanded(*[1 << 4] * 15)}),
    "an inner dim": lambda: pt({"a": torch.ones(1000, 1).expand(1000, 1 << 40)}),
    "an outer dim": lambda: pt({"a": BASE.expand(1 << 40, 1000)}),
    "some of many": lambda: pt({"a": expanded(1 << 50), "b": torch.ones(3)}),
    "many that are 1 GiB": lambda: pt({f"{number}": expanded(1 << 28) for number in range(1000)}),
    "bool": lambda: pt({"mask": expanded(1 << 55, dtype=torch.bool)}),
    "overlapping windows": lambda: pt({"a": torch.ones(100_000).as_strided((1 << 40, 10), (0, 1))}),
    "windows by one": lambda: pt({"a": torch.ones(100_000).as_strided((50_000, 50_000), (1, 1))}),
    "legacy": lambda: pt({"a": expanded(HUGE)}, _use_new_zipfile_serialization=False),
    "a parameter": lambda: pt({"a": torch.nn.Parameter(expanded(HUGE))}),
    "optimizer state": lambda: pt(optimizer_state(expanded(1 << 50))),
    "int8 and its scale": lambda: pt(
        {"a.weight": expanded(1 << 20, 1 << 30, dtype=torch.int8), "a.weight_scale": expanded(1 << 20, 1)}
    ),
    "an item of a DCP": lambda: dcp_files((HUGE,), saved(expanded(HUGE))),
    "a DCP without chunks": lambda: dcp_files((HUGE,), None),
    "a DCP of a small chunk": lambda: dcp_files((HUGE,), saved(torch.ones(4)), shape=(4,)),
    "an item smaller than its index": lambda: dcp_files((HUGE,), saved(torch.ones(4))),
    "universal": lambda: universal(expanded(1 << 50)),
    "sparse": lambda: pt({"a": torch.sparse_coo_tensor([[0], [0]], [1.0], (1 << 40, 1 << 20), check_invariants=True)}),
    "safetensors": lambda: safetensors(1 << 30, 1 << 29),
    "npz": lambda: npz(1 << 30, 1 << 29),
    "gguf": lambda: gguf(1 << 30, 1 << 29),
}
DESCRIBED = [name for name, make in VARIANTS.items() if name.startswith(("one", "two", "many", "an inner", "bool"))]


def written(name: str, folder: Path) -> Path:
    """The one file of a variant, or the folder of several."""
    files = VARIANTS[name]()
    for path, data in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
    assert sum(map(len, files.values())) < 1 << 20
    return folder / next(iter(files)) if len(files) == 1 else folder


FEW = ("one dim", "windows by one", "legacy", "int8 and its scale", "an item of a DCP", "a DCP without chunks",
       "universal", "sparse", "safetensors", "npz", "gguf")  # fmt: skip


@pytest.mark.parametrize("name", tiered(VARIANTS, test=FEW, extended=VARIANTS))
def test_no_command_reads_what_no_file_holds(name, tmp_path):
    path = written(name, tmp_path / "source")
    for use in COMMANDS.values():
        before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
        with pytest.raises(FormatError):
            use(path, tmp_path)
        took = time.process_time() - started
        assert took < 2 or took < 2 * slowness()
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10


@pytest.mark.parametrize("name", tiered(DESCRIBED, test=("one dim", "many dims", "bool"), extended=DESCRIBED))
def test_inspect_describes_it_and_the_others_name_it(name, tmp_path):
    path = written(name, tmp_path / "source")
    assert ckpt_tools.inspect(path).num_bytes > 1 << 30
    with pytest.raises(UnsupportedError, match=r"its tensors have .* as the files have.*exclude="):
        ckpt_tools.convert(path, tmp_path / "out.safetensors")


def test_the_rest_is_converted_without_it(tmp_path):
    path = written("some of many", tmp_path / "source")
    ckpt_tools.convert(path, tmp_path / "out.safetensors", exclude=["a"])
    assert list(ckpt_tools.open(tmp_path / "out.safetensors")) == ["b"]


def test_what_models_expand_is_used(tmp_path):
    rotary = torch.arange(64.0).expand(2048, 64)
    mask = torch.ones(256, 256, dtype=torch.bool).tril().expand(64, 1, 256, 256)
    torch.save({"rotary": rotary, "mask": mask, "w": torch.ones(4)}, tmp_path / "a.pt")
    ckpt_tools.convert(tmp_path / "a.pt", tmp_path / "out.safetensors")
    found = ckpt_tools.open(tmp_path / "out.safetensors")
    assert np.array_equal(found["rotary"].numpy(), rotary.numpy())
    assert np.array_equal(found["mask"].numpy(), mask.numpy())

"""What the small checkpoints of ``tests/corpus`` are made of, for tests that change their content and save it again.

A checkpoint here is a mapping of relative names to bytes. Each holds a few tensors of different kinds, so that a
mutation has something to hit and an execution costs little.
"""

import io
import pickle
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo

from tests.end_to_end.fuzzing import corpus
from tests.formats.deepspeed import zero_files

Files = dict[str, bytes]


def torch_bytes(value: Any, **options: Any) -> bytes:
    out = io.BytesIO()
    torch.save(value, out, **options)
    return out.getvalue()


def tensors() -> dict[str, Tensor]:
    """Two matrices, a vector, a scalar, and one without elements."""
    return {
        "a.weight": torch.arange(12, dtype=torch.float32).reshape(4, 3),
        "a.bias": torch.arange(4, dtype=torch.bfloat16),
        "b.weight": torch.arange(6, dtype=torch.float64).reshape(3, 2),
        "count": torch.tensor(2**53 + 1),
        "empty": torch.empty(0, 3),
    }


# DCP


class DcpFolder:
    """A DCP being made, item by item, with torch's own metadata classes."""

    def __init__(self) -> None:
        self.files: dict[str, bytearray] = {}
        self.metadata = dcp.Metadata({}, {}, {}, dcp.StorageMeta())

    def add_tensor(self, path: tuple[Any, ...], tensor: Tensor, rows: list[int]) -> None:
        """``rows`` are where the chunks begin; chunk i goes to rank i's file."""
        fqn, chunks = ".".join(map(str, path)), []
        for rank, (start, stop) in enumerate(
            zip(rows, [*rows[1:], tensor.shape[0] if tensor.dim() else 1], strict=True)
        ):
            piece = tensor[start:stop].clone() if tensor.dim() else tensor
            offsets = torch.Size([start] + [0] * (tensor.dim() - 1) if tensor.dim() else [])
            chunks.append(dcp.ChunkStorageMetadata(offsets, piece.shape))
            self._store(dcp.MetadataIndex(fqn, offsets, rank), torch_bytes(piece), rank)
        properties = dcp.TensorProperties(dtype=tensor.dtype)
        self.metadata.state_dict_metadata[fqn] = dcp.TensorStorageMetadata(properties, tensor.shape, chunks)
        self.metadata.planner_data[fqn] = path

    def add_object(self, path: tuple[Any, ...], value: Any) -> None:
        self.add_raw(path, torch_bytes(value))

    def add_raw(self, path: tuple[Any, ...], item: bytes) -> None:
        """An object whose item is ``item``, whatever that is."""
        fqn = ".".join(map(str, path))
        self._store(dcp.MetadataIndex(fqn), item, 0)
        self.metadata.state_dict_metadata[fqn] = dcp.BytesStorageMetadata()
        self.metadata.planner_data[fqn] = path

    def _store(self, index: dcp.MetadataIndex, item: bytes, rank: int) -> None:
        file = self.files.setdefault(f"__{rank}_0.distcp", bytearray())
        self.metadata.storage_data[index] = _StorageInfo(f"__{rank}_0.distcp", len(file), len(item))
        file += item

    def saved(self) -> Files:
        return {**{name: bytes(data) for name, data in self.files.items()}, ".metadata": pickle.dumps(self.metadata)}


def dcp_folder() -> DcpFolder:
    """Rows over two ranks, an optimizer of groups, a 0-d tensor, and objects, one of them with a tensor inside."""
    folder = DcpFolder()
    for name, tensor in list(tensors().items())[:2]:
        folder.add_tensor(("model", name), tensor, [0, 2])
        folder.add_tensor(("optim", "state", name, "exp_avg"), torch.ones_like(tensor), [0, 3])
    folder.add_tensor(("optim", "state", "a.weight", "step"), torch.tensor(4.0), [0])
    folder.add_object(("optim", "param_groups", 0, "params"), ["a.weight", "a.bias"])
    folder.add_object(("optim", "param_groups", 0, "lr"), 0.1)
    folder.add_object(("client",), {"epoch": 3, "inner": torch.arange(3.0)})
    return folder


# Files of torch


def loaded(name: str) -> dict[str, Any]:
    """The files of a checkpoint of the corpus as they were handed to torch."""
    files = corpus.seeds()[name].items()
    return {
        path: torch.load(io.BytesIO(data), weights_only=False) if path.endswith(".pt") else data for path, data in files
    }


def saved(files: Mapping[str, Any]) -> Files:
    return {path: bytes(data) for path, data in zero_files.store_of(dict(files)).files.items()}


SEEDS = (
    *("safetensors", "safetensors_sharded", "safetensors_pieces", "safetensors_state", "safetensors_companions"),
    *("torch", "torch_training", "torch_sharded", "dcp", "dcp_flattened"),
    *("zero1", "zero2", "zero3", "universal", "universal_stage3"),
)
"""Of the corpus, a checkpoint of each format and flavour."""

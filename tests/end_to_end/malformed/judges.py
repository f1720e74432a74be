"""The reference libraries: what they read in the same files, or that they refuse."""

from __future__ import annotations

import io
import json
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

Files = Mapping[str, bytes]
Read = set[tuple[str, tuple[int, ...], bytes]]
"""Tensors by dtype, shape and bytes; names are another matter."""


class RefusedError(Exception):
    """The library does not read it."""


def read(family: str, files: Files, folder: Path) -> Read:
    """Raises RefusedError."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return {_described(tensor) for tensor in _READERS[family](files, folder) if tensor.numel() < 1 << 16}
    except (Exception, CheckpointException) as error:
        raise RefusedError(f"{type(error).__name__}: {error}") from error


def _described(tensor: Tensor) -> tuple[str, tuple[int, ...], bytes]:
    flat = tensor.detach().contiguous().reshape(-1)
    raw = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), raw


def _of_safetensors(files: Files, folder: Path) -> Iterator[Tensor]:
    for data in _parts(files, ".safetensors"):
        yield from safetensors.torch.load(data).values()


def _of_torch(files: Files, folder: Path) -> Iterator[Tensor]:
    for data in _parts(files, (".pt", ".bin")):
        yield from _tensors(torch.load(io.BytesIO(data), map_location="cpu", weights_only=True))


def _parts(files: Files, suffix: str | tuple[str, ...]) -> Iterator[bytes]:
    """The files that the index names; all where there is none."""
    index = next((path for path in files if path.endswith(".index.json")), None)
    names = files if index is None else dict.fromkeys(json.loads(files[index])["weight_map"].values())
    yield from (files[name] for name in names if name.endswith(suffix))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in [*value, *value.values()] if isinstance(value, dict) else value:
            yield from _tensors(item)


def _of_dcp(files: Files, folder: Path) -> Iterator[Tensor]:
    for path, data in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
    state: dict[str, Any] = {}
    _load_state_dict(state, FileSystemReader(folder), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    yield from _tensors(state)


_READERS = {"safetensors": _of_safetensors, "torch": _of_torch, "dcp": _of_dcp}

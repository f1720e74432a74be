"""What a malformed checkpoint is: its files, and what may come of reading it; and the reference libraries: what they
read in the same files, or that they refuse."""

import io
import json
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from ckpt_tools.errors import CkptError, FormatError
from tests.end_to_end.fuzzing import corpus
from tests.support.files import write_files

Files = Mapping[str, bytes]
Errors = tuple[type[CkptError], ...]


@dataclass(frozen=True, slots=True)
class Case:
    """``family`` names the judge: the library that reads the same files; ``errors`` are those that may be raised.

    What is read in spite of the damage has to be what the judge reads, unless ``must_fail``.
    """

    family: str
    rule: str
    name: str
    files: Files = field(repr=False)
    errors: Errors = (FormatError,)
    must_fail: bool = True

    def __str__(self) -> str:
        return f"{self.family}: {self.rule}: {self.name}"


def seed(name: str) -> Files:
    return corpus.seeds()[name]


def family_of(name: str) -> str:
    """``safetensors``, ``torch``, ``dcp``, ``zero`` or ``universal``."""
    return name.partition("_")[0].rstrip("123")


NUMBERS = (-1, -(2**31), -(2**63), 2**31, 2**32, 2**53, 2**60, 2**62, 2**63 - 1, 2**63, 2**64, 10**400)
"""Counts that nobody has, or that overflow something."""

ODDITIES: tuple[Any, ...] = (None, True, 0, -1, 2**62, 0.5, float("nan"), "x", "", [], [[]], {}, (), {"a": 1}, b"x")
"""Values in the place of others."""

HOSTILE_NAMES = (
    "..", "../x", "../../x.safetensors", "a/../../x", "/etc/passwd", "//x", "C:\\x", "C:x", "c:/x", "a\\b", "..\\x",
    "a\0b", "\0", "http://host/x", "file:///etc/passwd", "s3://bucket/x", "hf://x/y", "x/..", "a/b/../../../c",
)  # fmt: skip
"""Names that lead out of a folder somewhere."""

# The reference libraries

Read = set[tuple[str, tuple[int, ...], bytes]]
"""Tensors by dtype, shape and bytes; names are another matter."""


class RefusedError(Exception):
    """The library does not read it."""


def read_by_library(family: str, files: Files, folder: Path) -> Read:
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
    write_files(folder, files)
    state: dict[str, Any] = {}
    _load_state_dict(state, FileSystemReader(folder), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    yield from _tensors(state)


_READERS = {"safetensors": _of_safetensors, "torch": _of_torch, "dcp": _of_dcp}

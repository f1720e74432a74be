"""Every format we know, and which of them a source is in.

Formats are imported when they are first asked for, so that asking for help costs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

from ckpt_tools.errors import MalformedError, SourceNotFoundError, UnsupportedError, UsageError
from ckpt_tools.format.base import Reader, ReadOptions, Writer
from ckpt_tools.manifest import Manifest
from ckpt_tools.stores.base import Source

Format = TypeVar("Format")


@dataclass(frozen=True, slots=True)
class FormatInfo:
    """One row of the table of formats."""

    name: str
    reads: bool
    writes: bool
    holds: str
    about: str

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "read": self.reads, "write": self.writes, "holds": self.holds, "about": self.about}


@dataclass(frozen=True, slots=True)
class _Bounded:
    """A reader of values that refer to each other in circles, which can make any walk through them deep."""

    reader: Reader

    @property
    def name(self) -> str:
        return self.reader.name

    def detect(self, source: Source) -> bool:
        return self.reader.detect(source)

    def read_manifest(self, source: Source, options: ReadOptions) -> Manifest:
        try:
            return self.reader.read_manifest(source, options)
        except RecursionError as error:
            raise MalformedError(f"{source.store.url} holds values that lie too deep inside each other") from error


@cache
def readers() -> Mapping[str, Reader]:
    """Readers by name, the most telling first: their order is the order of detection."""
    from ckpt_tools.format.dcp import DcpReader
    from ckpt_tools.format.deepspeed import DeepSpeedReader
    from ckpt_tools.format.safetensors import SafetensorsReader
    from ckpt_tools.format.torch_file import TorchReader
    from ckpt_tools.format.universal import UniversalReader

    found: list[Reader] = [DcpReader(), UniversalReader(), DeepSpeedReader(), SafetensorsReader(), TorchReader()]
    return {reader.name: _Bounded(reader) for reader in found}


@cache
def writers() -> Mapping[str, Writer]:
    """Writers by the names that ``--to`` takes."""
    from ckpt_tools.format.dcp import DcpWriter
    from ckpt_tools.format.safetensors import SafetensorsWriter
    from ckpt_tools.format.torch_file import TorchWriter
    from ckpt_tools.format.universal import UniversalWriter
    from ckpt_tools.format.zero_writer import ZeroWriter

    zero: list[Writer] = [ZeroWriter(stage) for stage in (1, 2, 3)]
    found: list[Writer] = [SafetensorsWriter(), TorchWriter(), DcpWriter(), *zero, UniversalWriter()]
    return {writer.name: writer for writer in found}


_ABOUT = {
    "dcp": "PyTorch Distributed Checkpoint: a .metadata file and __R_N.distcp files (FSDP2 and others)",
    "zero1": "DeepSpeed ZeRO-1: a tag folder of *_model_states.pt and *_optim_states.pt, and the file latest",
    "zero2": "DeepSpeed ZeRO-2",
    "zero3": "DeepSpeed ZeRO-3",
    "universal": "DeepSpeed universal: a tag folder with zero/<parameter>/fp32.pt, ..., and latest_universal",
    "safetensors": "one .safetensors file, or Hugging Face shards with their index",
    "torch": "a full state dict of torch.save: .pt, .pth, .bin, or .bin shards with their index",
}

_READ_AS = {"zero1": "deepspeed", "zero2": "deepspeed", "zero3": "deepspeed"}
"""Formats that one reader tells apart by what it finds."""


def table() -> tuple[FormatInfo, ...]:
    """Every format, by the names that ``--to`` takes."""
    return tuple(
        FormatInfo(
            name,
            _READ_AS.get(name, name) in readers(),
            name in writers(),
            "whole state" if writers()[name].holds_optimizer else "weights; whole state if asked",
            about,
        )
        for name, about in _ABOUT.items()
    )


def reader_for(source: Source, name: str | None) -> Reader:
    """The reader called ``name``, or the one that recognises ``source``.

    Raises:
        UsageError: no such format; SourceNotFoundError: an empty folder; UnsupportedError: nobody recognises it.
    """
    if name is not None:
        return _named(readers(), _READ_AS.get(name, name), "read")
    if not source.files:
        raise SourceNotFoundError(f"{source.store.url} is an empty folder")
    for reader in readers().values():
        if reader.detect(source):
            return reader
    known = ", ".join(readers())
    raise UnsupportedError(
        f"{source.store.url} is in no format that we know ({known}); if it is one of them, say which with --from"
    )


def writer_for(name: str) -> Writer:
    """The writer called ``name``. Raises UsageError."""
    return _named(writers(), name, "written")


def _named(known: Mapping[str, Format], name: str, verb: str) -> Format:
    if name not in known:
        raise UsageError(f"no format {name!r} can be {verb}; there are {', '.join(known)}")
    return known[name]

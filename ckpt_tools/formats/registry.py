"""Every format we know, and which of them a source is in.

Formats are imported when they are first asked for, so that asking for help costs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from importlib import import_module
from typing import Any

from ckpt_tools.core.manifest import Manifest
from ckpt_tools.core.options import ReadOptions
from ckpt_tools.errors import IncompleteError, MalformedError, SourceNotFoundError, UnsupportedError, UsageError
from ckpt_tools.formats.base import Reader, Writer
from ckpt_tools.formats.foreign import rank_in_name, refuse_ranks
from ckpt_tools.stores.source import Source


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
            raise MalformedError(f"{source.store.url} contains values that are nested too deeply") from error

    def own_files(self, source: Source, manifest: Manifest) -> frozenset[str]:
        return self.reader.own_files(source, manifest)


_READERS = {
    "dcp": "dcp.reader:DcpReader",
    "universal": "deepspeed.universal.reader:UniversalReader",
    "deepspeed": "deepspeed.zero_reader.reader:DeepSpeedReader",
    "safetensors": "safetensors.files:SafetensorsReader",
    "torch": "torch_save:TorchReader",
}
"""Where each is, the most telling first: their order is the order of detection."""

_WRITERS = {
    "safetensors": "safetensors.files:SafetensorsWriter",
    "torch": "torch_save:TorchWriter",
    "dcp": "dcp.writer:DcpWriter",
    "zero1": "deepspeed.zero_writer.writer:ZeroWriter",
    "zero2": "deepspeed.zero_writer.writer:ZeroWriter",
    "zero3": "deepspeed.zero_writer.writer:ZeroWriter",
    "universal": "deepspeed.universal.writer:UniversalWriter",
}
"""By the names that ``--to`` takes."""

_STAGES = {"zero1": 1, "zero2": 2, "zero3": 3}


def _imported(place: str) -> Any:
    """Each format is imported when it is needed, which takes 5 to 40 ms."""
    module, _, name = place.partition(":")
    return getattr(import_module(f"ckpt_tools.formats.{module}"), name)


@cache
def _reader(name: str) -> Reader:
    return _Bounded(_imported(_READERS[name])())


@cache
def _writer(name: str) -> Writer:
    stage = (_STAGES[name],) if name in _STAGES else ()
    writer: Writer = _imported(_WRITERS[name])(*stage)
    return writer


def readers() -> Mapping[str, Reader]:
    """Readers by name."""
    return {name: _reader(name) for name in _READERS}


def writers() -> Mapping[str, Writer]:
    """Writers by name."""
    return {name: _writer(name) for name in _WRITERS}


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
            "whole state" if writers()[name].holds_optimizer else "weights; whole state on request",
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
        return _reader(_checked(_READERS, _READ_AS.get(name, name), "read"))
    if not source.files:
        raise SourceNotFoundError(f"{source.store.url} is an empty folder")
    for known_name in _READERS:
        if _reader(known_name).detect(source):
            return _reader(known_name)
    _refuse_known(source)
    known = ", ".join(_READERS)
    raise UnsupportedError(
        f"{source.store.url} is not in a known format ({known}); if it is in one of them, name it with --from"
    )


_FOREIGN = {
    "*.gguf": "GGUF, which is not supported; take the checkpoint that it was made from",
    "*.nemo": "NeMo's archive, which is not supported; unpack it with tar and name the folder inside",
    "_CHECKPOINT_METADATA": "Orbax (JAX), which is not supported; export the weights as safetensors",
    "manifest.ocdbt": "Orbax (JAX), which is not supported; export the weights as safetensors",
    ".zarray": "a folder of Zarr arrays, which is not supported; export the weights as safetensors",
    "model_optim_rng.pt": "Megatron-LM's own format, which is not supported; convert it with Megatron's converter",
}
"""Formats that are known and not read, by the names of their files, and what a user can do."""


def _refuse_known(source: Source) -> None:
    """Raises UnsupportedError where files of a layout that is known and not read lie here, or below."""
    refuse_ranks({path: rank for path in source.files if (rank := rank_in_name(path)) is not None})
    for path in source.files:
        name = path.rpartition("/")[2]
        about = next((text for pattern, text in _FOREIGN.items() if fnmatchcase(name, pattern)), None)
        if about is not None:
            raise UnsupportedError(f"it is {about}", path=path)
    if len(source.files) == 1:
        _refuse_archive(source, next(iter(source.files)))


def _refuse_archive(source: Source, path: str) -> None:
    """What a single file of any ending says by its content. Raises UnsupportedError."""
    from ckpt_tools.serialization.torch_zip import open_archive

    try:
        open_archive(lambda start, stop: source.read(path, start, stop), source.size(path), path)
    except (MalformedError, IncompleteError):
        return
    raise UnsupportedError("its content is that of torch.save, but its name is not; add --from torch", path=path)


def writer_for(name: str) -> Writer:
    """The writer called ``name``. Raises UsageError."""
    return _writer(_checked(_WRITERS, name, "written"))


def _checked(known: Mapping[str, str], name: str, verb: str) -> str:
    if name not in known:
        raise UsageError(f"no format {name!r} can be {verb}; there are {', '.join(known)}")
    return name

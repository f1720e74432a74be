"""Every format we know, and which of them a source is in.

Formats are imported when they are first asked for, so that asking for help costs nothing. Those of plug-ins are asked
before the built-in ones where a file has their sign (``formats.plugin_signs``), and else after them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from importlib import import_module
from typing import Any

from ckpt_tools.core.applicability import WEIGHTS_ALONE
from ckpt_tools.core.manifest import Manifest
from ckpt_tools.core.option_names import option
from ckpt_tools.core.options import ReadOptions
from ckpt_tools.core.showing import Shown
from ckpt_tools.core.wording import listed, newest
from ckpt_tools.errors import (
    CkptError,
    IncompleteError,
    MalformedError,
    SeveralCheckpointsError,
    SourceNotFoundError,
    UnsupportedError,
    UsageError,
)
from ckpt_tools.formats.base import Format, ReadableFormat, Reader, Serving, WritableFormat, Writer
from ckpt_tools.formats.plugin_signs import claiming
from ckpt_tools.stores.source import Source


@dataclass(frozen=True, slots=True, repr=False)
class FormatInfo(Shown):
    """One row of the table of formats."""

    name: str
    reads: bool
    writes: bool
    holds: str
    about: str


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

    def served(self, source: Source, manifest: Manifest) -> Source:
        return self.reader.served(source, manifest) if isinstance(self.reader, Serving) else source


_READERS = {
    "megatron": "megatron.reader:MegatronReader",
    "dcp": "dcp.reader:DcpReader",
    "orbax": "orbax.reader:OrbaxReader",
    "universal": "deepspeed.universal.reader:UniversalReader",
    "deepspeed": "deepspeed.zero_reader.reader:DeepSpeedReader",
    "safetensors": "safetensors.files:SafetensorsReader",
    "sharded": "sharded.files:ShardedReader",
    "torch": "torch.files:TorchReader",
    "gguf": "gguf.files:GgufReader",
    "npz": "npz.files:NpzReader",
}
"""Where each is, the most telling first: their order is the order of detection."""

_SIGNS = {
    "megatron": ("common.pt", "metadata.json", "_rng.pt", "distrib_optim.pt"),
    "dcp": (".metadata",),
    "orbax": ("_METADATA", "_CHECKPOINT_METADATA", "manifest.ocdbt"),
    "universal": ("/fp32.pt",),
    "deepspeed": ("_states.pt",),
    "safetensors": (".safetensors", ".safetensors.index.json"),
    "sharded": (".pt", ".pth", ".bin", ".ckpt"),
    "torch": (".pt", ".pth", ".bin", ".ckpt", ".bin.index.json"),
    "gguf": (".gguf",),
    "npz": (".npz",),
}
"""How the names of files end, of which every source of the format has one: without any, its reader is not imported."""

_WRITERS = {
    "safetensors": "safetensors.files:SafetensorsWriter",
    "torch": "torch.files:TorchWriter",
    "dcp": "dcp.writer:DcpWriter",
    "zero1": "deepspeed.zero_writer.writer:ZeroWriter",
    "zero2": "deepspeed.zero_writer.writer:ZeroWriter",
    "zero3": "deepspeed.zero_writer.writer:ZeroWriter",
    "universal": "deepspeed.universal.writer:UniversalWriter",
    "gguf": "gguf.files:GgufWriter",
    "npz": "npz.files:NpzWriter",
    "megatron": "megatron.writer:MegatronWriter",
    "sharded": "sharded.writer:ShardedWriter",
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
    """Built-in readers by name."""
    return {name: _reader(name) for name in _READERS}


def writers() -> Mapping[str, Writer]:
    """Built-in writers by name."""
    return {name: _writer(name) for name in _WRITERS}


_ABOUT = {
    "dcp": "PyTorch Distributed Checkpoint: a .metadata file and __R_N.distcp files (FSDP2 and others)",
    "megatron": "Megatron-Core torch_dist: an iter_N folder of .metadata, common.pt and __R_N.distcp files",
    "zero1": "DeepSpeed ZeRO-1: a tag folder of *_model_states.pt and *_optim_states.pt, and the file latest",
    "zero2": "DeepSpeed ZeRO-2",
    "zero3": "DeepSpeed ZeRO-3",
    "universal": "DeepSpeed universal: a tag folder with zero/<parameter>/fp32.pt, ..., and latest_universal",
    "sharded": "a torch file a rank with its part of each tensor (DTensor): verl, SkyRL, accelerate, FSDP2",
    "safetensors": "one .safetensors file, or Hugging Face shards with their index",
    "torch": "a full state dict of torch.save: .pt, .pth, .bin, or .bin shards with their index",
    "gguf": "a .gguf file of llama.cpp, or all its parts: tensors that are not quantized, and the key-values",
    "npz": "a .npz file of numpy or MLX: arrays that are not compressed",
    "orbax": "Orbax (JAX): a folder with _METADATA and arrays of OCDBT or Zarr; needs the extra ckpt-tools[orbax]",
}

_HOLDS = {"orbax": "weights, and the moments of Adam"} | dict.fromkeys(WEIGHTS_ALONE, "weights")
"""What formats hold of which the writer does not say it all."""

_READ_AS = {"zero1": "deepspeed", "zero2": "deepspeed", "zero3": "deepspeed"}
"""Formats that one reader tells apart by what it finds."""


_BUILT_IN = frozenset({*_READERS, *_WRITERS})


def _plugin(name: str) -> Format | None:
    """The format of a plug-in of that name, if there is one. Raises UsageError."""
    if name in _BUILT_IN:
        return None
    from ckpt_tools.formats.plugins import plugin

    return plugin(name, _BUILT_IN)


def _plugins() -> tuple[str, ...]:
    """The names of the formats of plug-ins. Raises UsageError."""
    from ckpt_tools.formats.plugins import plugin_names

    return plugin_names(_BUILT_IN)


def table() -> tuple[FormatInfo, ...]:
    """Every format, by the names that ``--to`` takes. Raises UsageError if a plug-in cannot be imported."""
    built_in = (
        FormatInfo(
            name,
            _READ_AS.get(name, name) in _READERS,
            name in _WRITERS,
            _HOLDS.get(name) or _holds(_writer(name).holds_optimizer),
            about,
        )
        for name, about in _ABOUT.items()
    )
    added = (_row(found) for name in _plugins() if (found := _plugin(name)) is not None)
    return (*built_in, *added)


def _row(found: Format) -> FormatInfo:
    reads, writes = isinstance(found, ReadableFormat), isinstance(found, WritableFormat)
    return FormatInfo(found.name, reads, writes, _holds(found.holds_optimizer), found.about)


def _holds(is_whole: bool) -> str:
    return "whole state" if is_whole else "weights; whole state on request"


def reader_for(source: Source, name: str | None) -> Reader:
    """The reader called ``name``, or the one that recognises ``source``.

    Raises:
        UsageError: no such format, or several plug-ins recognise it; SourceNotFoundError: an empty folder;
        UnsupportedError: no format recognises it; CkptError: a plug-in fails.
    """
    if name is not None:
        return _named_reader(_READ_AS.get(name, name))
    if not source.files:
        raise SourceNotFoundError(f"{source.store.url} is an empty folder")
    claimed = _recognising_plugin(source, claiming(source.files))
    if claimed is not None:
        return claimed
    for known_name in _READERS:
        if _has_sign(source, known_name) and _reader(known_name).detect(source):
            return _reader(known_name)
    added = _recognising_plugin(source, _plugins())
    if added is not None:
        return added
    _refuse_run(source)
    _refuse_known(source)
    known = ", ".join((*_READERS, *_plugins()))
    raise UnsupportedError(
        f"{source.store.url} is not in a known format ({known}); "
        f"if it is in one of them, name it with {option('from_')}"
    )


def _has_sign(source: Source, name: str) -> bool:
    return any(path.endswith(_SIGNS[name]) for path in source.files)


def _named_reader(name: str) -> Reader:
    if name in _READERS:
        return _reader(name)
    found = _plugin_reader(name)
    if found is not None:
        return found
    raise _unknown(_READERS, name, "read")


def _plugin_reader(name: str) -> Reader | None:
    """The reader of a plug-in of that name, if there is one. Raises UsageError."""
    found = _plugin(name)
    if not isinstance(found, ReadableFormat):
        return None
    from ckpt_tools.formats.plugins import PluginReader, origin

    return _Bounded(PluginReader(found, origin(name, _BUILT_IN)))


def hint_of_plugins(source: Source) -> str:
    """The end of an error of a built-in reader, where a plug-in recognises ``source`` too; else empty."""
    try:
        added = _recognising_plugin(source, _plugins())
    except CkptError:
        return ""
    return (
        "" if added is None else f"; the plug-in's format {added.name} recognises it: add {option('from_', added.name)}"
    )


def is_built_in(reader: Reader) -> bool:
    return reader.name in _READERS


def _recognising_plugin(source: Source, names: Iterable[str]) -> Reader | None:
    """The one of these plug-ins that recognises ``source``. One that fails is an error if no other recognises it,
    because it might be the one that is needed.

    Raises:
        CkptError: it fails or cannot be imported, or several recognise it.
    """
    found: list[Reader] = []
    broken: list[CkptError] = []
    for name in names:
        try:
            added = _plugin_reader(name)
            if added is not None and added.detect(source):
                found.append(added)
        except CkptError as error:
            broken.append(error)
    if len(found) > 1:
        names = listed([each.name for each in found])
        raise UsageError(f"several formats recognise {source.store.url} ({names}); say which with {option('from_')}")
    if broken and not found:
        raise broken[0]
    return found[0] if found else None


_NO_TENSORFLOW = (
    "which is not supported; load it with its framework and save the weights with safetensors.numpy.save_file"
)

_FOREIGN = {
    "*.nemo": "NeMo's archive, which is not supported; unpack it with tar and name the folder inside",
    ".zarray": "a folder of Zarr arrays, which is not supported; export the weights as safetensors",
    "zarr.json": "a folder of Zarr arrays, which is not supported; export the weights as safetensors",
    "*.npy": "a single array without a name, which is not supported; save it with numpy.savez(FILE, name=array)",
    "*.h5": f"a file of HDF5 (Keras), {_NO_TENSORFLOW}",
    "*.hdf5": f"a file of HDF5 (Keras), {_NO_TENSORFLOW}",
    "*.keras": f"a Keras archive, {_NO_TENSORFLOW}",
    "saved_model.pb": f"a SavedModel of TensorFlow, {_NO_TENSORFLOW}",
    "*.ckpt.index": f"a checkpoint of TensorFlow, {_NO_TENSORFLOW}",
    "*.tflite": "a TensorFlow Lite model, which is a program; take the checkpoint that it was made from",
    "*.onnx": "an ONNX model, which is a program; take the checkpoint that it was exported from",
    "*.pt2": (
        "a program of torch.export, which is not supported; save torch.export.load(FILE).state_dict with torch.save"
    ),
}
"""Formats that are known and not read, by the names of their files, and what a user can do."""


def _refuse_run(source: Source) -> None:
    """Raises SeveralCheckpointsError for the folder of a run, where readers look for one checkpoint."""
    from ckpt_tools.core.run_folders import members

    found = [each.name for each in members(source.files) if each.is_numbered and each.is_finished]
    if len(found) > 1:
        raise SeveralCheckpointsError(f"there are several checkpoints here ({newest(found)}); name the folder of one")


def _refuse_known(source: Source) -> None:
    """Raises UnsupportedError where files of a layout that is known and not read lie here, or below."""
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
    raise UnsupportedError(
        f"its content is that of torch.save, but its name is not; add {option('from_', 'torch')}", path=path
    )


def writer_for(name: str) -> Writer:
    """The writer called ``name``. Raises UsageError."""
    found = known_writer(name)
    if found is None:
        raise _unknown(_WRITERS, name, "written")
    return found


def known_writer(name: str) -> Writer | None:
    """The writer called ``name``, or None for a format that is not written. Raises UsageError as ``table``."""
    if name in _BUILT_IN:
        return _writer(name) if name in _WRITERS else None
    found = _plugin(name)
    if not isinstance(found, WritableFormat):
        return None
    from ckpt_tools.formats.plugins import PluginWriter, origin

    return PluginWriter(found, origin(name, _BUILT_IN))


def _unknown(built_in: Mapping[str, str], name: str, verb: str) -> UsageError:
    return UsageError(f"no format {name!r} can be {verb}; there are {', '.join((*built_in, *_plugins()))}")


def plugin_reading_options(name: str) -> tuple[str, ...]:
    """The reading options that the format of a plug-in takes. Those of built-in formats are in
    ``core.applicability``."""
    found = _plugin(name) if name else None
    return found.reading_options if isinstance(found, ReadableFormat) else ()


def plugin_writing_options(name: str) -> tuple[str, ...]:
    """The writing options that the format of a plug-in takes."""
    found = _plugin(name) if name else None
    return found.writing_options if isinstance(found, WritableFormat) else ()

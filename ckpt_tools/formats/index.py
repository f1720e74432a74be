"""Formats by name, built in and of plug-ins, and the format of a source.

A format is imported when it is needed, which takes 5 to 40 ms. Plug-ins are asked before the built-in formats if a file
has their sign, and else after them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

from ckpt_tools.core.format_names import BUILTIN_FORMATS, FORMAT_BY_FILE_SUFFIX, REPORTED_FORMAT_ALIASES
from ckpt_tools.core.option_names import format_option
from ckpt_tools.core.showing import DisplayableResult
from ckpt_tools.core.wording import join_names, join_newest
from ckpt_tools.errors import (
    CkptError,
    FormatError,
    MalformedError,
    SeveralCheckpointsError,
    SourceNotFoundError,
    UnsupportedError,
    UsageError,
)
from ckpt_tools.formats.base import Format
from ckpt_tools.formats.plugins import claiming, plugin, plugins

if TYPE_CHECKING:
    from ckpt_tools.core.manifest import Manifest
    from ckpt_tools.core.options import ReadOptions
    from ckpt_tools.stores.source import Source


@dataclass(frozen=True, slots=True, repr=False)
class FormatInfo(DisplayableResult):
    """One row of the table of formats."""

    name: str
    reads: bool
    writes: bool
    holds: str
    about: str


def names() -> tuple[str, ...]:
    """Every format, the built-in ones first. Raises UsageError."""
    return (*BUILTIN_FORMATS, *plugins())


def known(name: str) -> Format | None:
    """The format that a user or a manifest calls ``name``, if there is one. Raises UsageError."""
    name = REPORTED_FORMAT_ALIASES.get(name, name)
    if name in BUILTIN_FORMATS:
        return _built_in(name)
    entry = plugins().get(name)
    return None if entry is None else plugin(entry)


@cache
def _built_in(name: str) -> Format:
    module, _, attribute = BUILTIN_FORMATS[name].object_path.partition(":")
    found = getattr(import_module(f"ckpt_tools.formats.{module}"), attribute)
    made = found() if isinstance(found, type) else found
    assert isinstance(made, Format)
    return made


def built_in() -> tuple[Format, ...]:
    """All built-in formats, in the order of detection."""
    return tuple(map(_built_in, BUILTIN_FORMATS))


def all_formats() -> tuple[Format, ...]:
    """Every format. Raises UsageError if a plug-in cannot be imported."""
    return (*built_in(), *(plugin(entry) for entry in plugins().values()))


def table() -> tuple[FormatInfo, ...]:
    """A row for each format. Raises UsageError if a plug-in cannot be imported."""
    return tuple(FormatInfo(each.name, each.reads, each.writes, each.holds, each.about) for each in all_formats())


def read_format(name: str) -> Format:
    """The format called ``name``, which can be read. Raises UsageError."""
    return _able(name, "read", lambda form: form.reads)


def written_format(name: str) -> Format:
    """The format called ``name``, which can be written. Raises UsageError."""
    return _able(name, "written", lambda form: form.writes)


def _able(name: str, verb: str, is_able: Callable[[Format], bool]) -> Format:
    found = known(name)
    if found is None or not is_able(found):
        able = [each for each in names() if _is_perhaps(is_able, each)]
        raise UsageError(f"no format {name!r} can be {verb}; there are {', '.join(able)}")
    return found


def _is_perhaps(is_able: Callable[[Format], bool], name: str) -> bool:
    """True for a plug-in that cannot be imported too."""
    try:
        found = known(name)
    except UsageError:
        return True
    return found is not None and is_able(found)


def find_format(source: Source, name: str | None = None) -> Format:
    """The format called ``name``, or the one that recognises ``source``.

    Raises:
        UsageError: no such format, or several plug-ins recognise it. SourceNotFoundError: an empty folder.
        SeveralCheckpointsError: the folder of a run. UnsupportedError: no format recognises it. CkptError: a plug-in
        fails.
    """
    if name is not None:
        return read_format(name)
    if not source.files:
        raise SourceNotFoundError(f"{source.store.url} is an empty folder")
    claimed = _recognising_plugin(source, claiming(source.files))
    if claimed is not None:
        return claimed
    for known_name in BUILTIN_FORMATS:
        if has_sign(source, known_name) and _built_in(known_name).detect(source):
            return _built_in(known_name)
    added = _recognising_plugin(source, plugins())
    if added is not None:
        return added
    from ckpt_tools.trainers.run_folders import find_members

    # The folder of a run, where formats look for one checkpoint.
    steps = [each.name for each in find_members(source.files) if each.is_numbered and each.is_finished]
    if len(steps) > 1:
        raise SeveralCheckpointsError(
            f"there are several checkpoints here ({join_newest(steps)}); name the folder of one"
        )
    _refuse_known(source)
    detected = [each for each, entry in BUILTIN_FORMATS.items() if entry.signs]
    raise UnsupportedError(
        f"{source.store.url} is not in a known format ({', '.join((*detected, *plugins()))}); "
        f"if it is in one of them, name it with {format_option('from_')}"
    )


def read_manifest(found: Format, source: Source, options: ReadOptions) -> Manifest:
    """The manifest of ``source``, which is in the format ``found``. Raises as ``Format.read``."""
    try:
        return found.read(source, options)
    except RecursionError as error:  # values that refer to each other in circles can make any walk through them deep
        raise MalformedError(f"{source.store.url} contains values that are nested too deeply") from error


def has_sign(source: Source, name: str) -> bool:
    """Whether a file of ``source`` has a sign of the built-in format ``name``."""
    signs = BUILTIN_FORMATS[name].signs
    return any(path.endswith(signs) for path in source.files)


def hint_of_plugins(source: Source, reader: Format) -> str:
    """The end of an error of a built-in format, if a plug-in recognises ``source`` too; else empty."""
    if reader.name not in BUILTIN_FORMATS:
        return ""
    try:
        added = _recognising_plugin(source, plugins())
    except CkptError:
        return ""
    return (
        ""
        if added is None
        else f"; the plug-in's format {added.name} recognises it: add {format_option('from_', added.name)}"
    )


def _recognising_plugin(source: Source, names: Iterable[str]) -> Format | None:
    """The one of these plug-ins that recognises ``source``. One that fails is an error if no other recognises it,
    because it might be the one that is needed.

    Raises:
        CkptError: it fails or cannot be imported, or several recognise it.
    """
    found: list[Format] = []
    broken: list[CkptError] = []
    for name in names:
        try:
            added = known(name)
            if added is not None and added.reads and added.detect(source):
                found.append(added)
        except CkptError as error:
            broken.append(error)
    if len(found) > 1:
        several = join_names([each.name for each in found])
        raise UsageError(
            f"several formats recognise {source.store.url} ({several}); say which with {format_option('from_')}"
        )
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
"""Known formats that are not read, by the names of their files, with advice for the user."""


def _refuse_known(source: Source) -> None:
    """Raises UnsupportedError for files of a known layout that is not read, and for a file of ``torch.save`` with the
    ending of another format; IncompleteError for a DCP whose save did not finish."""
    from ckpt_tools.formats.dcp.folders import metadata_files
    from ckpt_tools.formats.dcp.names import DATA

    for path in source.files:
        name = path.rpartition("/")[2]
        if DATA.fullmatch(name):
            metadata_files(source.files)
        about = next((text for pattern, text in _FOREIGN.items() if fnmatchcase(name, pattern)), None)
        if about is not None:
            raise UnsupportedError(f"it is {about}", path=path)
    if len(source.files) == 1:
        refuse_content(source, next(iter(source.files)), is_of_no_format=True)


def refuse_content(source: Source, path: str, *, is_of_no_format: bool = False) -> None:
    """Raises UnsupportedError for a file whose content is none of what its name says: the pointer or page that a
    download left in its place, or a file of ``torch.save``; one of torch that is not read only where the file
    ``is_of_no_format``, because a format's own reader has the better words."""
    if path not in source.files:
        return
    head = source.read(path, 0, min(source.size(path), 64)).lstrip().lower()
    if head.startswith(b"version https://git-lfs"):
        raise UnsupportedError("it is a Git LFS pointer and not the file itself; fetch it with git lfs pull", path=path)
    if head.startswith((b"<!doctype html", b"<html")):
        raise UnsupportedError("it is a page of HTML, such as a login or an error; download the file again", path=path)
    is_single = path.endswith(tuple(FORMAT_BY_FILE_SUFFIX)) or len(source.files) == 1
    if not is_single or path.endswith(BUILTIN_FORMATS["torch"].signs):
        return
    from ckpt_tools.serialization.torch_zip import open_archive

    try:
        open_archive(lambda start, stop: source.read(path, start, stop), source.size(path), path)
    except FormatError as error:
        if is_of_no_format and isinstance(error, UnsupportedError):
            raise
        return
    advice = f"add {format_option('from_', 'torch')}"
    raise UnsupportedError(f"its content is that of torch.save, but its name is not; {advice}", path=path)

"""Formats by name, built in and of plug-ins, and the format of a source.

Plug-ins are asked before the built-in formats if a file has their sign, and else after them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from ckpt_tools.core.format_names import BUILTIN_FORMATS, FORMAT_BY_FILE_SUFFIX, REPORTED_FORMAT_ALIASES
from ckpt_tools.core.option_names import format_option
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
from ckpt_tools.formats.builtin import FORMATS
from ckpt_tools.formats.plugins import find_claiming_formats, list_plugin_entries, load_plugin_format
from ckpt_tools.messages.showing import DisplayableResult
from ckpt_tools.messages.wording import join_names, join_newest

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


def list_format_names() -> tuple[str, ...]:
    """Every format, the built-in ones first. Raises UsageError."""
    return (*BUILTIN_FORMATS, *list_plugin_entries())


def lookup_format(name: str) -> Format | None:
    """The format that a user or a manifest calls ``name``, if there is one. Raises UsageError."""
    name = REPORTED_FORMAT_ALIASES.get(name, name)
    if name in FORMATS:
        return FORMATS[name]
    entry = list_plugin_entries().get(name)
    return None if entry is None else load_plugin_format(entry)


def load_all_formats() -> tuple[Format, ...]:
    """Every format. Raises UsageError if a plug-in cannot be imported."""
    return (*FORMATS.values(), *(load_plugin_format(entry) for entry in list_plugin_entries().values()))


def build_format_table() -> tuple[FormatInfo, ...]:
    """A row for each format. Raises UsageError if a plug-in cannot be imported."""
    return tuple(FormatInfo(each.name, each.reads, each.writes, each.holds, each.about) for each in load_all_formats())


def get_readable_format(name: str) -> Format:
    """The format called ``name``, which can be read. Raises UsageError."""
    return _get_capable_format(name, "read", lambda form: form.reads)


def get_writable_format(name: str) -> Format:
    """The format called ``name``, which can be written. Raises UsageError."""
    return _get_capable_format(name, "written", lambda form: form.writes)


def _get_capable_format(name: str, verb: str, has_capability: Callable[[Format], bool]) -> Format:
    candidate = lookup_format(name)
    if candidate is not None and has_capability(candidate):
        return candidate

    def may_be_capable(each: str) -> bool:
        try:
            other = lookup_format(each)
        except UsageError:  # of a plug-in that cannot be imported
            return True
        return other is not None and has_capability(other)

    raise UsageError(
        f"no format {name!r} can be {verb}; there are {', '.join(filter(may_be_capable, list_format_names()))}"
    )


def find_format(source: Source, name: str | None = None) -> Format:
    """The format called ``name``, or the one that recognises ``source``.

    Raises:
        UsageError: no such format, or several plug-ins recognise it. SourceNotFoundError: an empty folder.
        SeveralCheckpointsError: the folder of a run. UnsupportedError: no format recognises it. CkptError: a plug-in
        fails.
    """
    # Order: the name that the user gives; plug-ins with a sign among the files; the built-in formats; the other
    # plug-ins, which are imported only now. If none recognises the source, the error is the most telling one: the
    # folder of a run, a format that is known but not read, else "not in a known format".
    if name is not None:
        return get_readable_format(name)
    if not source.files:
        raise SourceNotFoundError(f"{source.store.url} is an empty folder")
    claiming_plugin = _find_recognising_plugin(source, find_claiming_formats(source.files))
    if claiming_plugin is not None:
        return claiming_plugin
    for builtin_format in FORMATS.values():
        if has_sign(source, builtin_format.name) and builtin_format.detect(source):
            return builtin_format
    plugin_format = _find_recognising_plugin(source, list_plugin_entries())
    if plugin_format is not None:
        return plugin_format
    from ckpt_tools.trainers.run_folders import find_members

    # The folder of a run, where formats look for one checkpoint.
    finished_steps = [each.name for each in find_members(source) if each.is_numbered and each.is_finished]
    if len(finished_steps) > 1:
        raise SeveralCheckpointsError.of(join_newest(finished_steps))
    _refuse_unsupported_formats(source)
    detected_names = [each for each, entry in BUILTIN_FORMATS.items() if entry.signs]
    raise UnsupportedError(
        f"{source.store.url} is not in a known format ({', '.join((*detected_names, *list_plugin_entries()))}); "
        f"if it is in one of them, name it with {format_option('from_')}"
    )


def read_manifest(reader: Format, source: Source, options: ReadOptions) -> Manifest:
    """The manifest of ``source``, which is in the format ``reader``. Raises as ``Format.read``."""
    try:
        return reader.read(source, options)
    except RecursionError as error:  # values that refer to each other in circles can make any walk through them deep
        raise MalformedError(f"{source.store.url} contains values that are nested too deeply") from error


def has_sign(source: Source, name: str) -> bool:
    """Whether a file of ``source`` has a sign of the built-in format ``name``."""
    signs = BUILTIN_FORMATS[name].signs
    return any(path.endswith(signs) for path in source.files)


def suggest_plugin(source: Source, reader: Format) -> str:
    """The end of an error of a built-in format, if a plug-in recognises ``source`` too; else empty."""
    if reader.name not in BUILTIN_FORMATS:
        return ""
    try:
        plugin_format = _find_recognising_plugin(source, list_plugin_entries())
    except CkptError:
        return ""
    if plugin_format is None:
        return ""
    name = plugin_format.name
    return f"; the plug-in's format {name} recognises it: add {format_option('from_', name)}"


def _find_recognising_plugin(source: Source, names: Iterable[str]) -> Format | None:
    """The one of these plug-ins that recognises ``source``. One that fails is an error if no other recognises it,
    because it might be the one that is needed.

    Raises:
        CkptError: it fails or cannot be imported, or several recognise it.
    """
    recognising_formats: list[Format] = []
    failures: list[CkptError] = []
    for name in names:
        try:
            candidate = lookup_format(name)
            if candidate is not None and candidate.reads and candidate.detect(source):
                recognising_formats.append(candidate)
        except CkptError as error:
            failures.append(error)
    if len(recognising_formats) > 1:
        several = join_names([each.name for each in recognising_formats])
        raise UsageError(
            f"several formats recognise {source.store.url} ({several}); say which with {format_option('from_')}"
        )
    if failures and not recognising_formats:
        raise failures[0]
    return recognising_formats[0] if recognising_formats else None


_TENSORFLOW_ADVICE = (
    "which is not supported; load it with its framework and save the weights with safetensors.numpy.save_file"
)

_UNSUPPORTED_FORMATS = {
    "*.nemo": "NeMo's archive, which is not supported; unpack it with tar and name the folder inside",
    ".zarray": "a folder of Zarr arrays, which is not supported; export the weights as safetensors",
    "zarr.json": "a folder of Zarr arrays, which is not supported; export the weights as safetensors",
    "*.npy": "a single array without a name, which is not supported; save it with numpy.savez(FILE, name=array)",
    "*.h5": f"a file of HDF5 (Keras), {_TENSORFLOW_ADVICE}",
    "*.hdf5": f"a file of HDF5 (Keras), {_TENSORFLOW_ADVICE}",
    "*.keras": f"a Keras archive, {_TENSORFLOW_ADVICE}",
    "saved_model.pb": f"a SavedModel of TensorFlow, {_TENSORFLOW_ADVICE}",
    "*.ckpt.index": f"a checkpoint of TensorFlow, {_TENSORFLOW_ADVICE}",
    "*.tflite": "a TensorFlow Lite model, which is a program; take the checkpoint that it was made from",
    "*.onnx": "an ONNX model, which is a program; take the checkpoint that it was exported from",
    "*.pt2": (
        "a program of torch.export, which is not supported; save torch.export.load(FILE).state_dict with torch.save"
    ),
}
"""Known formats that are not read, by the names of their files, with advice for the user."""


def _refuse_unsupported_formats(source: Source) -> None:
    """Raises UnsupportedError for files of a known layout that is not read, and for a file of ``torch.save`` with the
    ending of another format; IncompleteError for a DCP whose save did not finish."""
    from ckpt_tools.formats.dcp.names import DATA_FILE_NAME, find_metadata_files

    for path in source.files:
        file_name = path.rpartition("/")[2]
        if DATA_FILE_NAME.fullmatch(file_name):
            find_metadata_files(source.files)
        description = next(
            (text for pattern, text in _UNSUPPORTED_FORMATS.items() if fnmatchcase(file_name, pattern)), None
        )
        if description is not None:
            raise UnsupportedError(f"it is {description}", path=path)
    if len(source.files) == 1:
        refuse_foreign_content(source, next(iter(source.files)), is_of_no_format=True)


def refuse_foreign_content(source: Source, path: str, *, is_of_no_format: bool = False) -> None:
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
    from ckpt_tools.serialization.torch_zip import open_torch_file

    try:
        open_torch_file(source, path)
    except FormatError as error:
        if is_of_no_format and isinstance(error, UnsupportedError):
            raise
        return
    advice = f"add {format_option('from_', 'torch')}"
    raise UnsupportedError(f"its content is that of torch.save, but its name is not; {advice}", path=path)

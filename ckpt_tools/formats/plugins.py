"""Formats of other distributions: the entry points of the groups ``ckpt_tools.formats`` and ``ckpt_tools.signs``.

A look-up by ``importlib.metadata`` takes 20 ms or more, so it happens if a name is not built in, no built-in format
recognises a source, the table of formats is wanted, or a distribution declares signs: patterns of file names. For that
the files that pip wrote are searched first, which takes 2 ms with 150 distributions. A plug-in is imported when it is
needed, and never for another one's sake.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Mapping, Set
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ckpt_tools.core.entry_points import describe_distribution, index_plugins_by_name, list_entry_points
from ckpt_tools.core.format_names import BUILTIN_FORMATS
from ckpt_tools.errors import CkptError, UsageError
from ckpt_tools.formats.base import READING_OPTIONS, WRITING_OPTIONS, Format
from ckpt_tools.messages.wording import join_names

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from ckpt_tools.core.layout import Layout
    from ckpt_tools.core.manifest import Manifest
    from ckpt_tools.core.options import ReadOptions, WriteOptions
    from ckpt_tools.stores.source import Source

Result = TypeVar("Result")

FORMATS, SIGNS = "ckpt_tools.formats", "ckpt_tools.signs"
"""The groups of entry points: objects by the format's name, and formats' names by the pattern of file names."""

_COPIED_ATTRIBUTES = (
    "name",
    "about",
    "holds_optimizer",
    "holds_masters",
    "is_weights_alone",
    "reading_options",
    "writing_options",
    "kept_entries",
    "asks_model_type",
)


class PluginFormat(Format):
    """The format of the plug-in ``origin``. An exception other than ckpt-tools' own names the plug-in."""

    def __init__(self, inner: Format, origin: str) -> None:
        self.inner, self.origin = inner, origin
        for name in _COPIED_ATTRIBUTES:
            setattr(self, name, getattr(inner, name))

    @property
    def reads(self) -> bool:
        return self.inner.reads

    @property
    def writes(self) -> bool:
        return self.inner.writes

    @property
    def holds(self) -> str:
        return self.inner.holds

    def detect(self, source: Source) -> bool:
        return bool(self._call_plugin("detect", object, source))

    def read(self, source: Source, options: ReadOptions) -> Manifest:
        from ckpt_tools.core.manifest import Manifest

        return self._call_plugin("read", Manifest, source, options)

    def own_files(self, source: Source, manifest: Manifest) -> frozenset[str]:
        return frozenset(self._call_plugin("own_files", Set, source, manifest))  # type: ignore[type-abstract]

    def served(self, source: Source, manifest: Manifest) -> Source:
        return self._call_plugin("served", type(source), source, manifest)

    def reading_options_of(self, manifest: Manifest) -> tuple[str, ...]:
        return self._call_plugin("reading_options_of", tuple, manifest)

    def layout(self, manifest: Manifest, options: WriteOptions) -> Layout:
        from ckpt_tools.core.layout import Layout

        return self._call_plugin("layout", Layout, manifest, options)

    def _call_plugin(self, method: str, expected_type: type[Result], *arguments: object) -> Result:
        """Result of a method of the plug-in.

        Raises:
            CkptError: the plug-in raised another exception, or returned something else than a ``expected_type``.
        """
        plugin_label = f"the format {self.name!r} of {self.origin}"
        try:
            result = getattr(self.inner, method)(*arguments)
        except (CkptError, RecursionError, MemoryError):
            raise
        except Exception as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise CkptError(f"{plugin_label} failed in {method} ({reason}); report it to its authors") from error
        if not isinstance(result, expected_type):
            raise CkptError(
                f"{plugin_label} returned {type(result).__name__} instead of {expected_type.__name__} from {method}; "
                "report it to its authors"
            )
        return result


@cache
def list_plugin_entries() -> Mapping[str, EntryPoint]:
    """The formats that installed plug-ins add, by name.

    Raises:
        UsageError: two distributions give a format of one name, or one gives a format that is built in.
    """
    return index_plugins_by_name(
        ((entry.name, entry, entry) for entry in list_entry_points(FORMATS)), "format", BUILTIN_FORMATS
    )


@cache
def load_plugin_format(entry: EntryPoint) -> Format:
    """The format of an entry point. Raises UsageError if it cannot be imported, or is not a format."""
    plugin_label = f"the format {entry.name!r} of {describe_distribution(entry)}"
    try:
        plugin_object = entry.load()
        plugin_object = plugin_object() if isinstance(plugin_object, type) else plugin_object
    except Exception as error:
        raise UsageError(f"{plugin_label} cannot be imported ({type(error).__name__}: {error})") from error
    problem_text = _find_plugin_problem(plugin_object, entry.name)
    if problem_text is not None:
        raise UsageError(f"{plugin_label} {problem_text}")
    return PluginFormat(plugin_object, describe_distribution(entry))


def _find_plugin_problem(plugin_object: object, name: str) -> str | None:
    """Problem of an object that an entry point of that name gave; None if it is a format."""
    if not isinstance(plugin_object, Format):
        return "is not a Format of ckpt_tools.formats.base"
    if not (plugin_object.reads or plugin_object.writes):
        return "overrides neither read nor layout, so it can be neither read nor written"
    if plugin_object.name != name:
        return f"calls itself {plugin_object.name!r}"
    unknown_options = [
        *sorted({*plugin_object.reading_options} - {*READING_OPTIONS}),
        *sorted({*plugin_object.writing_options} - {*WRITING_OPTIONS}),
    ]
    return f"asks for options that formats do not have: {join_names(unknown_options)}" if unknown_options else None


def find_claiming_formats(files: Collection[str]) -> tuple[str, ...]:
    """The names of the plug-ins' formats that have a sign among ``files``.

    Raises:
        UsageError: an entry point has no name of a format.
    """
    if not _may_declare_signs(tuple(sys.path)):
        return ()
    file_names = {path.rpartition("/")[2] for path in files}
    claiming_names = {
        form: None for pattern, form in _load_signs() if any(fnmatchcase(name, pattern) for name in file_names)
    }
    return tuple(claiming_names)


@cache
def _load_signs() -> tuple[tuple[str, str], ...]:
    signs = sorted((entry.name, entry.value) for entry in list_entry_points(SIGNS))
    invalid_name = next((value for _, value in signs if not value.isidentifier()), None)
    if invalid_name is not None:
        raise UsageError(
            f"the entry points of {SIGNS} map a pattern of file names to a format's name; {invalid_name!r} is none"
        )
    return tuple(signs)


@cache
def _may_declare_signs(path: tuple[str, ...]) -> bool:
    """Whether a distribution in the folders ``path`` declares a sign; also true of an archive, which is not searched.
    ``path`` is ``sys.path``, and the key of the cache."""
    return any(_declares_signs(folder or ".") for folder in path)


def _declares_signs(folder: str) -> bool:
    try:
        with os.scandir(folder) as entries:
            metadata_folders = [entry.path for entry in entries if entry.name.endswith((".dist-info", ".egg-info"))]
    except OSError:
        return Path(folder).is_file()
    for info in metadata_folders:
        with suppress(OSError):
            if SIGNS.encode() in Path(info, "entry_points.txt").read_bytes():
                return True
    return False

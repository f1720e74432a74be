"""Formats of other distributions: the entry points of the group ``ckpt_tools.formats``.

Looking them up takes 20 ms. So they are looked up if a name is not built in, a file has the sign of a plug-in
(``formats.plugin_signs``), no built-in reader recognises a source, or the table of formats is wanted. A plug-in is
imported when it is needed, and never for another one's sake.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, TypeVar

from ckpt_tools.core.layout import Layout
from ckpt_tools.core.manifest import Manifest
from ckpt_tools.core.options import ReadOptions, WriteOptions
from ckpt_tools.core.wording import listed
from ckpt_tools.errors import CkptError, UsageError
from ckpt_tools.formats.base import (
    READING_OPTIONS,
    WRITING_OPTIONS,
    Format,
    ReadableFormat,
    Serving,
    WritableFormat,
    kept_entries,
)
from ckpt_tools.stores.source import Source

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

Result = TypeVar("Result")

GROUP = "ckpt_tools.formats"


def plugin_names(built_in: frozenset[str]) -> tuple[str, ...]:
    """The names of the formats that installed plug-ins add.

    Raises:
        UsageError: two distributions give a format of one name, or one gives a format that is built in.
    """
    return tuple(_entries(built_in))


def plugin(name: str, built_in: frozenset[str]) -> Format | None:
    """The format of a plug-in, or None if no plug-in has one of that name.

    Raises:
        UsageError: as ``plugin_names``; or the plug-in cannot be imported, or is not a format.
    """
    entry = _entries(built_in).get(name)
    return None if entry is None else _loaded(entry)


def origin(name: str, built_in: frozenset[str]) -> str:
    """The distribution of a plug-in's format, with its version."""
    return _distribution(_entries(built_in)[name])


@dataclass(frozen=True, slots=True)
class PluginReader:
    """The reader of the plug-in ``origin``. An exception other than ckpt-tools' own names the plug-in."""

    format: ReadableFormat
    origin: str

    @property
    def name(self) -> str:
        return self.format.name

    def detect(self, source: Source) -> bool:
        return bool(_called(self, "detect", object, source))

    def read_manifest(self, source: Source, options: ReadOptions) -> Manifest:
        return _called(self, "read_manifest", Manifest, source, options)

    def own_files(self, source: Source, manifest: Manifest) -> frozenset[str]:
        return frozenset(_called(self, "own_files", Set, source, manifest))  # type: ignore[type-abstract]

    def served(self, source: Source, manifest: Manifest) -> Source:
        if not isinstance(self.format, Serving):
            return source
        return _called(self, "served", Source, source, manifest)


@dataclass(frozen=True, slots=True)
class PluginWriter:
    """The writer of a plug-in, with errors as those of ``PluginReader``."""

    format: WritableFormat
    origin: str

    @property
    def name(self) -> str:
        return self.format.name

    @property
    def holds_optimizer(self) -> bool:
        return self.format.holds_optimizer

    @property
    def holds_masters(self) -> bool:
        return self.format.holds_masters

    @property
    def kept_entries(self) -> tuple[str, ...]:
        return kept_entries(self.format)

    def layout(self, manifest: Manifest, options: WriteOptions) -> Layout:
        return _called(self, "layout", Layout, manifest, options)


def _called(plugin: PluginReader | PluginWriter, method: str, kind: type[Result], *arguments: object) -> Result:
    """Result of a method of the plug-in.

    Raises:
        CkptError: the plug-in raised another exception, or returned something else than a ``kind``.
    """
    who = f"the format {plugin.name!r} of {plugin.origin}"
    try:
        result = getattr(plugin.format, method)(*arguments)
    except (CkptError, RecursionError, MemoryError):
        raise
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise CkptError(f"{who} failed in {method} ({reason}); report it to its authors") from error
    if not isinstance(result, kind):
        raise CkptError(
            f"{who} returned {type(result).__name__} instead of {kind.__name__} from {method}; report it to its authors"
        )
    return result


@cache
def _entries(built_in: frozenset[str]) -> Mapping[str, EntryPoint]:
    from importlib.metadata import entry_points

    found: dict[str, EntryPoint] = {}
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: (entry.name, _distribution(entry))):
        if entry.name in built_in:
            raise UsageError(f"{_distribution(entry)} gives a format {entry.name!r}, which is built in; uninstall it")
        if entry.name in found:
            both = listed([_distribution(each) for each in (found[entry.name], entry)])
            raise UsageError(f"{both} each give a format {entry.name!r}; uninstall one of them")
        found[entry.name] = entry
    return found


def _distribution(entry: EntryPoint) -> str:
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else entry.value


@cache
def _loaded(entry: EntryPoint) -> Format:
    try:
        found = entry.load()
        found = found() if isinstance(found, type) else found
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise UsageError(
            f"the format {entry.name!r} of {_distribution(entry)} cannot be imported ({reason})"
        ) from error
    problem = _problem(found, entry.name)
    if problem is not None:
        raise UsageError(f"the format {entry.name!r} of {_distribution(entry)} {problem}")
    assert isinstance(found, Format)
    return found


def _problem(found: object, name: str) -> str | None:
    """What is wrong with an object that an entry point of that name gave."""
    if not isinstance(found, ReadableFormat | WritableFormat):
        return "is neither a ReadableFormat nor a WritableFormat"
    if found.name != name:
        return f"calls itself {found.name!r}"
    reading = found.reading_options if isinstance(found, ReadableFormat) else ()
    writing = found.writing_options if isinstance(found, WritableFormat) else ()
    unknown = [*sorted({*reading} - {*READING_OPTIONS}), *sorted({*writing} - {*WRITING_OPTIONS})]
    return f"asks for options that formats do not have: {listed(unknown)}" if unknown else None

"""Formats of other distributions: the entry points of the group ``ckpt_tools.formats``.

Looking them up takes 20 ms. So nobody asks before a name is not built in, no built-in reader recognises a source, or
the table of formats is wanted. A plug-in is imported when it is needed, and never for another one's sake.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING

from ckpt_tools.core.wording import listed
from ckpt_tools.errors import UsageError
from ckpt_tools.formats.base import READING_OPTIONS, WRITING_OPTIONS, Format, ReadableFormat, WritableFormat

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

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

"""Entry points: other distributions add formats and recipes with them. A look-up takes 20 ms or more."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, TypeVar

from ckpt_tools.core.wording import listed
from ckpt_tools.errors import UsageError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

Added = TypeVar("Added")


def entries_of(group: str) -> list[EntryPoint]:
    """The entry points of a group, by name and distribution."""
    from importlib.metadata import entry_points

    return sorted(entry_points(group=group), key=lambda entry: (entry.name, distribution_of(entry)))


def distribution_of(entry: EntryPoint) -> str:
    """The name and version of the distribution that an entry point is from."""
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else entry.value


def by_name(added: Iterable[tuple[str, EntryPoint, Added]], noun: str, built_in: Collection[str]) -> dict[str, Added]:
    """Formats or recipes of entry points, by name; ``noun`` names one in messages.

    Raises:
        UsageError: two distributions give one name, or one gives a name that is ``built_in``.
    """
    found: dict[str, tuple[str, Added]] = {}
    for name, entry, each in added:
        who = distribution_of(entry)
        if name in built_in:
            raise UsageError(f"{who} gives a {noun} {name!r}, which is built in; uninstall it")
        if name in found:
            raise UsageError(f"{listed([found[name][0], who])} each give a {noun} {name!r}; uninstall one of them")
        found[name] = who, each
    return {name: each for name, (_, each) in found.items()}

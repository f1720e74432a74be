"""Entry points: other distributions add formats and recipes with them. A look-up takes 20 ms or more."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, TypeVar

from ckpt_tools.errors import UsageError
from ckpt_tools.messages.wording import join_names

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

PluginT = TypeVar("PluginT")


def list_entry_points(group: str) -> list[EntryPoint]:
    """The entry points of a group, by name and distribution."""
    from importlib.metadata import entry_points

    return sorted(entry_points(group=group), key=lambda entry: (entry.name, describe_distribution(entry)))


def describe_distribution(entry: EntryPoint) -> str:
    """The name and version of the distribution that an entry point is from."""
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else entry.value


def index_plugins_by_name(
    plugins: Iterable[tuple[str, EntryPoint, PluginT]], noun: str, builtin_names: Collection[str]
) -> dict[str, PluginT]:
    """Formats or recipes of entry points, by name; ``noun`` names one in messages.

    Raises:
        UsageError: two distributions give one name, or one gives a name that is ``builtin_names``.
    """
    plugin_by_name: dict[str, tuple[str, PluginT]] = {}
    for name, entry, plugin in plugins:
        distribution = describe_distribution(entry)
        if name in builtin_names:
            raise UsageError(f"{distribution} gives a {noun} {name!r}, which is built in; uninstall it")
        if name in plugin_by_name:
            raise UsageError(
                f"{join_names([plugin_by_name[name][0], distribution])} each give a {noun} {name!r}; uninstall one "
                f"of them"
            )
        plugin_by_name[name] = distribution, plugin
    return {name: each for name, (_, each) in plugin_by_name.items()}

"""Lists what exists at a destination and which files may be replaced."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from posixpath import dirname
from types import MappingProxyType
from typing import TYPE_CHECKING

from ckpt_tools.core.option_names import format_option
from ckpt_tools.errors import DestinationExistsError
from ckpt_tools.stores.output_form import Kind

if TYPE_CHECKING:
    from ckpt_tools.stores.source import Store

NOTHING: Mapping[str, int] = MappingProxyType({})

MAX_LISTED = 8
"""Names in one message."""


@dataclass(frozen=True, slots=True)
class Present:
    """The files at a place, hidden ones too, by their names in ``store`` with their sizes in bytes.

    ``others`` are the names of everything else: links, empty folders, pipes, devices.
    """

    store: Store
    files: Mapping[str, int]
    others: Sequence[str] = ()

    def beyond(self, known: Mapping[str, int]) -> list[str]:
        """The names that are not ``known``, or that have another size now."""
        return sorted([*self.others, *(path for path, size in self.files.items() if known.get(path) != size)])


def check_free(url: str, kind: Kind, *, is_taken: bool, kinds: Collection[Kind], overwrite: bool) -> None:
    """Raises DestinationExistsError if an output of that ``kind`` may not, or cannot, take the place.

    ``is_taken`` says that a file is there, or a folder with contents; ``kinds`` are the kinds of what exists there.
    """
    if is_taken and not overwrite:
        raise already_exists(url)
    if others := [other for other in kinds if other != kind]:
        raise DestinationExistsError(f"{url} is a {others[0]}, which this output cannot replace; remove it first")


def already_exists(url: str) -> DestinationExistsError:
    return DestinationExistsError(
        f"{url} exists; choose another destination, or replace it with {format_option('overwrite', True)}"
    )


def check_only(present: Present | None, url: str, replaced: Mapping[str, int]) -> None:
    """Raises DestinationExistsError if there are other files than ``replaced``."""
    unknown = [] if present is None else present.beyond(replaced)
    if unknown:
        raise DestinationExistsError(
            f"{url} contains files that were not there at the start: {listed(unknown)}; nothing was replaced"
        )


def listed(names: Iterable[str]) -> str:
    """The first names for a message, and how many more there are. Characters that cannot be printed are escaped."""
    shown = [name if name.isprintable() else ascii(name) for name in names]
    more = len(shown) - MAX_LISTED
    return ", ".join(shown[:MAX_LISTED]) + (f" and {more:,} more" if more > 0 else "")


def folders_of(paths: Iterable[str]) -> list[str]:
    """Every folder that contains one of ``paths``, except the root; inner folders first."""
    found: set[str] = set()
    for path in paths:
        folder = dirname(path)
        while folder and folder not in found:
            found.add(folder)
            folder = dirname(folder)
    return sorted(found, key=lambda folder: (-folder.count("/"), folder))

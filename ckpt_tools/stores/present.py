"""Lists what exists at a destination and which files may be replaced."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from posixpath import dirname
from types import MappingProxyType
from typing import TYPE_CHECKING

from ckpt_tools.core.option_names import format_option
from ckpt_tools.errors import DestinationExistsError
from ckpt_tools.stores.output_form import OutputKind

if TYPE_CHECKING:
    from ckpt_tools.stores.source import Store

NO_FILES: Mapping[str, int] = MappingProxyType({})

MAX_NAMES_IN_MESSAGE = 8
"""Names in one message."""


@dataclass(frozen=True, slots=True)
class DestinationContents:
    """The files at a place, hidden ones too, by their names in ``store`` with their sizes in bytes.

    ``others`` are the names of everything else: links, empty folders, pipes, devices.
    """

    store: Store
    files: Mapping[str, int]
    others: Sequence[str] = ()

    def find_unexpected_files(self, known_files: Mapping[str, int]) -> list[str]:
        """The names that are not ``known_files``, or that have another size now."""
        return sorted([*self.others, *(path for path, size in self.files.items() if known_files.get(path) != size)])


def check_free(
    url: str, kind: OutputKind, *, is_taken: bool, existing_kinds: Collection[OutputKind], overwrite: bool
) -> None:
    """Raises DestinationExistsError if an output of that ``kind`` may not, or cannot, take the place.

    ``is_taken`` says that a file is there, or a folder with contents; ``existing_kinds`` are the kinds of what exists
    there.
    """
    if is_taken and not overwrite:
        raise already_exists_error(url)
    if blocking_kinds := [other for other in existing_kinds if other != kind]:
        raise DestinationExistsError(
            f"{url} is a {blocking_kinds[0]}, which this output cannot replace; remove it first"
        )


def already_exists_error(url: str) -> DestinationExistsError:
    return DestinationExistsError(
        f"{url} exists; choose another destination, or replace it with {format_option('overwrite', True)}"
    )


def check_no_unexpected_files(
    contents: DestinationContents | None, url: str, replaced_files: Mapping[str, int]
) -> None:
    """Raises DestinationExistsError if there are other files than ``replaced_files``."""
    unexpected_names = [] if contents is None else contents.find_unexpected_files(replaced_files)
    if unexpected_names:
        raise DestinationExistsError(
            f"{url} contains files that were not there at the start: {format_names(unexpected_names)}; nothing was "
            f"replaced"
        )


def format_names(names: Iterable[str]) -> str:
    """The first names for a message, and how many more there are. Characters that cannot be printed are escaped."""
    printable_names = [name if name.isprintable() else ascii(name) for name in names]
    num_omitted = len(printable_names) - MAX_NAMES_IN_MESSAGE
    return ", ".join(printable_names[:MAX_NAMES_IN_MESSAGE]) + (f" and {num_omitted:,} more" if num_omitted > 0 else "")


def list_parent_folders(paths: Iterable[str]) -> list[str]:
    """Every folder that contains one of ``paths``, except the root; inner folders first."""
    parent_folders: set[str] = set()
    for path in paths:
        folder = dirname(path)
        while folder and folder not in parent_folders:
            parent_folders.add(folder)
            folder = dirname(folder)
    return sorted(parent_folders, key=lambda folder: (-folder.count("/"), folder))

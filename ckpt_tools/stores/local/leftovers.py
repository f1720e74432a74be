"""Leftovers of killed runs beside a local destination."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from ckpt_tools.stores.destination import Leftover
from ckpt_tools.stores.local.lock import claim_folder, lock_folder
from ckpt_tools.stores.local.owned import (
    NAMES_NAME,
    OUTPUT_NAME,
    aside_of,
    is_ours,
    names_in,
    remove_ours,
    staging_folder,
    unknown_in,
)
from ckpt_tools.stores.local.present import contents_of, is_folder, is_there, open_folder, size_of
from ckpt_tools.stores.local.publish import recover


def find_leftovers(place: Path) -> list[Leftover]:
    """Leftovers that are known to be a run's."""
    found, folder, aside = [], staging_folder(place), aside_of(place)
    if _is_idle(folder) and (size := _num_bytes(folder)) is not None:
        found.append(Leftover("unfinished output", str(folder), size))
    if is_folder(aside) and not is_there(place):
        found.append(Leftover("output moved aside, to be put back", str(aside), size_of(aside)))
    elif is_folder(aside) and not unknown_in(aside, names_in(folder).read()):
        found.append(Leftover("replaced output", str(aside), size_of(aside)))
    return found


def _is_idle(folder: Path) -> bool:
    """True if the folder exists and no process writes into it. Raises DestinationExistsError if one does."""
    if folder.is_symlink() or not folder.is_dir():
        return False
    with suppress(FileNotFoundError), open_folder(folder, os.O_NOFOLLOW) as number:
        lock_folder(number, folder)
        return True
    return False


def _num_bytes(folder: Path) -> int | None:
    """Size of the run's files in a staging folder; None if it contains only other files."""
    ours = [path for path in folder.iterdir() if is_ours(path)]
    if not ours and any(folder.iterdir()):
        return None
    files = [path.lstat().st_size for path in ours if path.name not in (OUTPUT_NAME, NAMES_NAME)]
    output, known = folder / OUTPUT_NAME, names_in(folder).read()
    inside = contents_of(output)[0] if output in ours else {}
    return sum(files) + sum(size for name, size in inside.items() if name in known)


def remove_leftovers(place: Path) -> None:
    folder = staging_folder(place)
    lock = claim_folder(folder)
    try:
        recover(place)
        remove_ours(folder)
    finally:
        os.close(lock)

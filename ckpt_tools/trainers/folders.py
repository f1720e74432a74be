"""The folder of a trainer that saves through DCP: which of its files are written again for it to resume."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from ckpt_tools.core.trainer_folder import CompanionFile, TrainerFolder
from ckpt_tools.stores.marker_files import DIGESTS_NAME, SIGNATURE_NAME
from ckpt_tools.trainers.all import TRAINERS
from ckpt_tools.trainers.record import Returned


def trainer_folder(
    files: Mapping[str, int],
    metadata: Sequence[str],
    tops: Mapping[str, Collection[str]],
    is_of_dcp: Callable[[str], bool],
) -> TrainerFolder | None:
    """The trainer's folder that holds the DCPs whose indexes are ``metadata``; None if no known trainer wrote it.

    ``tops`` has the names at the top of the tree of each. ``files`` are those of the source, with their sizes.
    ``is_of_dcp`` tells names of torch's files in a DCP.
    """
    folders = {path.rpartition("/")[0]: path for path in metadata}
    for trainer in TRAINERS:
        returned = trainer.returned
        base = None if returned is None else _base(returned, folders, files)
        if returned is not None and base is not None:
            parts = {folder[len(base) :]: tops[path] for folder, path in folders.items()}
            found = _copied(returned, base, files)
            known = {file.source for file in found.values()}
            around = (path for path in files if _is_in(path, base) and not is_of_dcp(path[len(base) :]))
            unknown = frozenset(path for path in around if path not in known)
            return TrainerFolder(
                trainer.name,
                parts,
                found,
                returned.without_ranks,
                returned.first_is_enough,
                unknown,
                resume=returned.resume,
            )
    return None


def _is_in(path: str, base: str) -> bool:
    """Whether a file is in the folder itself, and not written by ckpt-tools."""
    name = path[len(base) :]
    return path.startswith(base) and "/" not in name and name not in (SIGNATURE_NAME, DIGESTS_NAME)


def _base(returned: Returned, folders: Iterable[str], files: Mapping[str, int]) -> str | None:
    prefixes = set()
    for folder in folders:
        parent, _, name = folder.rpartition("/")
        above, last = (parent, name) if returned.parts else (folder, "")
        if re.fullmatch(returned.parts, last) is None:
            return None
        prefixes.add(f"{above}/" if above else "")
    base = prefixes.pop()
    return base if not prefixes and (returned.sign is None or f"{base}{returned.sign}" in files) else None


def _copied(returned: Returned, base: str, files: Mapping[str, int]) -> dict[str, CompanionFile]:
    found = {}
    for path, size in files.items():
        name = path.removeprefix(base)
        matches = (re.fullmatch(pattern, name) for pattern in returned.files if path.startswith(base))
        match = next((match for match in matches if match is not None), None)
        if match is not None:
            found[name] = CompanionFile(path, size, int(match[1] or 0) if match.re.groups else None)
    return found

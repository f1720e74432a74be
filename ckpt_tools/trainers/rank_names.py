"""Names of ranks' files: of which folder, of which rank.

verl and accelerate name them in a way of their own, and these names alone are a sign. All others are known by what the
files hold.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache

from ckpt_tools.trainers.all import TRAINERS
from ckpt_tools.trainers.names import is_own

SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")


def base(path: str) -> str:
    return path.rpartition("/")[2]


def folder_of(path: str) -> str:
    return path.rpartition("/")[0]


@cache
def _forms() -> tuple[re.Pattern[str], ...]:
    return tuple(re.compile(trainer.rank_file) for trainer in TRAINERS if trainer.rank_file)


def rank_file(path: str) -> re.Match[str] | None:
    """The match of a name that says its rank, with the groups ``item``, ``rank``, and ``world`` or ``index``."""
    name = base(path)
    return next((match for form in _forms() if (match := form.fullmatch(name)) is not None), None)


def says_its_rank(path: str) -> bool:
    """Whether the name alone says that a file is a rank's."""
    return rank_file(path) is not None


def is_candidate(path: str) -> bool:
    """Whether a file could be a rank's: one of torch's, and not one that is known to be a trainer's own."""
    name = base(path)
    return name.endswith(SUFFIXES) and (says_its_rank(name) or not is_own(name))


def are_those_of_ranks(paths: Iterable[str]) -> bool:
    """Whether the names of the files at the top say that they are those of ranks: one alone could be a whole state."""
    return sum("/" not in path and says_its_rank(path) for path in paths) > 1


def folders(paths: Iterable[str]) -> list[str]:
    """Folders that hold files of ranks by their names."""
    return list(dict.fromkeys(folder_of(path) for path in paths if says_its_rank(path)))


def worlds(paths: Iterable[str]) -> set[int]:
    """World sizes in the names."""
    found = (world_of(match) for path in paths if (match := rank_file(path)) is not None)
    return {world for world in found if world is not None}


def world_of(match: re.Match[str]) -> int | None:
    """The world size in the name of a rank's file; verl's has one."""
    world = match.groupdict().get("world")
    return None if world is None else int(world)

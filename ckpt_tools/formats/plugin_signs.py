"""Signs of plug-ins' formats: patterns of file names, the entry points of the group ``ckpt_tools.signs``.

A plug-in with a sign among a source's files is asked before the built-in readers. Every read would pay 20 ms or more
for a look-up by ``importlib.metadata``. So the files that pip wrote are searched for the group first, which takes 2 ms
with 150 distributions, and the look-up is left out where none has it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

from ckpt_tools.errors import UsageError

GROUP = "ckpt_tools.signs"


def claiming(files: Collection[str]) -> tuple[str, ...]:
    """The names of the formats that have a sign among ``files``.

    Raises:
        UsageError: an entry point has no name of a format.
    """
    if not _may_be_declared(tuple(sys.path)):
        return ()
    names = {path.rpartition("/")[2] for path in files}
    found = {form: None for pattern, form in _signs() if any(fnmatchcase(name, pattern) for name in names)}
    return tuple(found)


@cache
def _signs() -> tuple[tuple[str, str], ...]:
    from importlib.metadata import entry_points

    found = sorted((entry.name, entry.value) for entry in entry_points(group=GROUP))
    wrong = next((value for _, value in found if not value.isidentifier()), None)
    if wrong is not None:
        raise UsageError(
            f"the entry points of {GROUP} map a pattern of file names to a format's name; {wrong!r} is none"
        )
    return tuple(found)


@cache
def _may_be_declared(path: tuple[str, ...]) -> bool:
    """Whether a distribution declares a sign; also true of an archive on the path, which is not searched."""
    return any(_declares(folder or ".") for folder in path)


def _declares(folder: str) -> bool:
    try:
        with os.scandir(folder) as entries:
            infos = [entry.path for entry in entries if entry.name.endswith((".dist-info", ".egg-info"))]
    except OSError:
        return Path(folder).is_file()
    return any(_names_group(Path(info, "entry_points.txt")) for info in infos)


def _names_group(file: Path) -> bool:
    try:
        return GROUP.encode() in file.read_bytes()
    except OSError:
        return False

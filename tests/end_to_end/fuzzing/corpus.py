"""The corpus on disk: checkpoints as small zips of their files, read without any framework.

The libraries that own the formats wrote them; ``seeds.py`` of commit bc889227 is the program. ``pack`` adds another.
"""

import zipfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path

Files = Mapping[str, bytes]

FOLDER = Path(__file__).parents[2] / "corpus"

CRASHERS = FOLDER / "crashers"
"""Inputs that once broke a reader."""


@cache
def seeds() -> Mapping[str, Files]:
    """The genuine checkpoints by name."""
    return _read(FOLDER)


@cache
def crashers() -> Mapping[str, Files]:
    """The inputs that were found by fuzzing."""
    return _read(CRASHERS)


def _read(folder: Path) -> Mapping[str, Files]:
    return {path.stem: unpacked(path) for path in sorted(folder.glob("*.zip"))}


def unpacked(path: Path) -> Files:
    with zipfile.ZipFile(path) as archive:
        return {name.encode("ascii").decode("unicode_escape"): archive.read(name) for name in archive.namelist()}


def pack(path: Path, files: Files) -> None:
    """Write a checkpoint, equal bytes for equal checkpoints; names that no zip can hold are escaped."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            escaped = name.encode("unicode_escape").decode()
            archive.writestr(zipfile.ZipInfo(escaped), data, zipfile.ZIP_DEFLATED, 9)

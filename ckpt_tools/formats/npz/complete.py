"""Completeness of a ``.npz`` in a run, by the directory of its zip."""

from __future__ import annotations

from contextlib import suppress

from ckpt_tools.errors import UnsupportedError
from ckpt_tools.serialization.zip_archive import read_directory
from ckpt_tools.trainers.saved import SavedCheckpoint


def is_empty(saved: SavedCheckpoint, path: str) -> bool:
    """True if the archive has no array; False if it is compressed, or not a zip."""
    if path.endswith(".npz"):
        read, size, _ = saved.get_archive_arguments(path)
        with suppress(UnsupportedError):
            directory = read_directory(read, size, path, tail_bytes=4096)
            return directory is not None and not directory.records
    return False

"""Completeness of files of ``torch.save``: they reach to their ends and hold tensors, by their zips' directories."""

from __future__ import annotations

from contextlib import suppress

from ckpt_tools.errors import UnsupportedError
from ckpt_tools.serialization.zip_archive import ZipDirectory, read_directory
from ckpt_tools.trainers.saved import SavedCheckpoint

_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")

_TAIL_BYTES = 4096


def problem(saved: SavedCheckpoint) -> str | None:
    """A zip with no directory at its end is cut off; other files say nothing."""
    for path in saved.files:
        if path.endswith(_SUFFIXES) and "/zero/" not in f"/{path}":
            with suppress(UnsupportedError):
                read, size, _ = saved.get_archive_arguments(path)
                if _read_zip_directory(saved, path) is None and read(0, min(4, size)).startswith(b"PK"):
                    return f"{path} has no end: it is cut off"
    return None


def is_empty(saved: SavedCheckpoint, path: str) -> bool:
    """True if a file is a zip without the storage of a tensor."""
    if path.endswith(_SUFFIXES):
        with suppress(UnsupportedError):
            directory = _read_zip_directory(saved, path)
            records = () if directory is None else directory.records
            return directory is not None and not any(name.partition("/")[2].startswith("data/") for name in records)
    return False


def _read_zip_directory(saved: SavedCheckpoint, path: str) -> ZipDirectory | None:
    read, size, _ = saved.get_archive_arguments(path)
    return read_directory(read, size, path, tail_bytes=_TAIL_BYTES)

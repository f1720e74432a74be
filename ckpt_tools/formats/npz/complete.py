"""Whether a ``.npz`` holds arrays, by the directory of its zip."""

from __future__ import annotations

from contextlib import suppress

from ckpt_tools.errors import UnsupportedError
from ckpt_tools.serialization.zip_archive import read_directory
from ckpt_tools.trainers.saved import Saved


def holds_tensors(saved: Saved, path: str) -> bool:
    """Whether the archive has a member; True if it is compressed, or no zip."""
    read, size, _ = saved.part(path)
    with suppress(UnsupportedError):
        directory = read_directory(read, size, path, tail_bytes=4096)
        return directory is None or bool(directory.records)
    return True

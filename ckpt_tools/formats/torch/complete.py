"""Whether files of ``torch.save`` reach to their ends."""

from __future__ import annotations

from ckpt_tools.errors import UnsupportedError
from ckpt_tools.serialization.zip_archive import read_directory
from ckpt_tools.trainers.saved import Saved

TAIL_BYTES = 4096

_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")


def problem(saved: Saved) -> str | None:
    paths = (path for path in saved.files if path.endswith(_SUFFIXES) and "/zero/" not in f"/{path}")
    return next((f"{path} has no end: it is cut off" for path in paths if _is_cut_off(saved, path)), None)


def _is_cut_off(saved: Saved, path: str) -> bool:
    """Whether it begins as a zip and has no directory at the end; other files say nothing."""
    read, size, _ = saved.part(path)
    try:
        directory = read_directory(read, size, path, tail_bytes=TAIL_BYTES)
    except UnsupportedError:
        return False
    return directory is None and read(0, min(4, size)).startswith(b"PK")

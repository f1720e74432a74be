"""Completeness of a GGUF file in a run, by the start of its header."""

from __future__ import annotations

from ckpt_tools.formats.gguf.header import MAGIC
from ckpt_tools.trainers.saved import SavedCheckpoint


def is_empty(saved: SavedCheckpoint, path: str) -> bool:
    """True if the header counts no tensor."""
    if not path.endswith(".gguf"):
        return False
    read, size, _ = saved.get_archive_arguments(path)
    head = read(0, min(16, size))
    return head.startswith(MAGIC) and not any(head[8:])

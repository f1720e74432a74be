"""Whether a GGUF file holds tensors, by the start of its header."""

from __future__ import annotations

from ckpt_tools.formats.gguf.header import MAGIC
from ckpt_tools.trainers.saved import Saved


def holds_tensors(saved: Saved, path: str) -> bool:
    """True if the header counts a tensor, or if the file is not GGUF."""
    read, size, _ = saved.part(path)
    head = read(0, min(16, size))
    return not head.startswith(MAGIC) or any(head[8:])

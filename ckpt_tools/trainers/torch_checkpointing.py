"""torch_checkpointing (0.1.1), which torchtitan and others may save with: a file of each item and rank."""

from __future__ import annotations

from ckpt_tools.stores.source import Source
from ckpt_tools.trainers.record import Trainer

INDEX = "metadata.pkl"
"""Written last, beside ``{item}_{rank}.pt``."""

_INDEX_KEYS = (b"version", b"world_size", b"metadata")
"""The keys of its dict."""

_KEY_SEARCH_BYTES = 1 << 10
"""Bytes at the start and at the end, where they stand."""

TORCH_CHECKPOINTING = Trainer(
    name="torch_checkpointing",
    others=r"metadata\.pkl|(?:model|optimizer|optim|lr_scheduler|train_state|dataloader|ema)_\d+\.(?:pt|safetensors)",
    last=r"metadata\.pkl",
)


def has_index(source: Source, folder: str = "") -> bool:
    """Whether a folder has such an index; a file of this name can be anything."""
    path = f"{folder}/{INDEX}" if folder else INDEX
    if path not in source.files:
        return False
    size = source.size(path)
    head = source.read(path, 0, min(size, _KEY_SEARCH_BYTES))
    tail = source.read(path, max(size - _KEY_SEARCH_BYTES, 0), size)
    return all(sign in head + tail for sign in _INDEX_KEYS)

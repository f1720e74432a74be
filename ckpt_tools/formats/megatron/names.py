"""Names of Megatron-Core's files, and the folders that they tell."""

from __future__ import annotations

import json
import re

from ckpt_tools.errors import CkptError
from ckpt_tools.stores.source import Source

COMMON_FILE = "common.pt"
CONFIG_FILE = "metadata.json"
"""What dist_checkpointing writes beside the index, and what it writes last."""

TRACKER = "latest_checkpointed_iteration.txt"
"""Beside the ``iter_`` folders of a run: the number of the last one that is finished, or ``release``."""

DATA = re.compile(r"[^/]+\.distcp")
ITERATION = re.compile(r"(?:.*/)?iter_(\d{1,18})/?")

FILES = r"metadata\.json|common\.pt|model_optim_rng\.pt|distrib_optim\.pt"
"""A pattern of the names of files in a checkpoint, beside those of a DCP."""

MAX_CONFIG_BYTES = 1 << 20
"""It names a backend and two versions."""

_LEGACY = re.compile(r"(?:.*/)?(?:model_optim_rng|model_rng|distrib_optim)\.pt")


def torch_dist_folders(source: Source) -> list[str]:
    """The folders, as prefixes of paths, in which dist_checkpointing of Megatron-Core keeps a checkpoint."""
    inside: dict[str, set[str]] = {}
    for path in source.files:
        folder, slash, name = path.rpartition("/")
        if name in (".metadata", COMMON_FILE, CONFIG_FILE):
            inside.setdefault(folder + slash, set()).add(name)
    return [prefix for prefix, names in inside.items() if _is_torch_dist(source, prefix, names)]


def _is_torch_dist(source: Source, prefix: str, names: set[str]) -> bool:
    if {".metadata", COMMON_FILE} <= names:
        return True
    return len(names) > 1 and backend_of(source, f"{prefix}{CONFIG_FILE}") is not None


def backend_of(source: Source, path: str) -> str | None:
    """The form of the tensors by the ``metadata.json`` at ``path``; None if it is another file."""
    if path not in source.files or source.size(path) > MAX_CONFIG_BYTES:
        return None
    try:
        found = json.loads(source.read_all(path, limit_bytes=MAX_CONFIG_BYTES))
    except (CkptError, ValueError, RecursionError):
        return None
    backend = found.get("sharded_backend") if isinstance(found, dict) else None
    return backend if isinstance(backend, str) else None


def is_legacy(path: str) -> bool:
    """Whether Megatron-LM's format before dist_checkpointing gives this name to a file."""
    return _LEGACY.fullmatch(path) is not None

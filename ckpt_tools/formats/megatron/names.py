"""Names of Megatron-Core's files."""

from __future__ import annotations

import json
import re

from ckpt_tools.errors import CkptError
from ckpt_tools.stores.source import Source

COMMON_FILE = "common.pt"
CONFIG_FILE = "metadata.json"
"""Files that dist_checkpointing writes beside the index, the second one last."""

TRACKER_FILE = "latest_checkpointed_iteration.txt"
"""Beside the ``iter_`` folders of a run: the number of the last one that is finished, or ``release``."""

DATA_FILE_NAME = re.compile(r"[^/]+\.distcp")
ITERATION_FOLDER = re.compile(r"(?:.*/)?iter_(\d{1,18})/?")

FILE_NAME_PATTERN = r"metadata\.json|common\.pt|model_optim_rng\.pt|distrib_optim\.pt"
"""A pattern of the names of files in a checkpoint, beside those of a DCP."""

MAX_CONFIG_BYTES = 1 << 20
"""It names a backend and two versions."""

LAYER_WISE_FILE = re.compile(r"(?:.*/)?layer_wise_optimizer_\d+\.pt")
"""The layer-wise optimizer (Muon) of a data-parallel rank, beside the checkpoint or its folder (Megatron-LM,
training/checkpointing.py): all of the optimizer with ``--ckpt-format torch``, and once more what a ``torch_dist``
holds (NVIDIA-NeMo/Megatron-Bridge#2307)."""

_LEGACY_FILE = re.compile(r"(?:.*/)?(?:model_optim_rng|model_rng|distrib_optim)\.pt")


def find_torch_dist_folders(source: Source) -> list[str]:
    """The folders, as prefixes of paths, in which dist_checkpointing of Megatron-Core keeps a checkpoint."""
    names_by_folder: dict[str, set[str]] = {}
    for path in source.files:
        folder, slash, name = path.rpartition("/")
        if name in (".metadata", COMMON_FILE, CONFIG_FILE):
            names_by_folder.setdefault(folder + slash, set()).add(name)
    return [
        prefix
        for prefix, names in names_by_folder.items()
        if {".metadata", COMMON_FILE} <= names
        or (len(names) > 1 and read_backend(source, f"{prefix}{CONFIG_FILE}") is not None)
    ]


def read_backend(source: Source, path: str) -> str | None:
    """The form of the tensors by the ``metadata.json`` at ``path``; None if it is another file."""
    if path not in source.files or source.size(path) > MAX_CONFIG_BYTES:
        return None
    try:
        config = json.loads(source.read_all(path, limit_bytes=MAX_CONFIG_BYTES))
    except (CkptError, ValueError, RecursionError):
        return None
    backend = config.get("sharded_backend") if isinstance(config, dict) else None
    return backend if isinstance(backend, str) else None


def detect(source: Source) -> bool:
    return bool(find_torch_dist_folders(source)) or any(map(is_legacy_file, source.files))


def is_legacy_file(path: str) -> bool:
    """Whether Megatron-LM's format before dist_checkpointing gives this name to a file."""
    return _LEGACY_FILE.fullmatch(path) is not None

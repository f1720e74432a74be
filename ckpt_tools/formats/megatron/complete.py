"""Whether a save of Megatron-Core has finished, by names."""

from __future__ import annotations

import re

from ckpt_tools.formats.dcp.complete import is_dcp
from ckpt_tools.formats.megatron import names
from ckpt_tools.trainers.saved import SavedCheckpoint


def is_torch_dist(saved: SavedCheckpoint) -> bool:
    """Whether the names of a DCP's folder are Megatron-Core's. Newer versions write no ``common.pt``."""
    is_iteration = re.fullmatch(r"iter_\d{7}", saved.base_name) is not None
    return is_iteration or bool({names.CONFIG_FILE, names.COMMON_FILE} & saved.file_names)


def is_legacy_checkpoint(saved: SavedCheckpoint) -> bool:
    """Whether Megatron-LM wrote it in its older format, a file for each tensor- and pipeline-parallel rank."""
    return any(re.search(r"mp_rank_\d+(?:_\d+)*/", path) and names.is_legacy_file(path) for path in saved.files)


def is_megatron(saved: SavedCheckpoint) -> bool:
    return is_torch_dist(saved) if is_dcp(saved) else is_legacy_checkpoint(saved)


def problem(saved: SavedCheckpoint) -> str | None:
    """Reason why the checkpoint is not complete, or None: ``metadata.json`` is written last."""
    is_complete = names.CONFIG_FILE in saved.file_names or is_legacy_checkpoint(saved)
    if is_complete or not is_dcp(saved) or not is_torch_dist(saved):
        return None
    return f"no {names.CONFIG_FILE}, which Megatron-Core writes last: the save did not finish"

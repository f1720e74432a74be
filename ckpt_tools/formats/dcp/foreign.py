"""Folders with a ``.metadata`` that are more, or less, than a DCP of one model: refused by name, or noted.

Megatron-Core's ``torch_dist`` (dist_checkpointing, 0.7 to 0.19) is a DCP whose names carry the optimizer's slots in
front, ``optimizer.state.exp_avg.<name>``, whose layers are stacked into one tensor, and whose step and parameter groups
lie in ``common.pt`` beside it, or in an item ``common_state/shard_0_1``; it is a format of its own. NeMo
Automodel keeps Hugging Face shards in ``model/`` and a DCP of the optimizer in ``optim/``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from ckpt_tools.core.manifest import WEIGHT, Kind, Manifest
from ckpt_tools.core.notes import note_unrelated_files
from ckpt_tools.core.option_names import format_option
from ckpt_tools.errors import UnsupportedError
from ckpt_tools.formats.dcp.index import DcpIndex
from ckpt_tools.formats.megatron.names import CONFIG_FILE, find_torch_dist_folders
from ckpt_tools.stores.source import Source

_SHARDED_OBJECT = re.compile(r".+/shard_\d+(?:\.\d+)*_\d+(?:\.\d+)*")
"""megatron/core/dist_checkpointing/mapping.py ``ShardedObject.unique_key``."""

_WEIGHT_FILE = re.compile(r"(?:.*\.safetensors|.*model[^/]*\.(?:bin|pt|pth)|.*_model_states\.pt)")

_MEGATRON_MESSAGE = (
    "this checkpoint is written by megatron-core's dist_checkpointing (torch_dist), which stacks layers and puts "
    "optimizer state beside the weights; "
)


_MASTER_LISTS = "fp32_from_fp16_params"
"""A part of paths in ``torch_dcp`` of a run in 16 bit, whose fp32 masters are lists without names (megatron-core
0.16.1, optimizer/optimizer.py, ``Float16OptimizerWithFloat16Params``)."""


def refuse_megatron(source: Source, metadata_paths: Iterable[str], index: DcpIndex) -> None:
    """Raises UnsupportedError where the folders of ``metadata_paths`` are Megatron-Core's."""
    megatron_metadata = [f"{prefix}.metadata" for prefix in find_torch_dist_folders(source)]
    megatron_path = next((path for path in metadata_paths if path in megatron_metadata), None)
    if megatron_path is not None:
        raise UnsupportedError(
            f"{_MEGATRON_MESSAGE}read it with {format_option('from_', 'megatron')}", path=megatron_path
        )
    name = next((name for name, path in index.paths.items() if _MASTER_LISTS in path), None)
    if name is not None:
        raise UnsupportedError(
            "it is a checkpoint of Megatron-LM (torch_dcp) in 16 bit, whose fp32 masters have no names, which is not "
            "supported; save it with --ckpt-format torch_dist, or without the optimizer (--no-save-optim)",
            path=next(iter(metadata_paths)),
            key=name,
        )
    name = next((name for name in index.objects if _SHARDED_OBJECT.fullmatch(name)), None)
    if name is not None or index.mcore_data is not None:
        raise UnsupportedError(
            f"{_MEGATRON_MESSAGE}{CONFIG_FILE}, which it writes last, is missing: the checkpoint was not finished; "
            "take an earlier one",
            path=next(iter(metadata_paths)),
            key=name,
        )


def note_other_half(manifest: Manifest, source: Source, metadata_paths: Iterable[str]) -> Manifest:
    """``manifest`` with a note on model files that lie in other folders than the DCP.

    Raises:
        UnsupportedError: the DCP holds no weight, so that they are the half that it lacks.
    """
    folders = tuple(path.removesuffix(".metadata") for path in metadata_paths)
    read_files = {file for entry in manifest.tensors.values() for file in entry.shards.files}
    model_files = [path for path in source.files if _WEIGHT_FILE.fullmatch(path) and path not in read_files]
    other_files = [path for path in model_files if not path.startswith(tuple(filter(None, folders)))]
    if other_files:
        from ckpt_tools.trainers.run_folders import list_other_checkpoint_files

        other_checkpoint_files = list_other_checkpoint_files(source, read_files)
        other_files = [path for path in other_files if path not in other_checkpoint_files]
    if not other_files:
        return manifest
    has_weights = any(key.slot == WEIGHT for key in manifest.select_kinds(Kind.PARAMETER, Kind.BUFFER))
    shown_files = ", ".join(other_files[:3]) + (", ..." if len(other_files) > 3 else "")
    if not has_weights:
        raise UnsupportedError(
            f"the checkpoint has two halves, which are not joined: {', '.join(metadata_paths)} describes optimizer "
            f"state alone, and the model lies in {shown_files}; for the weights, name the folder of the model or, if "
            f"it is the same, its format with {format_option('from_')}"
        )
    return replace(manifest, notes=(*manifest.notes, *map(note_unrelated_files, other_files)))

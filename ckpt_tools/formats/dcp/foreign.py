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
from ckpt_tools.formats.dcp.index import Index
from ckpt_tools.formats.megatron.names import CONFIG_FILE, torch_dist_folders
from ckpt_tools.stores.source import Source

_SHARDED_OBJECT = re.compile(r".+/shard_\d+(?:\.\d+)*_\d+(?:\.\d+)*")
"""megatron/core/dist_checkpointing/mapping.py ``ShardedObject.unique_key``."""

_WEIGHTS = re.compile(r"(?:.*\.safetensors|.*model[^/]*\.(?:bin|pt|pth)|.*_model_states\.pt)")

_ADVICE = (
    "this checkpoint is written by megatron-core's dist_checkpointing (torch_dist), which stacks layers and puts "
    "optimizer state beside the weights; "
)


_LISTS = "fp32_from_fp16_params"
"""A part of paths in ``torch_dcp`` of a run in 16 bit, whose fp32 masters are lists without names (megatron-core
0.16.1, optimizer/optimizer.py, ``Float16OptimizerWithFloat16Params``)."""


def refuse_megatron(source: Source, metadata: Iterable[str], index: Index) -> None:
    """Raises UnsupportedError where the folders of ``metadata`` are Megatron-Core's."""
    known = [f"{prefix}.metadata" for prefix in torch_dist_folders(source)]
    sign = next((path for path in metadata if path in known), None)
    if sign is not None:
        raise UnsupportedError(f"{_ADVICE}read it with {format_option('from_', 'megatron')}", path=sign)
    name = next((name for name, path in index.paths.items() if _LISTS in path), None)
    if name is not None:
        raise UnsupportedError(
            "it is a checkpoint of Megatron-LM (torch_dcp) in 16 bit, whose fp32 masters have no names, which is not "
            "supported; save it with --ckpt-format torch_dist, or without the optimizer (--no-save-optim)",
            path=next(iter(metadata)),
            key=name,
        )
    name = next((name for name in index.objects if _SHARDED_OBJECT.fullmatch(name)), None)
    if name is not None or index.mcore_data is not None:
        raise UnsupportedError(
            f"{_ADVICE}{CONFIG_FILE}, which it writes last, is missing: the checkpoint was not finished; take an "
            "earlier one",
            path=next(iter(metadata)),
            key=name,
        )


def with_other_half(manifest: Manifest, source: Source, metadata: Iterable[str]) -> Manifest:
    """``manifest`` with a note on model files that lie in other folders than the DCP.

    Raises:
        UnsupportedError: the DCP holds no weight, so that they are the half that it lacks.
    """
    folders = tuple(path.removesuffix(".metadata") for path in metadata)
    known = {file for entry in manifest.tensors.values() for file in entry.shards.files}
    found = [path for path in source.files if _WEIGHTS.fullmatch(path) and path not in known]
    others = [path for path in found if not path.startswith(tuple(filter(None, folders)))]
    if others:
        from ckpt_tools.trainers.run_folders import list_other_checkpoint_files

        elsewhere = list_other_checkpoint_files(source.files, known)
        others = [path for path in others if path not in elsewhere]
    if not others:
        return manifest
    has_weights = any(key.slot == WEIGHT for key in manifest.select_kinds(Kind.PARAMETER, Kind.BUFFER))
    listed = ", ".join(others[:3]) + (", ..." if len(others) > 3 else "")
    if not has_weights:
        raise UnsupportedError(
            f"the checkpoint has two halves, which are not joined: {', '.join(metadata)} describes optimizer state "
            f"alone, and the model lies in {listed}; name the model's files by themselves for the weights"
        )
    return replace(manifest, notes=(*manifest.notes, *map(note_unrelated_files, others)))

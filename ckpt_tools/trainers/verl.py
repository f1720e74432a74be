"""verl (0.6, utils/checkpoint/fsdp_checkpoint_manager.py): files of ranks in ``actor`` and ``critic``."""

from __future__ import annotations

from ckpt_tools.trainers import megatron_lm
from ckpt_tools.trainers.record import Trainer

CONFIG = "fsdp_config.json"
"""``{"FSDP_version": 2, "world_size": 2}``."""

HUGGING_FACE = "huggingface"
"""Folder for ``config.json`` and tokenizer."""

VERL = Trainer(
    name="verl",
    rank_file=r"(?P<item>[a-z_]+)_world_size_(?P<world>\d{1,9})_rank_(?P<rank>\d{1,9})\.pt",
    others=r"(?:model|optim|extra_state)_world_size_\d+_rank_\d+\.pt|fsdp_config\.json|data\.pt",
    folders=f"actor|critic|{HUGGING_FACE}",
    last=r"model_world_size_\d+_rank_\d+\.pt",
    problem=megatron_lm.problem,
)

"""All trainers. A trainer that builds on another comes before it, and its metrics count."""

from __future__ import annotations

from ckpt_tools.trainers.accelerate import ACCELERATE
from ckpt_tools.trainers.diffusers import DIFFUSERS
from ckpt_tools.trainers.lerobot import LEROBOT
from ckpt_tools.trainers.lightning import LIGHTNING
from ckpt_tools.trainers.megatron_lm import MEGATRON_LM
from ckpt_tools.trainers.nemo import AUTOMODEL, NEMO
from ckpt_tools.trainers.olmo import OLMO
from ckpt_tools.trainers.ours import OURS
from ckpt_tools.trainers.ray import RAY
from ckpt_tools.trainers.torch_checkpointing import TORCH_CHECKPOINTING
from ckpt_tools.trainers.torchtune import TORCHTUNE
from ckpt_tools.trainers.transformers import TRANSFORMERS
from ckpt_tools.trainers.verl import VERL

TRAINERS = (
    TRANSFORMERS, ACCELERATE, DIFFUSERS, LEROBOT, LIGHTNING, OLMO, NEMO, AUTOMODEL, MEGATRON_LM, VERL,
    TORCH_CHECKPOINTING, TORCHTUNE, RAY, OURS,
)  # fmt: skip

"""Tensor parallelism of the language model: heads and hidden units are split, norms are sequence-parallel.

Between layers each worker holds a slice of the sequence (``Shard(1)``). A layer gathers it, multiplies by the worker's
columns and then by its rows, and scatters the sums into slices.
"""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from ..models.language_model import LanguageModel


def shard_block(block: nn.Module, mesh: DeviceMesh) -> None:
    """Split a layer over the workers of ``mesh``."""
    plan: dict[str, ParallelStyle] = {
        "attention_norm": SequenceParallel(),
        "attention": _gathered(),
        **{f"attention.{name}": ColwiseParallel() for name in ("q", "k", "v")},
        "attention.o": RowwiseParallel(output_layouts=Shard(1)),
        "feed_forward_norm": SequenceParallel(),
        "feed_forward": _gathered(),
        **{f"feed_forward.{name}": ColwiseParallel() for name in ("gate", "up")},
        "feed_forward.down": RowwiseParallel(output_layouts=Shard(1)),
    }
    parallelize_module(block, mesh, plan)


def shard_root(model: nn.Module, mesh: DeviceMesh) -> None:
    """Split embedding and head by vocabulary. They are one matrix; each worker has the same part in both."""
    assert isinstance(model, LanguageModel)
    plan: dict[str, ParallelStyle] = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, plan)
    model.head.weight = model.embed.weight


def _gathered() -> PrepareModuleInput:
    return PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))

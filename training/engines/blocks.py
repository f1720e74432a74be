"""Building a model block by block, so that no rank ever holds all of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ..config.train_config import TrainConfig
from ..models.zoo import ModelSpec

OnBlock = Callable[[nn.Module], None]

MAX_COMPILED = 64
"""Variants of one class of blocks; those beyond would be computed without a compiler, and nobody would be told."""


def build(config: TrainConfig, spec: ModelSpec, on_block: OnBlock) -> nn.Module:
    """The model with the weights of the run's seed; ``on_block`` is called with each block when its weights are drawn.

    They are drawn in the same order whatever ``on_block`` does, so every strategy and world size starts from the same.
    """
    torch.manual_seed(config.seed)
    if spec.whole_first:
        model = spec.build()
        for block in spec.blocks_of(model):
            on_block(block)
        return model
    with _announced(spec, on_block):
        return spec.build()


def prepare(config: TrainConfig, block: nn.Module) -> None:
    """What the options ask of every block, whoever shards it."""
    if config.compile:
        block.forward = _compiled(block)
    if config.activation_checkpointing:
        # Around forward, not around the module: names of parameters stay as they are.
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def _compiled(block: nn.Module) -> Callable[..., Any]:
    """``forward`` alone, without the hooks that gather weights, so names of parameters stay as they are.

    In evaluation it is computed as it was written, because predictions from the checkpoint are too, to the last bit.
    """
    plain = block.forward
    # Shapes are the same at every step. Blocks that differ in theirs are all compiled, not the first eight alone.
    torch._dynamo.config.recompile_limit = MAX_COMPILED
    compiled = torch.compile(plain, dynamic=False)

    def forward(*args: Any, **keywords: Any) -> Any:
        return (compiled if block.training else plain)(*args, **keywords)

    return forward


@contextmanager
def _announced(spec: ModelSpec, on_block: OnBlock) -> Iterator[None]:
    """Within the context, each new block calls ``on_block`` at the end of its constructor."""
    originals = {kind: kind.__init__ for kind in spec.blocks}
    try:
        for kind, original in originals.items():
            kind.__init__ = _calling(original, on_block)  # type: ignore[method-assign]
        yield
    finally:
        for kind, original in originals.items():
            kind.__init__ = original  # type: ignore[method-assign]


def _calling(original: Callable[..., None], on_block: OnBlock) -> Callable[..., None]:
    def init(self: Any, *args: Any, **keywords: Any) -> None:
        original(self, *args, **keywords)
        on_block(self)

    return init


class RunningAverages:
    """What a model keeps of its own samples beside weights, as batch norm does. It is found once: to walk through all
    modules at each step takes longer than a small model's step may.

    Buffers that are not saved are constants, such as the frequencies of rotary positions.
    """

    def __init__(self, model: nn.Module) -> None:
        self._world_size = torch.distributed.get_world_size()
        self._places = [
            (module, name)
            for module in (model.modules() if self._world_size > 1 else ())
            for name, buffer in module.named_buffers(recurse=False)
            if buffer.is_floating_point() and name not in module._non_persistent_buffers_set
        ]

    @torch.no_grad()
    def average(self) -> None:
        """Let every rank have the same; collective."""
        for module, name in self._places:
            # By name: loading a checkpoint may put another tensor in the place.
            buffer = module.get_buffer(name)
            torch.distributed.all_reduce(buffer)
            buffer /= self._world_size


def set_training(model: nn.Module) -> None:
    """As ``model.train()``, which walks through all modules; at most steps there is nothing to change."""
    if not model.training:
        model.train()

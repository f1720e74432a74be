"""Building a model block by block, so a rank never holds all of it, and preparing its blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ..config.train_config import TrainConfig
from ..models.zoo import ModelSpec, TrainableModel

OnBlock = Callable[[nn.Module], None]

MAX_COMPILED = 64
"""Limit of compiled variants of a class of blocks; torch runs further ones uncompiled without a warning."""


def build_in_blocks(config: TrainConfig, spec: ModelSpec, on_block: OnBlock) -> TrainableModel:
    """The model with the weights of the run's seed; ``on_block`` is called with each block once its weights are drawn.
    The order of drawing is fixed, so every strategy and world size starts from the same weights."""
    torch.manual_seed(config.seed)
    if spec.early:
        with _announce_blocks(spec, on_block):
            return spec.make()
    model = spec.make()
    for block in model.blocks:
        on_block(block)
    return model


def prepare_block(config: TrainConfig, block: nn.Module) -> None:
    """Apply ``--compile`` and ``--activation-checkpointing`` to a block."""
    if config.compile:
        block.forward = _compile_forward(block)
    if config.activation_checkpointing:
        # A wrapper of the module would change the names of parameters.
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def _compile_forward(block: nn.Module) -> Callable[..., Any]:
    """Compiled ``forward``, without the hooks that gather weights; names of parameters stay the same. Evaluation is not
    compiled, so predictions are bit for bit those from the checkpoint."""
    plain = block.forward
    # Shapes are the same at every step. torch's default limit compiles only eight blocks of different shapes.
    torch._dynamo.config.recompile_limit = MAX_COMPILED
    compiled = torch.compile(plain, dynamic=False)

    def forward(*args: Any, **keywords: Any) -> Any:
        return (compiled if block.training else plain)(*args, **keywords)

    return forward


@contextmanager
def _announce_blocks(spec: ModelSpec, on_block: OnBlock) -> Iterator[None]:
    """Within the block, constructors of ``spec.early`` call ``on_block`` at their end."""
    originals = {kind: kind.__init__ for kind in spec.early}

    def add_announcement(original: Callable[..., None]) -> Callable[..., None]:
        def init_and_announce(self: nn.Module, *args: Any, **keywords: Any) -> None:
            original(self, *args, **keywords)
            on_block(self)

        return init_and_announce

    try:
        for kind, original in originals.items():
            kind.__init__ = add_announcement(original)  # type: ignore[method-assign]
        yield
    finally:
        for kind, original in originals.items():
            kind.__init__ = original  # type: ignore[method-assign]


class RunningAverages:
    """Running averages in a model's buffers, as of batch norm. They are collected once, because a walk through all
    modules may take longer than a step of a small model. Buffers that are not saved are constants.
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
    def average_over_ranks(self) -> None:
        """Average over all ranks; collective."""
        for module, name in self._places:
            # By name: loading a checkpoint may replace the tensor.
            buffer = module.get_buffer(name)
            torch.distributed.all_reduce(buffer)
            buffer /= self._world_size


def set_training(model: nn.Module) -> None:
    """``model.train()``, which walks through all modules, only if needed."""
    if not model.training:
        model.train()

"""Sharding strategies by their usual names. Imports no framework."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

EngineName = Literal["fsdp2", "deepspeed", "zero1", "zero2", "zero3"]
Framework = Literal["fsdp2", "deepspeed"]
TorchStrategy = Literal["ddp", "no_shard", "shard_grad_op", "full_shard", "hybrid_shard"]
ZeroStrategy = Literal[
    "zero0", "zero1", "zero2", "zero3", "zero1_offload", "zero2_offload", "zero3_offload", "zero3_hpz"
]
StrategyName = Literal[TorchStrategy, ZeroStrategy]
STRATEGIES: tuple[StrategyName, ...] = get_args(StrategyName)
SHORT_FORMS: tuple[EngineName, ...] = ("zero1", "zero2", "zero3")
"""Engines that are strategies too: ``--engine zero3`` is ``--strategy zero3``."""


@dataclass(frozen=True, slots=True)
class Strategy:
    """A sharding strategy. ``stage`` is ZeRO's, for both frameworks: each worker keeps everything (0), weights and
    gradients (1), weights (2) or nothing (3) whole. ``in_groups``: shards over groups of ``--shard-size`` workers.
    ``twin``: the equivalent strategy of the other framework, if there is one."""

    name: StrategyName
    framework: Framework
    stage: Literal[0, 1, 2, 3]
    in_groups: bool = False
    offload: bool = False
    twin: StrategyName | None = None


BY_NAME: Mapping[StrategyName, Strategy] = {
    strategy.name: strategy
    for strategy in (
        Strategy("ddp", "fsdp2", 0, twin="zero0"),
        Strategy("no_shard", "fsdp2", 0, twin="zero0"),
        Strategy("shard_grad_op", "fsdp2", 2, twin="zero2"),
        Strategy("full_shard", "fsdp2", 3, twin="zero3"),
        Strategy("hybrid_shard", "fsdp2", 3, in_groups=True, twin="zero3_hpz"),
        Strategy("zero0", "deepspeed", 0, twin="ddp"),
        Strategy("zero1", "deepspeed", 1),
        Strategy("zero2", "deepspeed", 2, twin="shard_grad_op"),
        Strategy("zero3", "deepspeed", 3, twin="full_shard"),
        Strategy("zero1_offload", "deepspeed", 1, offload=True),
        Strategy("zero2_offload", "deepspeed", 2, offload=True),
        Strategy("zero3_offload", "deepspeed", 3, offload=True),
        Strategy("zero3_hpz", "deepspeed", 3, in_groups=True, twin="hybrid_shard"),
    )
}


def chosen_strategy(strategy: StrategyName | None, engine: EngineName | None) -> Strategy:
    """The strategy that ``--strategy`` and ``--engine`` select together. An engine alone shards fully; ``deepspeed``
    with a strategy of PyTorch's selects its twin. :mod:`.combinations` refuses contradictions."""
    if strategy is None:
        strategy = engine if engine in SHORT_FORMS else "full_shard"  # type: ignore[assignment]
    found = BY_NAME[strategy or "full_shard"]
    return BY_NAME[found.twin] if engine == "deepspeed" and found.framework == "fsdp2" and found.twin else found

"""Experts dealt out over the ranks of a pool, beside the same experts whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from tests.training.strategy_jobs import tiny_config
from training.config.schedule import schedule_for
from training.engines import create_engine
from training.engines.parallel import split_experts
from training.models.experts import Experts, MixtureSizes
from training.models.language_model import CONTEXT

SIZES = MixtureSizes()


def seeded_experts() -> Experts:
    torch.manual_seed(0)
    return Experts(SIZES)


def exchange(counts: list[list[int]]) -> tuple[bool, bool]:
    """Each rank has so many tokens for each expert. Whether its answers have the same bits as from whole experts, and
    whether its own experts have the mean of all ranks' gradients."""
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    dealt = seeded_experts()
    split_experts(dealt, init_device_mesh("cpu", (world_size,)))
    answers = dealt(tokens_of(rank, counts), torch.tensor(counts[rank : rank + 1]))
    answers.square().sum().backward()
    whole = seeded_experts()
    expected = [whole(tokens_of(one, counts), torch.tensor(counts[one : one + 1])) for one in range(world_size)]
    (torch.cat(expected).square().sum() / world_size).backward()
    same = [close(ours, theirs) for ours, theirs in zip(dealt.parameters(), whole.parameters(), strict=True)]
    return torch.equal(answers, expected[rank]), all(same)


def tokens_of(rank: int, counts: list[list[int]]) -> Tensor:
    generator = torch.Generator().manual_seed(rank + 1)
    return torch.randn(sum(counts[rank]), SIZES.width, generator=generator)


def close(dealt: Tensor, whole: Tensor) -> bool:
    assert isinstance(dealt.grad, DTensor) and whole.grad is not None
    assert len(dealt.grad.to_local()) < SIZES.experts
    return torch.allclose(dealt.grad.full_tensor(), whole.grad, rtol=1e-5, atol=1e-5)


def overflowing() -> tuple[float, bool]:
    """One step in fp16 whose scale is far too large: the scale after it, and whether an expert's weight moved."""
    config = tiny_config(Path("/run"), model="lm-moe", strategy="full_shard", ep=2, precision="fp16")
    engine: Any = create_engine(config, schedule_for(10, 0.1), torch.device("cpu"))
    engine.scaler.scale = 2.0**100
    weights = [each.to_local() for each in engine.model.parameters()]
    before = [each.clone() for each in weights]
    words = torch.zeros(1, CONTEXT, dtype=torch.int64)
    engine.step((words, words))
    engine.close()
    moved = any(not torch.equal(*pair) for pair in zip(weights, before, strict=True))
    return engine.scaler.scale, moved


class OnHost(Tensor):
    """A tensor that was copied to the host, and all that is computed from it: its values are read without waiting."""


def reads_of_the_device(counts: list[list[int]]) -> int:
    """How often a layer of experts copies from the device; each other read of values fails."""
    rank, copies = torch.distributed.get_rank(), []
    dealt, tokens = seeded_experts(), tokens_of(rank, counts)
    split_experts(dealt, init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
    to_host, to_list = Tensor.cpu, Tensor.tolist

    def copied(tensor: Tensor) -> Tensor:
        copies.append(tensor)
        return to_host(tensor).as_subclass(OnHost)

    def listed(tensor: Tensor) -> Any:
        assert isinstance(tensor, OnHost)
        return to_list(tensor)

    Tensor.cpu, Tensor.tolist = copied, listed  # type: ignore[method-assign, assignment]
    try:
        dealt(tokens, torch.tensor(counts[rank : rank + 1]))
    finally:
        Tensor.cpu, Tensor.tolist = to_host, to_list  # type: ignore[method-assign]
    return len(copies)

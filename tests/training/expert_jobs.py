"""Experts dealt out over the ranks of a pool, beside the same experts whole."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from training.engines.expert_parallel import deal_out_experts
from training.language_model import WIDTH
from training.mixture import EXPERTS, Experts


def seeded_experts() -> Experts:
    torch.manual_seed(0)
    return Experts()


def exchange(counts: list[list[int]]) -> tuple[bool, bool]:
    """Each rank has so many tokens for each expert. Whether its answers have the same bits as from whole experts, and
    whether its own experts have the mean of all ranks' gradients."""
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    dealt = seeded_experts()
    deal_out_experts(dealt, init_device_mesh("cpu", (world_size,)))
    answers = dealt(tokens_of(rank, counts), torch.tensor(counts[rank : rank + 1]))
    answers.square().sum().backward()
    whole = seeded_experts()
    expected = [whole(tokens_of(one, counts), torch.tensor(counts[one : one + 1])) for one in range(world_size)]
    (torch.cat(expected).square().sum() / world_size).backward()
    same = [close(ours, theirs) for ours, theirs in zip(dealt.parameters(), whole.parameters(), strict=True)]
    return torch.equal(answers, expected[rank]), all(same)


def tokens_of(rank: int, counts: list[list[int]]) -> Tensor:
    generator = torch.Generator().manual_seed(rank + 1)
    return torch.randn(sum(counts[rank]), WIDTH, generator=generator)


def close(dealt: Tensor, whole: Tensor) -> bool:
    assert isinstance(dealt.grad, DTensor) and whole.grad is not None
    assert len(dealt.grad.to_local()) < EXPERTS
    return torch.allclose(dealt.grad.full_tensor(), whole.grad, rtol=1e-5, atol=1e-5)

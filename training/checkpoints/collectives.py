"""Agreement of ranks on the CPU: any rank's reasons, values of all, and work that one rank of a machine does first."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
from torch.distributed import ProcessGroup

LONGEST = timedelta(days=1)
"""Limit of the wait. nccl's is 10 minutes and gloo's 30, less than a download or a conversion may take."""


def make_cpu_group(timeout: timedelta | None = None) -> ProcessGroup:
    """A group of all ranks on the CPU, separate from that of the training; collective."""
    group = torch.distributed.new_group(backend="gloo", timeout=timeout)
    assert isinstance(group, ProcessGroup)
    return group


@contextmanager
def leader_first() -> Iterator[bool]:
    """The first rank of each machine runs the block before all others, which wait on the CPU; whether this is such a
    rank. Collective."""
    leads = int(os.environ["LOCAL_RANK"]) == 0
    group = make_cpu_group(LONGEST)
    if not leads:
        torch.distributed.barrier(group)
    yield leads
    if leads:
        torch.distributed.barrier(group)
    torch.distributed.destroy_process_group(group)


def any_rank_has(*reasons: bool) -> tuple[bool, ...]:
    """For each of at most eight reasons, whether any rank has it; collective, on the CPU. They are bits of one element:
    for a tensor of several elements Gloo sends twice as many messages."""
    known = torch.tensor(sum(reason << at for at, reason in enumerate(reasons)), dtype=torch.uint8)
    torch.distributed.all_reduce(known, torch.distributed.ReduceOp.BOR)
    return tuple(bool(int(known) >> at & 1) for at in range(len(reasons)))


def gather_values(*values: float) -> list[list[float]]:
    """Each value, of all ranks; collective, on the CPU."""
    mine = torch.tensor(values, dtype=torch.float64)
    of_ranks = [torch.empty_like(mine) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(of_ranks, mine)
    return torch.stack(of_ranks, 1).tolist()

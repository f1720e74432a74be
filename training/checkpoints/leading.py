"""Long work of one rank per machine, for which the others wait."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
from torch.distributed import ProcessGroup

LONGEST = timedelta(days=1)
"""Limit of the wait. nccl's is 10 minutes and gloo's 30, less than a download or a conversion may take."""


def cpu_group(timeout: timedelta | None = None) -> ProcessGroup:
    """A group of all ranks on the CPU, separate from that of the training; collective."""
    group = torch.distributed.new_group(backend="gloo", timeout=timeout)
    assert isinstance(group, ProcessGroup)
    return group


@contextmanager
def leader_first() -> Iterator[bool]:
    """The first rank of each machine runs the block before all others, which wait on the CPU; whether this is such a
    rank. Collective."""
    leads = int(os.environ["LOCAL_RANK"]) == 0
    group = cpu_group(LONGEST)
    if not leads:
        torch.distributed.barrier(group)
    yield leads
    if leads:
        torch.distributed.barrier(group)
    torch.distributed.destroy_process_group(group)

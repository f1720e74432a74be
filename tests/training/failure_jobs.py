"""Runs on the rank of a pool whose disk is full, or as good as: no file may grow beyond a limit."""

from __future__ import annotations

import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from ckpt_tools.errors import StoreError
from tests.training.jobs import small_config
from training.launchers.torchrun import run_rank

LIMIT_BYTES = 100_000  # metrics.jsonl is smaller, a shard larger
CUT_OFF = r"cannot be written: torch could not write a whole file; its disk has [\d,]+ bytes left$"


@contextmanager
def no_larger_files() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT_BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def say_what_could_not_be_saved(out: Path) -> None:
    for name, values in {"fsdp2": {}, "async": {"async_save": True}, "zero2": {"engine": "zero2"}}.items():
        config = small_config(out / name, **({"engine": "fsdp2", "num_workers": 1, "epochs": 1} | values))
        config.out.mkdir()
        begin = "epoch_0001 could not be saved: rank 0: " if name == "async" else ""
        folder = re.escape(str(config.out / "checkpoints/.epoch_0001.partial"))
        with no_larger_files(), pytest.raises(StoreError, match=f"^{begin}{folder} {CUT_OFF}"):
            run_rank(config, torch.device("cpu"))

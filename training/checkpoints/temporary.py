"""Temporary copies of checkpoints for the ranks of a machine."""

from __future__ import annotations

import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import ckpt_tools


@contextmanager
def converted(checkpoint: Path | str, **options: Any) -> Iterator[Path]:
    """A copy of ``checkpoint`` for the block, converted by the first rank of each machine; collective.

    The folder has the same name on every rank. ``options`` are those of :func:`ckpt_tools.convert`. Raises CkptError.
    """
    name = [f"training-{uuid.uuid4().hex}"]
    torch.distributed.broadcast_object_list(name)
    folder, leads = Path(tempfile.gettempdir(), name[0]), int(os.environ["LOCAL_RANK"]) == 0
    try:
        if leads:
            ckpt_tools.convert(checkpoint, folder, **options)
        torch.distributed.barrier()
        yield folder
        torch.distributed.barrier()
    finally:
        if leads:
            shutil.rmtree(folder, ignore_errors=True)

"""A temporary folder that the ranks of one machine share."""

from __future__ import annotations

import tempfile
import uuid
from pathlib import Path

import torch


def shared_temporary_folder() -> Path:
    """A new name, the same on every rank; collective."""
    name = [f"training-{uuid.uuid4().hex}"]
    torch.distributed.broadcast_object_list(name)
    return Path(tempfile.gettempdir(), name[0])

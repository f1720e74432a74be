"""Errors of ``ckpt_tools`` about a checkpoint, without advice to use options that the trainer does not have."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ckpt_tools.errors import CkptError

REWORDED = (
    (r", or write \S+@latest or \S+", ""),
    (r"choose one with (?:--tag\b|tag=)", "resume the folder of one of them"),
    (r"[;,]? ?(?:if it is in one of them, )?name it with (?:--from\b|from_=)", ""),
    (r",? or (?:--storage-option key=\S+ secret=\S+|storage_options=\S*)", ""),
)
"""Advice that a trainer's user cannot follow, and its replacement."""

OPTION = re.compile(r"(?<![\w-])(?:--[a-z][a-z-]*|(?:from_|model_key|optim_key|param_order|storage_options|tag)=)")
"""An option of the command line or of Python."""


@contextmanager
def reading(checkpoint: Path | str) -> Iterator[None]:
    """Rewords errors about ``checkpoint`` within the block; see :func:`reworded`."""
    try:
        yield
    except CkptError as error:
        message = reworded(error.message, checkpoint)
        if message == error.message:
            raise
        raise type(error)(message, path=error.path, key=error.key) from error


def reworded(message: str, checkpoint: Path | str) -> str:
    """``message`` without advice that only ckpt-tools can follow, or with its command for the named options."""
    for pattern, words in REWORDED:
        message = re.sub(pattern, words, message)
    options = [_as_typed(found) for found in OPTION.findall(message)]
    if not options:
        return message
    return f"{message} ({', '.join(options)}: of `ckpt-tools convert {checkpoint}`; then resume the copy)"


def _as_typed(option: str) -> str:
    """``--optim-key`` for ``optim_key=``."""
    return option if option.startswith("--") else f"--{option.rstrip('_=').replace('_', '-')}"

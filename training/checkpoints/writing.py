"""Failed writes of a run, as one StoreError that names the path and the reason."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ckpt_tools.errors import StoreError

_CUT_OFF = re.compile(r"PytorchStreamWriter|inline_container\.cc|iostream error")
"""torch's zip writer, which drops the reason of the operating system."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Within the block, a write that fails raises StoreError; other errors are passed on."""
    try:
        yield
    except BaseException as error:  # CheckpointException is none of Exception's
        reason = _reason(root_of(error), path)
        if reason is None:
            raise
        raise StoreError(f"{path} cannot be written: {reason}") from error


def root_of(error: BaseException) -> BaseException:
    """The error of the first rank that failed, if torch has wrapped the errors of a collective save or load."""
    from torch.distributed.checkpoint.api import CheckpointException  # it takes seconds

    while isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    return error


def sentence_of(error: OSError) -> str:
    return (f"{error.filename}: " if error.filename else "") + (error.strerror or str(error))


def _reason(error: BaseException, path: Path) -> str | None:
    if isinstance(error, OSError):
        return sentence_of(error)
    if isinstance(error, RuntimeError) and _CUT_OFF.search(str(error)):
        return f"torch could not write a whole file; its disk has {shutil.disk_usage(path.parent).free:,} bytes left"
    return None

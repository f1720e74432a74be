"""Locks of a run on its folder and its storage.

``OUT/.lock`` is locked with flock and names the process. The file stays; the lock ends with the last process that holds
it. ``STORAGE`` is claimed by :func:`ckpt_tools.claim`, with an object that is rewritten every few seconds.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

import ckpt_tools
from ckpt_tools.errors import DestinationExistsError, StoreError

from ..config.train_config import TrainConfig
from .run_folder import CHECKPOINTS, empty_partial, is_checkpoint_name, make_out, resumes_own, set_aside_incomplete
from .storage import report_failed_writes

LOCK_NAME = ".lock"
PATIENCE_SECONDS = 3.0  # time to wait for the lock: the processes of a killed run take a moment to end


class LostStorageError(StoreError):
    """Another run has taken over the storage, or ``out`` cannot be written to; this one must end at once."""


@dataclass(frozen=True, slots=True)
class RunLock:
    """Locks that a run holds: on its folder, which cannot be taken over, and on its storage."""

    descriptor: int
    claim: ckpt_tools.UrlClaim | None


@contextmanager
def lock_run(config: TrainConfig) -> Iterator[RunLock]:
    """Lock the run's ``out``, which is made, and its ``storage``; unfinished checkpoints of a killed run are removed.
    Raises DestinationExistsError if another run holds a lock, or they hold files of others; StoreError."""
    claiming = nullcontext() if config.storage is None else ckpt_tools.claim(config.storage)
    with lock_folder(config.out) as descriptor, claiming as claim:
        _remove_unfinished(config.out / CHECKPOINTS)
        if resumes_own(config) and config.storage is None:
            set_aside_incomplete(config)
        yield RunLock(descriptor, claim)


def check_no_other_run(out: Path) -> None:
    """Raises DestinationExistsError if a run has locked ``out``, StoreError if it cannot be used. Makes nothing."""
    with report_failed_writes(out):
        is_there = (out / LOCK_NAME).exists()
    if is_there:
        with lock_folder(out):
            pass


@contextmanager
def lock_folder(out: Path) -> Iterator[int]:
    """Lock ``out``, which is made; the descriptor of the lock. Raises as :func:`lock_run`."""
    path = out / LOCK_NAME
    make_out(out)
    with report_failed_writes(path):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        with report_failed_writes(path):
            _wait_for_lock(descriptor, path)
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode(), 0)
        yield descriptor
    finally:
        os.close(descriptor)


def _wait_for_lock(descriptor: int, path: Path) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        with suppress(BlockingIOError):
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if time.monotonic() > deadline:
            raise DestinationExistsError(
                f"another run is writing to {path.parent} ({_describe_holder(path)}); wait for it to end, stop it, or "
                "choose another --out"
            )
        time.sleep(0.1)


def _describe_holder(path: Path) -> str:
    with suppress(OSError, ValueError, TypeError, KeyError):
        holder = json.loads(path.read_text())
        return f"process {holder['pid']} on {holder['host']}"
    return "its process is not known"


def _remove_unfinished(checkpoints: Path) -> None:
    """Remove folders with the names of unfinished checkpoints; the run that wrote them has ended."""
    for path in checkpoints.glob(".epoch_*.partial"):
        if is_checkpoint_name(path.stem[1:]) and path.is_dir() and not path.is_symlink():
            empty_partial(path)
            path.rmdir()

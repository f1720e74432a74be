"""The lock of a staging folder, which ends with the process that holds it."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path

from ckpt_tools.errors import DestinationExistsError
from ckpt_tools.stores.local.present import open_folder


def claim_folder(folder: Path) -> int:
    """Make ``folder`` and lock it; the descriptor that holds the lock, which ends with the process."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    while True:
        # Until the lock is taken, its holder may publish or remove the folder at any time; then this starts again.
        with suppress(FileExistsError):
            folder.mkdir()
        with suppress(FileNotFoundError), open_folder(folder, os.O_NOFOLLOW) as number:
            lock_folder(number, folder)
            if os.path.samestat(os.fstat(number), folder.stat()):
                return os.dup(number)


def lock_folder(number: int, folder: Path) -> None:
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise DestinationExistsError(f"another process is writing into {folder}; wait for it to end") from error

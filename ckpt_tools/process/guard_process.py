"""The process that ends what a run started, however the run ends: ``python -I -S guard_process.py MARK``.

Its standard input is a pipe that only the run holds open, so the pipe closes when the run ends, even by SIGKILL. Then
it kills every process whose environment holds ``MARK`` (``NAME=VALUE``). All that the run started inherited the mark,
whatever its session and its parent: ranks, Ray's processes, compilers. Linux only, because it reads ``/proc``.

This file imports only the standard library, so that the process costs 8 MiB and 20 ms.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

KILL_TIMEOUT_SECONDS = 30.0
"""A process that waits in the kernel for a device or a file server cannot be killed. The guard gives up on it then."""


def main(mark: bytes) -> None:
    """Wait until the run has ended, then end what is left of it."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while os.read(0, 4096):
        pass
    kill_marked_processes(mark)


def kill_marked_processes(mark: bytes) -> None:
    """Kill all that carry ``mark`` and wait until they are gone. A process may start another meanwhile: look again."""
    deadline = time.monotonic() + KILL_TIMEOUT_SECONDS
    while (process_fds := list(find_marked_processes(mark))) and time.monotonic() < deadline:
        for process_fd in process_fds:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(process_fd, signal.SIGKILL)
        for process_fd in process_fds:
            poller = select.poll()  # the descriptor can be read from when the process has ended
            poller.register(process_fd, select.POLLIN)
            poller.poll(max(0.0, deadline - time.monotonic()) * 1000)
            os.close(process_fd)


def find_marked_processes(mark: bytes) -> Iterator[int]:
    """A descriptor of each living process that carries ``mark``. It names this process even if its number is reused."""
    for proc_folder in Path("/proc").iterdir():
        if not proc_folder.name.isdecimal() or int(proc_folder.name) == os.getpid():
            continue
        try:
            process_fd = os.pidfd_open(int(proc_folder.name))
        except OSError:
            continue
        environment = b""
        with suppress(OSError):  # of another user, or ended and waiting for its parent to notice
            environment = (proc_folder / "environ").read_bytes()
        if mark in environment.split(b"\0"):
            yield process_fd
        else:
            os.close(process_fd)


if __name__ == "__main__":
    main(os.fsencode(sys.argv[1]))

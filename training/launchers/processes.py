"""How a launcher ends a process that it started, and how a rank ends with its agent."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys

POLITE_SECONDS = 5.0
_PR_SET_PDEATHSIG = 1


def wait_for(process: subprocess.Popen[bytes]) -> int:
    """Its exit code. If this process is told to stop meanwhile, it is told too, and has a few seconds to obey."""
    try:
        return process.wait()
    finally:
        if process.poll() is None:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """By SIGINT, because torchrun's agent is made to ignore SIGTERM."""
    process.send_signal(signal.SIGINT)
    try:
        process.wait(POLITE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def die_with_parent() -> None:
    """The kernel kills this process when the thread that started it ends; on Linux."""
    if not sys.platform.startswith("linux"):
        return
    parent = os.getppid()
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        # It ended before the kernel was asked.
        os.kill(os.getpid(), signal.SIGKILL)

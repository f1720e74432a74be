"""Ending the process of torchrun's agent, and ending a rank with its agent."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys

POLITE_SECONDS = 5.0
_PR_SET_PDEATHSIG = 1


def wait_for(process: subprocess.Popen[bytes]) -> int:
    """Exit code of the process. If this process is interrupted, the other is too, and killed after a few seconds."""
    try:
        return process.wait()
    finally:
        if process.poll() is None:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Send SIGINT, because torchrun's agent ignores SIGTERM."""
    process.send_signal(signal.SIGINT)
    try:
        process.wait(POLITE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def die_with_parent() -> None:
    """Have Linux kill this process when the thread that started it ends."""
    if not sys.platform.startswith("linux"):
        return
    parent = os.getppid()
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        # The parent ended before the call.
        os.kill(os.getpid(), signal.SIGKILL)

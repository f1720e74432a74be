"""The command line as a terminal shows it."""

import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

LIMIT_SECONDS = 60


def shown(*words: str | Path, columns: int) -> tuple[int, str]:
    """The exit code of the command on a terminal of so many columns, and all that it wrote there."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    kept = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    process = subprocess.Popen(
        [sys.executable, "-m", "ckpt_tools", *map(str, words)],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**kept, "TERM": "xterm"},
        start_new_session=True,
    )
    os.close(theirs)
    try:
        text = _read(ours)
        return process.wait(LIMIT_SECONDS), text
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def _read(descriptor: int) -> str:
    found, end = b"", time.monotonic() + LIMIT_SECONDS
    while time.monotonic() < end:
        ready, _, _ = select.select([descriptor], [], [], 1)
        try:
            data = os.read(descriptor, 1 << 16) if ready else None
        except OSError:
            break
        if data == b"":
            break
        found += data or b""
    return found.decode().replace("\r\n", "\n")

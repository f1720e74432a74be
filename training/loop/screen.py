"""Progress display: a status that is redrawn in place on a terminal, and a line every few seconds elsewhere.

Under torchrun the first rank has the terminal of the command; under Ray workers send their lines to the command.
"""

from __future__ import annotations

import os
import shutil
import sys
import time

PLAIN_SECONDS = 5.0  # time between two status lines in a log
CLEAR_LINE = "\r\x1b[2K"


def line_start() -> str:
    """Characters that remove a status from the line of the cursor, if standard output is a terminal."""
    is_terminal = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    return CLEAR_LINE if is_terminal else ""


class ProgressDisplay:
    """Prints lines and a status."""

    def __init__(self) -> None:
        self._start, self._last = line_start(), time.monotonic()

    def print_line(self, line: str) -> None:
        print(self._start + line, flush=True)

    def show_status(self, status: str) -> None:
        """Replace the status; on a terminal, the part that fits into its width."""
        if self._start:
            print(self._start + status[: shutil.get_terminal_size().columns - 1], end="", flush=True)
        elif time.monotonic() - self._last >= PLAIN_SECONDS:
            self._last = time.monotonic()
            self.print_line(status)

    def close(self) -> None:
        """Remove the last status, also that of a killed rank."""
        print(self._start, end="", flush=True)

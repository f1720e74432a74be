"""Runs of ``python -m training`` that are watched from outside: what they started is found however it hides."""

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.support.running import MARK, SECONDS, Running, users_of

START_SECONDS = 600.0
"""For a run to begin, on a machine that others use too."""


@dataclass(frozen=True, slots=True)
class Watched(Running):
    out: Path
    printed: int
    """A file that no other process can find open in ``out``."""

    def wait_until(self, happened: Callable[[], bool]) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not happened():
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline, "it does not begin"
            time.sleep(0.02)

    def holds_the_lock(self) -> bool:
        with suppress(OSError, ValueError):
            return bool(json.loads((self.out / ".lock").read_text())["pid"] == self.process.pid)
        return False

    @property
    def said(self) -> str:
        """What it has printed so far."""
        return os.pread(self.printed, os.fstat(self.printed).st_size, 0).decode()

    def left(self) -> set[int]:
        """What is still there of it: by session, by environment, or with a file of ``out`` open."""
        return {*self.processes(), *users_of(self.out)} - {os.getpid()}

    def left_in_time(self) -> set[int]:
        """What a killed command leaves after the seconds that it has to vanish."""
        deadline = time.monotonic() + SECONDS
        while (left := self.left()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return left


@contextmanager
def watched(out: Path, *args: str) -> Iterator[Watched]:
    """Python with these arguments. Whatever the test found, nothing is left of it afterwards."""
    mark, printed = secrets.token_hex(8), os.memfd_create("printed")
    streams = {"stdout": printed, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    process = subprocess.Popen([sys.executable, *args], env=os.environ | {MARK: mark}, **streams)  # type: ignore[call-overload]
    run = Watched(process, mark, out, printed)
    try:
        yield run
    finally:
        for pid in run.left():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        run.end()
        os.close(printed)

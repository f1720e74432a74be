"""Runs of ``python -m training`` that are watched from outside: what they started is found however it hides."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

TRACE = "WATCHED_RUN"
START_SECONDS = 600.0
"""For a run to begin, on a machine that others use too."""

OVERDUE_SECONDS = 60.0
"""For a whole command to end, on a busy machine; on an idle one it takes 1 to 2 seconds."""


@dataclass(frozen=True, slots=True)
class Watched:
    """A command in a session of its own, whose processes carry ``trace`` in their environment."""

    process: subprocess.Popen[str]
    out: Path
    trace: bytes
    printed: int
    """A file that no other process can find open in ``out``."""

    @classmethod
    def start(cls, out: Path, *args: str) -> Watched:
        name = f"{TRACE}={os.getpid()}-{time.monotonic_ns()}"
        environment = os.environ | dict([name.split("=")])
        printed = os.memfd_create("printed")
        process = subprocess.Popen(
            [sys.executable, *args],
            env=environment,
            stdout=printed,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        return cls(process, out, name.encode(), printed)

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

    def stop(self, number: signal.Signals) -> tuple[int, str]:
        """The exit code and what the command said on standard error."""
        self.process.send_signal(number)
        _, stderr = self.process.communicate(timeout=OVERDUE_SECONDS)
        return self.process.returncode, stderr

    @property
    def said(self) -> str:
        """What it has printed so far."""
        return os.pread(self.printed, os.fstat(self.printed).st_size, 0).decode()

    def left(self) -> list[str]:
        """What is still there of it: by session, by process group, by environment, or with a file of ``out`` open."""
        return [
            f"{folder.name} {(folder / 'cmdline').read_bytes()!r}"
            for folder in Path("/proc").iterdir()
            if folder.name.isdecimal() and int(folder.name) != os.getpid() and self._owns(folder)
        ]

    def left_in_time(self) -> list[str]:
        """What a killed command leaves after the seconds that it has to vanish."""
        deadline = time.monotonic() + OVERDUE_SECONDS
        while (left := self.left()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return left

    def _owns(self, folder: Path) -> bool:
        with suppress(OSError, ValueError):
            state, _, group, session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
            if state in "ZX":
                return False
            if self.process.pid in (int(group), int(session)):
                return True
            if self.trace in (folder / "environ").read_bytes().split(b"\0"):
                return True
            return any(Path(place).is_relative_to(self.out) for place in _places(folder))
        return False

    def destroy(self) -> None:
        """Whatever the test found."""
        for text in self.left():
            with suppress(ProcessLookupError):
                os.kill(int(text.split()[0]), signal.SIGKILL)
        self.process.communicate()
        os.close(self.printed)


def _places(folder: Path) -> Iterator[str]:
    for link in (folder / "cwd", *(folder / "fd").iterdir()):
        with suppress(OSError):
            yield os.readlink(link)  # noqa: PTH115 - a pipe is no path

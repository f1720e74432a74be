"""A command in a session of its own, and everything that it started, however that is found."""

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

Value = TypeVar("Value")

MARK = "CKPT_TOOLS_TEST_MARK"
"""A variable of the environment, which whatever the command starts inherits."""

SECONDS = 60.0
"""How long a test waits for what has to happen."""


@dataclass(frozen=True, slots=True)
class Running:
    """A command that was started, and the mark that its processes carry."""

    process: subprocess.Popen[str]
    mark: str

    def processes(self) -> list[int]:
        """Those that run, by the session or by the mark; a process that ended and was not waited for is none."""
        return [pid for pid in _pids() if self._is_ours(pid) and not is_dead(pid)]

    def _is_ours(self, pid: int) -> bool:
        with suppress(OSError):
            if os.getsid(pid) == self.process.pid:
                return True
            return self.mark.encode() in Path(f"/proc/{pid}/environ").read_bytes()
        return False

    def stop(self, number: int) -> tuple[int, str, float]:
        """Send the signal: the exit code, what was said on stderr, and how long that took."""
        started = time.monotonic()
        self.process.send_signal(number)
        said = self.process.communicate(timeout=SECONDS)[1]
        return self.process.returncode, said, time.monotonic() - started

    def end(self) -> None:
        """What a test that failed left."""
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()


def start(*words: str | Path, module: str = "ckpt_tools", **options: Any) -> Running:
    """``python -m`` the module, with these words."""
    mark = secrets.token_hex(8)
    environment = {**os.environ, **options.pop("env", {}), MARK: mark}
    command = [sys.executable, "-m", module, *map(str, words)]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL, **options}
    return Running(subprocess.Popen(command, text=True, start_new_session=True, env=environment, **streams), mark)


def wait_until(condition: Callable[[], Value], seconds: float = SECONDS) -> Value:
    """What the condition returns as soon as that is true. Raises AssertionError where that takes too long."""
    until = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < until, f"it did not happen within {seconds} seconds"
        time.sleep(0.01)
    return value


def users_of(folder: Path) -> list[int]:
    """Processes that have a file open below the folder."""
    return [pid for pid in _pids() if any(path.startswith(f"{folder}/") for path in _open_files(pid))]


def _pids() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def is_dead(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def _open_files(pid: int) -> Iterator[str]:
    with suppress(OSError):
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                yield str(path.readlink())

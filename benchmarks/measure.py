"""Usage of a command and all processes it starts.

This file is itself the program that starts the command (`python -S measure.py LIMIT LOG COMMAND...`) and imports the
standard library alone: Linux counts a parent's memory as its child's until the child is another program, so a parent
with torch in it would hide what a command of 40 MB takes.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MAX_FAILURE_CHARS = 200

TICK_SECONDS = 0.05
"""Interval of the memory samples of a tree of processes. The kernel keeps the peak of a lone process."""

PR_SET_PDEATHSIG = 1
"""linux/prctl.h."""

SAMPLING_SHARE = 10
"""A sample of a tree of several GB takes milliseconds of page table walks: at most a tenth of the time."""


class MeasureError(Exception):
    """Something could not be made or measured; the message says why."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Usage of a command until it ended or ran out of time, and why it failed, if it did.

    `peak_bytes` is resident memory: the kernel's figure for one process, the highest sampled sum of proportional shares
    for several. `called_*_bytes` passed through read and write calls, without mapped files; `disk_*_bytes` were read
    from or written to the disk.
    """

    failure: str
    seconds: float
    cpu_seconds: float
    peak_bytes: int
    called_read_bytes: int
    called_write_bytes: int
    disk_read_bytes: int
    disk_write_bytes: int


def measure_command(
    command: Sequence[str], log: Path, *, time_limit: float, env: Mapping[str, str] | None = None
) -> Usage:
    """Run the command at the root of the checkout; its output goes to `log`. It and what it started are killed after
    `time_limit` seconds, and when this process is ended or killed."""
    log.parent.mkdir(parents=True, exist_ok=True)
    # Without accelerator and network, and with Python's compiled modules kept, as where programs are installed.
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    env = {**kept, "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1", **(env or {})}
    program = [sys.executable, "-S", __file__, str(time_limit), str(log), *command]
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=env) as run:
        try:
            output, errors = run.communicate()
        except BaseException:
            run.terminate()
            raise
    if run.returncode:
        raise MeasureError(f"{' '.join(command)[:200]} could not be measured: {errors[-200:]}")
    return Usage(**json.loads(output))


def measure_success(
    command: Sequence[str], log: Path, *, time_limit: float, env: Mapping[str, str] | None = None
) -> Usage:
    """Run a command as `measure_command` does. Raises MeasureError if the command fails."""
    usage = measure_command(command, log, time_limit=time_limit, env=env)
    if usage.failure:
        raise MeasureError(f"{' '.join(command)[:200]} failed: {usage.failure}")
    return usage


def _run_and_measure(command: Sequence[str], log: Path, time_limit: float) -> Usage:
    before = _read_own_io()
    started = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        peak, timed_out = _wait_for_end(process.pid, started + time_limit)
    except KeyboardInterrupt:
        _kill_tree(process.pid)
        _kill_group(process.pid)
        raise
    seconds = time.monotonic() - started
    _, status, usage = os.wait4(process.pid, 0)
    _kill_group(process.pid)
    after = _read_own_io()
    return Usage(
        failure=f"not done in {time_limit:g} s" if timed_out else _get_failure(os.waitstatus_to_exitcode(status), log),
        seconds=seconds,
        cpu_seconds=usage.ru_utime + usage.ru_stime,
        peak_bytes=max(peak, usage.ru_maxrss * 1024),
        called_read_bytes=after["rchar"] - before["rchar"],
        called_write_bytes=after["wchar"] - before["wchar"],
        disk_read_bytes=after["read_bytes"] - before["read_bytes"],
        disk_write_bytes=after["write_bytes"] - before["write_bytes"],
    )


def _get_failure(exit_code: int, log: Path) -> str:
    """Why the command failed, as the last line of its output says; empty if it succeeded."""
    if exit_code < 0:
        return f"killed by signal {-exit_code}"
    *_, last = log.read_text(errors="replace").strip().splitlines() or [""]
    return last.replace(f"{ROOT}/", "")[:MAX_FAILURE_CHARS] or f"exit code {exit_code}" if exit_code else ""


def _read_own_io() -> dict[str, int]:
    """Bytes of this process and of every child it has waited for."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return {name: int(value) for name, value in (line.split(": ") for line in lines)}


def _wait_for_end(pid: int, deadline: float) -> tuple[int, bool]:
    """Wait until the process ends: the peak memory of it with its children, and whether it was killed."""
    ended = os.pidfd_open(pid)
    peak, pause = 0, TICK_SECONDS
    try:
        while not select.select([ended], [], [], min(pause, max(0, deadline - time.monotonic())))[0]:
            if time.monotonic() >= deadline:
                _kill_tree(pid)
                select.select([ended], [], [])
                return peak, True
            started = time.monotonic()
            if len(tree := list(process_tree(pid))) > 1:  # of a lone process the kernel knows the peak
                peak = max(peak, sum(map(proportional_bytes, tree)))
            pause = max(TICK_SECONDS, SAMPLING_SHARE * (time.monotonic() - started))
    finally:
        os.close(ended)
    return peak, False


def process_tree(pid: int) -> Iterator[int]:
    """A process and its descendants."""
    yield pid
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            for child in (thread / "children").read_text().split():
                yield from process_tree(int(child))


def proportional_bytes(pid: int) -> int:
    """Resident memory of a process, with its share of what several have."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


def _kill_tree(pid: int) -> None:
    for member in list(process_tree(pid)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(member, signal.SIGKILL)


def _kill_group(pid: int) -> None:
    """Kill the processes that the command left in its session."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _end_with_parent() -> None:
    """Have the kernel send SIGTERM when the parent is gone, and end the tree then."""
    parent = os.getppid()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        raise KeyboardInterrupt


def main(words: Sequence[str]) -> None:
    _end_with_parent()
    limit, log, *command = words
    print(json.dumps(asdict(_run_and_measure(command, Path(log), float(limit)))))


if __name__ == "__main__":
    main(sys.argv[1:])

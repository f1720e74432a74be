"""Runs the command line again and again, each time in a fork of this process that strace watches.

``python -m tests.end_to_end.crashes.server`` takes a request a line and answers each
with a line. A fork has everything imported,
so that a run costs 30 ms and makes no system calls but those of its work.
"""

import io
import json
import math
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

LIMIT_SECONDS = 60
"""A run that takes longer hangs; it is ended by SIGALRM."""


def main() -> None:
    for line in sys.stdin:
        request = json.loads(line)
        answer = _warm(request) if request.get("warm") else _run(request)
        print(json.dumps(answer), flush=True)


def _warm(request: dict[str, Any]) -> dict[str, Any]:
    """A run in this very process, which imports all it needs."""
    with redirect_stdout(io.StringIO()):
        return {"code": _command(request["words"])}


def _command(words: list[str]) -> int:
    from ckpt_tools.cli import main as command

    try:
        command(words)
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def _run(request: dict[str, Any]) -> dict[str, Any]:
    """How the command ended, negative for a signal, what it said, and how often it made each call that may be short."""
    folder = Path(request["folder"])
    pipes = (begun, begin), (go, start) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        _be_the_command(request, folder, begin, go)
    os.read(begun, 1)
    tracer = _strace(child, folder, request["strace"]) if request["strace"] else None
    folder.joinpath("pid").write_text(str(child))
    os.write(start, b"!")
    for number in (*pipes[0], *pipes[1]):
        os.close(number)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if tracer is not None:
        tracer.wait()
    return {"code": code, **{name: (folder / name).read_text() for name in ("stdout", "stderr")}}


def _be_the_command(request: dict[str, Any], folder: Path, begin: int, go: int) -> None:
    """Nothing of the preparation is seen by strace, which is started when ``begin`` was written to."""
    signal.alarm(LIMIT_SECONDS)
    # A shell that starts the tests in the background has everything below ignore it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for name, number in (("stdout", 1), ("stderr", 2)):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.write(begin, b"!")
    while not select.select([go], [], [], 0.0005)[0]:
        os.kill(os.getpid(), 0)  # what strace shows first
    if request["prompt"]:
        _tell_the_journal_at_once()
    if request["short"]:
        _cut_short(*request["short"])
    code = _command(request["words"])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _tell_the_journal_at_once() -> None:
    """So that each task is noted where it is done, however slow strace makes a call."""
    from ckpt_tools.transfer import journal

    journal.MAX_SHARE = math.inf


def _strace(child: int, folder: Path, options: list[str]) -> subprocess.Popen[bytes]:
    """A tracer that sees all that the child does from now on."""
    trace = folder / "trace"
    trace.unlink(missing_ok=True)
    tracer = subprocess.Popen(
        ["strace", "-f", "-y", "-s", "0", "-o", str(trace), *options, "-p", str(child)], stderr=subprocess.DEVNULL
    )
    while not (trace.exists() and trace.stat().st_size):
        time.sleep(0.0005)
        assert tracer.poll() is None, "strace is allowed to trace"
    return tracer


def _cut_short(name: str, which: int) -> None:
    """Have the call number ``which`` of that name, counted from 1, move half of what it could."""
    call: Callable[..., Any] = getattr(os, name)
    number = 0

    def cut(descriptor: int, what: Any, *where: int) -> Any:
        nonlocal number
        number += 1
        return call(descriptor, _half(what) if number == which else what, *where)

    setattr(os, name, cut)


def _half(what: Any) -> Any:
    match what:
        case int():
            return max(1, what // 2)
        case [buffer]:
            return [_half(buffer)]
        case _:
            return memoryview(what)[: max(1, len(what) // 2)]


if __name__ == "__main__":
    main()

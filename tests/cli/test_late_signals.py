"""A signal at the end of a conversion: what is published and said is done, whatever arrives while Python ends.

The process sends each itself, at a point that another could hardly hit.
"""

import signal
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

import ckpt_tools
from tests.support.sparse import make_sparse
from tests.support.sweep import tiered

pytestmark = pytest.mark.extended

CODES = {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGHUP: 129}

BEGIN = """
import atexit, os, sys, threading, time, weakref
number, point = int(sys.argv.pop(1)), sys.argv.pop(1)

def send(*_):
    print("sent", file=sys.__stderr__, flush=True)
    os.kill(os.getpid(), number)

def send_soon(seconds):
    time.sleep(seconds)
    send()

def send_late(seconds):
    threading.main_thread().join()
    send_soon(seconds)

class Last:
    def __init__(self, kill=os.kill, getpid=os.getpid, write=os.write, number=number):
        self.sent = lambda: (write(2, b"sent\\n"), kill(getpid(), number))

    def __del__(self):
        self.sent()

if point == "the first function at exit":
    atexit.register(send)
import ckpt_tools.cli
module = sys.modules["ckpt_tools.cli.main"]

def before(owner, name, *, after=False):
    real = getattr(owner, name)

    def changed(*given, **named):
        if not after:
            send()
        try:
            return real(*given, **named)
        finally:
            if after:
                send()

    setattr(owner, name, changed)
"""

POINTS = {
    "the first function at exit": "",
    "the last function at exit": "atexit.register(send)",
    "the end of sys": "sys.last = Last()",
    "the end of another module": "module.last = Last()",
    "the end of the built-in names": "import builtins; builtins.last = Last()",
    "a finalizer": "weakref.finalize(send, send); atexit.register(lambda: None)",
    "a thread that is waited for": "threading.Thread(target=send_late, args=(0,)).start()",
    "a thread that takes longer": "threading.Thread(target=send_late, args=(0.2,)).start()",
    "before the end is said": "before(module.process, 'end')",
    "after the end is said": "before(module.process, 'end', after=True)",
    "before the code is said": "real = sys.exit; sys.exit = lambda code: (send(), real(code))",
    "twice": "before(module.process, 'end'); atexit.register(send)",
}
"""Points after the command, which has published the output and said so."""


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return make_sparse(tmp_path_factory.mktemp("late") / "model.safetensors", num_tensors=2, num_rows=100)


def run(code: str, number: int, point: str, *words: object) -> subprocess.CompletedProcess[str]:
    program = f"{BEGIN}\n{code}\nmodule.main()"
    command = [sys.executable, "-c", program, str(int(number)), point, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, start_new_session=True)


def is_whole(out: Path, source: Path) -> bool:
    """Raises AssertionError for half an output, or leftovers."""
    others = [path.name for path in out.parent.iterdir() if path != out]
    assert not others, others
    if out.exists():
        ckpt_tools.verify(source, out)
    return out.exists()


def each_signal(points: Iterable[str], extended: Sequence[str]) -> pytest.MarkDecorator:
    """A test of every signal at every point; those in ``extended`` are in ``make test-all``."""
    every = [f"{point}: {number.name}" for point in points for number in CODES]
    return pytest.mark.parametrize("case", tiered(every, test=(), extended=extended))


def parts(case: str) -> tuple[str, signal.Signals]:
    point, _, name = case.partition(": ")
    return point, signal.Signals[name]


@each_signal(POINTS, [f"{point}: {('SIGTERM', 'SIGINT', 'SIGHUP')[n % 3]}" for n, point in enumerate(POINTS)])
def test_a_conversion_that_is_done_ends_with_0(case, source, tmp_path):
    (point, number), out = parts(case), tmp_path / "out"
    done = run(POINTS[point], number, point, "convert", source, out, "--to", "dcp")
    assert "sent" in done.stderr
    assert (done.returncode, is_whole(out, source)) == (0, True), done.stderr
    assert (out.name in done.stdout, "Traceback" in done.stderr, "Exception" in done.stderr) == (True, False, False)


@each_signal(["the last function at exit", "before the code is said"], ["before the code is said: SIGTERM"])
def test_a_command_that_failed_keeps_its_code(case, source, tmp_path):
    point, number = parts(case)
    done = run(POINTS[point], number, point, "convert", tmp_path / "none", tmp_path / "out", "--to", "dcp")
    assert (done.returncode, "there is nothing at" in done.stderr or "Error: " in done.stderr) == (3, True), done.stderr

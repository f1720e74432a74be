"""A signal at the end of a conversion: what is published and said is done, whatever arrives while Python ends.

The process sends each itself, at a point that another could hardly hit.
"""

import signal
import subprocess
import sys

import pytest

import ckpt_tools
from tests.support.sparse import make_sparse
from tests.support.sweep import tiered

pytestmark = pytest.mark.extended

BEGIN = """
import atexit, os, sys, threading, time
number = int(sys.argv.pop(1))

def send(*_):
    print("sent", file=sys.__stderr__, flush=True)
    os.kill(os.getpid(), number)

def send_late():
    threading.main_thread().join()
    time.sleep(0.2)
    send()

class Last:
    def __init__(self, kill=os.kill, getpid=os.getpid, write=os.write, number=number):
        self.sent = lambda: (write(2, b"sent\\n"), kill(getpid(), number))

    def __del__(self):
        self.sent()

import ckpt_tools.cli
module = sys.modules["ckpt_tools.cli.main"]
end, exit = module.process.prepare_exit, sys.exit
"""

POINTS = {
    "the last function at exit": "atexit.register(send)",
    "the end of a module": "module.last = Last()",
    "a thread that is waited for": "threading.Thread(target=send_late).start()",
    "before the end is said": "module.process.prepare_exit = lambda *given: (send(), end(*given))",
    "before the code is said": "sys.exit = lambda code: (send(), exit(code))",
    "twice": "module.process.prepare_exit = lambda *given: (send(), end(*given)); atexit.register(send)",
}
"""Points after the command, which has published the output and said so."""

CASES = [f"{point}: {name}" for point in POINTS for name in ("SIGTERM", "SIGINT", "SIGHUP")]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return make_sparse(tmp_path_factory.mktemp("late") / "model.safetensors", num_tensors=2, num_rows=100)


def run(case: str, *words: object) -> subprocess.CompletedProcess[str]:
    point, _, name = case.partition(": ")
    program = f"{BEGIN}\n{POINTS[point]}\nmodule.main()"
    command = [sys.executable, "-c", program, str(int(signal.Signals[name])), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, start_new_session=True)


@pytest.mark.parametrize("case", tiered(CASES, test=(), extended=CASES[::4]))
def test_a_conversion_that_is_done_ends_with_0(case, source, tmp_path):
    out = tmp_path / "out"
    done = run(case, "convert", source, out, "--to", "dcp")
    assert "sent" in done.stderr
    assert (done.returncode, [*tmp_path.iterdir()]) == (0, [out]), done.stderr
    ckpt_tools.verify(source, out)
    assert (out.name in done.stdout, "Traceback" in done.stderr, "Exception" in done.stderr) == (True, False, False)


def test_a_command_that_failed_keeps_its_code(tmp_path):
    done = run("before the code is said: SIGTERM", "convert", tmp_path / "none", tmp_path / "out", "--to", "dcp")
    assert (done.returncode, "there is nothing at" in done.stderr or "Error: " in done.stderr) == (3, True), done.stderr

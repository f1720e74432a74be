"""A conversion on Ray that is ended, or killed, at random moments: no process stays, and it can be run again."""

import re
import signal
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest

import ckpt_tools
from tests.support.running import Running, start, users_of, wait_until
from tests.support.sparse import make_sparse

pytestmark = pytest.mark.extended

ENDINGS = {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGHUP: 129, signal.SIGKILL: -9}

LATEST_SECONDS = 7.0
"""Moments are drawn from so many seconds: Ray takes two to four to start, the work some more."""

GONE_SECONDS = 30.0
"""When all that a killed command started has ended, on a busy machine; on an idle one it is two seconds."""


OPEN = {"RAY_AUTH_MODE": "disabled"}
"""The cluster of these tests asks for no token."""


@dataclass(frozen=True, slots=True)
class Kill:
    """A signal, so many seconds after the command was started; -1 for as soon as it writes."""

    number: signal.Signals
    seconds: float
    resume: bool

    def __str__(self) -> str:
        return f"{self.number.name}-{self.seconds:.2f}{'-resume' if self.resume else ''}"


def kills(seed: int, number: int) -> list[Kill]:
    """By turns every signal; the moments are drawn."""
    random, numbers = Random(seed), list(ENDINGS)
    return [Kill(numbers[n % len(numbers)], random.uniform(0.3, LATEST_SECONDS), n % 3 == 0) for n in range(number)]


SIGTERM, SIGKILL = Kill(signal.SIGTERM, -1, resume=True), Kill(signal.SIGKILL, -1, resume=False)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "kill" in metafunc.fixturenames:
        more = kills(seed=1, number=20) if metafunc.config.getoption("--soak") else []
        metafunc.parametrize("kill", [SIGTERM, pytest.param(SIGKILL, marks=pytest.mark.soak), *more], ids=str)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """400 MB of holes: seconds of work in small tasks."""
    return make_sparse(tmp_path_factory.mktemp("sparse") / "model.safetensors", num_tensors=4, num_rows=25_000)


@pytest.fixture(scope="module")
def expected(source, tmp_path_factory):
    """What an undisturbed run writes."""
    folder = tmp_path_factory.mktemp("expected") / "out"
    ckpt_tools.convert(source, folder, to="dcp", memory="47MiB")
    return folder


def words_of(source: Path, out: Path, *more: str) -> list[str | Path]:
    return ["convert", source, out, "--to", "dcp", "--memory", "47MiB", "--quiet", "--runner", "ray", *more]


def is_writing(out: Path) -> bool:
    staged = out.with_name(f".{out.name}.ckpt-tools-partial") / "output"
    return any(path.suffix == ".distcp" for path in staged.glob("*"))


def killed(run: Running, kill: Kill, out: Path) -> str:
    """Kill it at its moment, and judge how it ended. What it said."""
    if kill.seconds < 0:
        wait_until(lambda: is_writing(out) or run.process.poll() is not None)
    else:
        time.sleep(kill.seconds)
    code, said, seconds = run.stop(kill.number)
    assert code in (0, ENDINGS[kill.number], -kill.number), said
    assert code == ENDINGS[kill.number] or kill.seconds >= 0
    assert "Traceback" not in said and "***" not in said
    assert said.count("\n") == (1 if code > 0 else 0), said
    assert seconds < GONE_SECONDS
    wait_until(lambda: not run.processes() and not users_of(out.parent), GONE_SECONDS)
    return said


def titles(run: Running) -> set[bytes]:
    """What its processes call themselves, up to the first dot or blank."""
    lines = []
    for pid in run.processes():
        with suppress(OSError):
            lines.append(Path(f"/proc/{pid}/cmdline").read_bytes())
    return {re.split(rb"[. \0]", line, maxsplit=1)[0] for line in lines}


def check_left(out: Path, expected: Path, kill: Kill, said: str) -> None:
    """The destination is absent or complete, and beside it is what a kill or ``--resume`` leaves; so does a machine on
    which Ray takes longer to start than the cleaning up may, as the command says then."""
    names = {path.name for path in out.parent.iterdir()}
    may_stay = kill.resume or kill.number == signal.SIGKILL or "before everything was cleaned up" in said
    assert names <= {out.name, *([f".{out.name}.ckpt-tools-partial"] if may_stay else [])}
    if out.exists():
        assert same(out, expected)


def same(a: Path, b: Path) -> bool:
    return subprocess.run(["diff", "-r", a, b], check=False).returncode == 0


def check_again(words: list[str | Path], out: Path, expected: Path) -> None:
    """The same command ends with the same bytes; 8 says that the destination was complete already."""
    again = start(*words, env=OPEN)
    try:
        said = again.process.communicate(timeout=120)[1]
        assert again.process.returncode in ((0, 8) if out.exists() else (0,)), said
        assert same(out, expected)
        wait_until(lambda: not again.processes(), GONE_SECONDS)
    finally:
        again.end()


def test_on_a_cluster_of_its_own(kill, source, expected, tmp_path):
    out = tmp_path / "out"
    words = words_of(source, out, "--workers", "2", *(["--resume"] if kill.resume else []))
    run = start(*words, env=OPEN)
    try:
        if kill.seconds < 0:
            # They have sessions and names of their own: if they were not seen here, none would be missed below.
            wait_until(lambda: titles(run) >= {b"ray::RayTaskProcess", b"ray::ChecksumActor"})
            wait_until(lambda: is_writing(out) or run.process.poll() is not None)
        said = killed(run, kill, out)
    finally:
        run.end()
    check_left(out, expected, kill, said)
    check_again(words, out, expected)

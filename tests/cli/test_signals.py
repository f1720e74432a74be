"""A command that a signal ends: within seconds, with one sentence and its exit code, and nothing of it stays."""

import fcntl
import os
import pty
import signal
import subprocess
import termios
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from ckpt_tools.cli.ending import CLEANUP_SECONDS
from tests.support.running import Running, start, users_of, wait_until
from tests.support.s3_server import BUCKET
from tests.support.sparse import make_sparse
from tests.support.stalling import stalling

pytestmark = pytest.mark.extended

SIGNALS = {
    signal.SIGTERM: (143, "Stopped by SIGTERM"),
    signal.SIGINT: (130, "Interrupted"),
    signal.SIGHUP: (129, "Stopped by SIGHUP"),
}
SLACK_SECONDS = 10.0
"""What a busy machine adds."""


@pytest.fixture
def started():
    """``started(*words)``: the command; what a failed test leaves is ended."""
    with ExitStack() as stack:

        def begin(*words: str | Path, **options: Any) -> Running:
            run = start(*words, **options)
            stack.callback(run.end)
            return run

        yield begin


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """1.6 GB of holes: a second of work in small tasks, and more on a busy machine."""
    return make_sparse(tmp_path_factory.mktemp("sparse") / "model.safetensors", num_tensors=4, num_rows=100_000)


@pytest.fixture
def out(tmp_path):
    """A destination in a folder where nothing else is."""
    (tmp_path / "in").mkdir()
    return tmp_path / "in" / "out"


def words_of(source: Path, out: Path) -> list[str | Path]:
    return ["convert", source, out, "--to", "dcp", "--memory", "47MiB", "--workers", "1", "--quiet"]


def is_writing(out: Path) -> bool:
    """Whether there is a file in the staging folder, with bytes of a task in it."""
    staged = out.with_name(f".{out.name}.ckpt-tools-partial") / "output"
    return any(path.suffix == ".distcp" for path in staged.glob("*"))


def check_nothing_stays(run: Running, out: Path, left: list[str] | None = None) -> None:
    assert [path.name for path in out.parent.iterdir()] == (left or [])
    assert run.processes() == [] and users_of(out.parent) == []


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_a_conversion_leaves_nothing(number, source, out, started):
    run = started(*words_of(source, out))
    wait_until(lambda: is_writing(out))
    code, said, seconds = run.stop(number)
    assert (code, said) == (
        SIGNALS[number][0],
        f"{SIGNALS[number][1]}; the destination is either unchanged or complete.\n",
    )
    assert seconds < 2 + SLACK_SECONDS
    check_nothing_stays(run, out)


def test_what_only_reads_says_nothing_of_a_destination(source, s3_server, started):
    """It waits for a service that never answers."""
    with stalling(s3_server.port) as road:
        road.stall()
        run = started(
            "inspect", f"s3://{BUCKET}/none", env={**s3_server.environment, "AWS_ENDPOINT_URL": road.endpoint}
        )
        assert road.is_stalled.wait(60)
        code, said, seconds = run.stop(signal.SIGTERM)
    assert (code, said) == (143, "Stopped by SIGTERM.\n")
    assert seconds < 1 + SLACK_SECONDS


def test_a_thread_that_hangs_is_not_waited_for(s3_server, out, started):
    """The service stops answering in the middle of a body. Further signals do not disturb the cleaning up."""
    prefix = s3_server.new_prefix()
    made = make_sparse(out.parent.parent / "model.safetensors", num_tensors=2, num_rows=5_000)
    s3_server.put(prefix, {"model.safetensors": made.read_bytes()})
    with stalling(s3_server.port) as road:
        road.limit = 10_000_000
        environment = {**s3_server.environment, "AWS_ENDPOINT_URL": road.endpoint}
        run = started("convert", f"s3://{BUCKET}/{prefix}", out, "--to", "dcp", "--quiet", env=environment)
        assert road.is_stalled.wait(60)
        run.process.send_signal(signal.SIGTERM)
        run.process.send_signal(signal.SIGHUP)
        code, said, seconds = run.stop(signal.SIGINT)
    # Of signals that arrive together the system delivers the one with the lowest number first.
    assert code in (129, 130, 143) and said.endswith("; the destination is either unchanged or complete.\n")
    assert said.count("\n") == 1
    assert seconds < 3 + SLACK_SECONDS
    check_nothing_stays(run, out)


def test_cleaning_up_that_hangs_is_given_up(s3_server, source, started):
    """The uploads that were begun are at a service that no longer answers."""
    prefix = s3_server.new_prefix()
    with stalling(s3_server.port) as road:
        environment = {**s3_server.environment, "AWS_ENDPOINT_URL": road.endpoint}
        words = ["convert", source, f"s3://{BUCKET}/{prefix}out", "--to", "dcp", "--workers", "1", "--quiet"]
        run = started(*words, env=environment)
        wait_until(lambda: s3_server.open_uploads(prefix))
        road.stall()
        code, said, seconds = run.stop(signal.SIGTERM)
    rest = "before everything was cleaned up; the next run or ckpt-tools clean DST removes the leftovers."
    assert (code, said) == (143, f"Stopped by SIGTERM {rest}\n")
    assert CLEANUP_SECONDS - 1 < seconds < CLEANUP_SECONDS + SLACK_SECONDS
    assert run.processes() == []


def test_nohup_is_obeyed(source, out, started):
    """What is ignored as the command begins stays so; the others still end it."""
    run = started(*words_of(source, out), preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    wait_until(lambda: is_writing(out))
    run.process.send_signal(signal.SIGHUP)
    with pytest.raises(subprocess.TimeoutExpired):
        run.process.wait(0.3)
    assert run.stop(signal.SIGTERM)[0] == 143
    check_nothing_stays(run, out)


def test_a_terminal_that_is_closed(source, out, started):
    """The kernel sends SIGHUP, and no word can be said any more."""
    ours, theirs = pty.openpty()

    def take_it() -> None:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    words = words_of(source, out)[:-1]
    run = started(*words, stdin=theirs, stdout=theirs, stderr=theirs, preexec_fn=take_it)
    os.close(theirs)
    wait_until(lambda: is_writing(out))
    os.close(ours)
    assert run.process.wait(60) == 129
    check_nothing_stays(run, out)

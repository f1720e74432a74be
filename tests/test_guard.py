"""What is started under a guard ends with the command, whichever way that ends; nothing else does."""

import os
import signal
import subprocess
import sys
from contextlib import suppress

import pytest

from ckpt_tools.process.guard import KEEP_ENVIRONMENT, MARK_VARIABLE, guard_processes
from tests.support.running import is_dead, users_of, wait_until

PROGRAM = """
import signal, subprocess, sys
from ckpt_tools.process.guard import guard_processes

def start():
    return subprocess.Popen(["sleep", "300"], start_new_session=True, stdout=subprocess.DEVNULL).pid

with guard_processes() as marking:
    with marking():
        marked = start()
    print(marked, start(), flush=True)
    if sys.argv[1] == "wait":
        signal.pause()
"""


@pytest.mark.parametrize("ending", ["end", "wait"])
def test_what_was_started_with_the_mark_ends_alone(ending):
    with subprocess.Popen([sys.executable, "-c", PROGRAM, ending], stdout=subprocess.PIPE, text=True) as command:
        assert command.stdout is not None
        marked, other = map(int, command.stdout.readline().split())
        try:
            if ending == "wait":
                assert not is_dead(marked)
                command.kill()
            assert command.wait() == (0 if ending == "end" else -signal.SIGKILL)
            wait_until(lambda: is_dead(marked))
            assert not is_dead(other)
        finally:
            for pid in (marked, other):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def test_an_open_file_is_held_until_nothing_is_left(tmp_path):
    """So that a lock on it does not become free before."""
    with (tmp_path / "lock").open("w") as held, guard_processes([held.fileno()]):
        assert len(users_of(tmp_path)) == 2
    assert users_of(tmp_path) == []


def test_the_environment_is_as_it_was_afterwards(monkeypatch):
    monkeypatch.setenv(MARK_VARIABLE, "of an outer command")
    monkeypatch.delenv(KEEP_ENVIRONMENT, raising=False)
    with guard_processes() as marking:
        with marking():
            assert os.environ[MARK_VARIABLE] != "of an outer command"
            assert os.environ[KEEP_ENVIRONMENT] == "1"
        assert os.environ[MARK_VARIABLE] == "of an outer command"
        assert KEEP_ENVIRONMENT not in os.environ

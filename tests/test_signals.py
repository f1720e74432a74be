"""A signal becomes one exception, whatever a library does to the handlers meanwhile."""

import signal
import sys
import threading
import time
from importlib import import_module
from pathlib import Path
from types import FrameType

import pytest

from ckpt_tools.process import signals
from ckpt_tools.process.signals import Stopped, block_signals_while_starting, get_first_signal, raise_on_signals


@pytest.fixture(autouse=True)
def usual_handler():
    """Ray, once used in this process, leaves its own handler."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


def _exit(number: int, _frame: FrameType | None) -> None:
    """As the handler that Ray installs while it starts."""
    sys.exit(number)


def test_an_exit_of_a_librarys_own_handler_is_the_signal_that_it_was():
    """The signal meets a thread that does not block it, so the handler of the moment runs in the main thread."""
    is_done = threading.Event()
    other = threading.Thread(target=is_done.wait, args=(20,))
    other.start()
    assert other.ident is not None
    try:
        with pytest.raises(Stopped) as stopped, raise_on_signals():  # noqa: PT012
            with block_signals_while_starting():
                signal.signal(signal.SIGTERM, _exit)
                signal.pthread_kill(other.ident, signal.SIGTERM)
                for _ in range(1000):
                    time.sleep(0.01)
            pytest.fail("the block went on")
        assert stopped.value.number == signal.SIGTERM
    finally:
        is_done.set()
        other.join()
    assert get_first_signal() is None
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_signal_to_the_thread_itself_waits_for_the_end_of_the_block():
    has_ended = False
    with pytest.raises(Stopped) as stopped, raise_on_signals():  # noqa: PT012
        with block_signals_while_starting():
            signal.signal(signal.SIGTERM, _exit)
            signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
            time.sleep(0.05)
            has_ended = True
        pytest.fail("the signal was lost")
    assert has_ended and stopped.value.number == signal.SIGTERM


SWALLOWING = """
import os, signal, time
try:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep({seconds})
except BaseException:
    pass
"""


def imported(folder: Path, seconds: float, monkeypatch: pytest.MonkeyPatch) -> float:
    """Seconds until the signal, which a module raises while it is imported, ends a block that it takes 5 s to pass."""
    name = f"swallowing_{folder.name}"
    (folder / f"{name}.py").write_text(SWALLOWING.format(seconds=seconds))
    monkeypatch.syspath_prepend(str(folder))
    begun = time.monotonic()
    with pytest.raises(Stopped), raise_on_signals():  # noqa: PT012
        import_module(name)
        time.sleep(5)
        pytest.fail("the signal was lost")
    return time.monotonic() - begun


def test_a_signal_waits_for_the_end_of_an_import(tmp_path, monkeypatch):
    """torch imports numpy from C++, which clears an exception, as this module does."""
    assert 0.5 < imported(tmp_path, 0.5, monkeypatch) < 4


def test_a_signal_ends_an_import_without_an_end(tmp_path, monkeypatch):
    monkeypatch.setattr(signals, "IMPORT_SECONDS", 0.3)
    (tmp_path / "endless.py").write_text(
        "import os, signal, time\nos.kill(os.getpid(), signal.SIGTERM)\ntime.sleep(5)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    begun = time.monotonic()
    with pytest.raises(Stopped), raise_on_signals():
        import_module("endless")
    assert time.monotonic() - begun < 4

"""A file of any kind takes a scan at most two seconds of a processor for each megabyte."""

from __future__ import annotations

import signal
import time
from types import FrameType

import pytest

from tests.verification.scan.bombs import BOMBS, PICKLED
from tests.verification.scan.scanner import is_clean
from tests.verification.scan.test_budgets import slowness

pytestmark = pytest.mark.extended

NUM_BYTES, NUM_SOAKED = 200_000, 1_000_000
SECONDS_PER_BYTE = 2e-6


def _stop(signum: int, frame: FrameType | None) -> None:
    raise TimeoutError("the scan takes too long")


@pytest.fixture(scope="module")
def slower():
    return slowness()


@pytest.mark.parametrize("name", BOMBS)
def test_time_grows_with_the_size(name, slower, request):
    files = BOMBS[name](NUM_SOAKED if request.config.getoption("--soak") else NUM_BYTES)
    size = sum(map(len, files.values()))
    limit = SECONDS_PER_BYTE * size * slower + 0.1
    before = signal.signal(signal.SIGVTALRM, _stop)
    begun = time.process_time()
    signal.setitimer(signal.ITIMER_VIRTUAL, 2 * limit)
    try:
        is_clean(files)
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
    assert time.process_time() - begun < limit


def test_there_are_twenty_pickles_and_as_many_others():
    assert len(PICKLED) >= 20
    assert len(BOMBS) - len(PICKLED) >= 20

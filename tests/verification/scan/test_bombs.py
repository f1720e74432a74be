"""A file of any kind takes a scan little time and memory for each byte, whatever it unfolds to."""

import signal
import time
from types import FrameType

import pytest

from tests.support.cost import slowness
from tests.support.sweep import tiered
from tests.verification.scan.bombs import BOMBS
from tests.verification.scan.scanner import is_clean

NUM_BYTES, NUM_SOAKED = 200_000, 1_000_000
SECONDS_PER_BYTE = 2e-6
FEW = (
    "pickles with arguments of depth 90", "values that double", "keys that double", "lines of digits", "sets in sets",
    "a long tuple as arguments", "a large dict as a state", "spaces", "tags", "lists of JSON that end",
    "aliases of YAML", "records of a zip", "a text of safetensors",
)  # fmt: skip


def _stop(signum: int, frame: FrameType | None) -> None:
    raise TimeoutError("the scan takes too long")


@pytest.mark.parametrize("name", tiered(BOMBS, test=FEW, extended=BOMBS))
def test_time_grows_with_the_size(name, request):
    files = BOMBS[name](NUM_SOAKED if request.config.getoption("--soak") else NUM_BYTES)
    limit = SECONDS_PER_BYTE * sum(map(len, files.values())) + 0.1
    before = signal.signal(signal.SIGVTALRM, _stop)
    begun = time.process_time()
    signal.setitimer(signal.ITIMER_VIRTUAL, 20 * limit)
    try:
        is_clean(files)
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
    took = time.process_time() - begun
    assert took < limit or took < limit * slowness()

"""Real loaders run nothing of any mutated file that is clean, and every file is scanned in little time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.verification.scan.mutations import MAX_SEED_BYTES, mutated, seeds
from tests.verification.scan.test_generator import ROOT

pytestmark = pytest.mark.extended

NUM_FILES = 20_000
NUM_SOAKED = 1_000_000
BATCH = 50_000
SLOWEST_SECONDS = 0.5
"""Of a processor; 0.01 on a machine that does little else."""


def fuzzed(first: int, count: int) -> dict[str, Any]:
    """The answer of a process of ``fuzz``."""
    command = [sys.executable, "-m", "tests.verification.scan.fuzz"]
    plan = json.dumps({"first": first, "count": count})
    done = subprocess.run(command, input=plan, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.timeout(6000)
def test_no_loader_runs_a_mutated_file_that_is_clean(request):
    is_soak = request.config.getoption("--soak")
    count, size = (NUM_SOAKED, BATCH) if is_soak else (NUM_FILES, NUM_FILES)
    with ThreadPoolExecutor(os.cpu_count() if is_soak else 1) as pool:
        found = list(pool.map(lambda first: fuzzed(first, size), range(0, count, size)))
    assert [failure for each in found for failure in each["ran"]] == []
    assert [failure for each in found for failure in each["broken"]] == []
    assert max(each["slowest"] for each in found)[0] < SLOWEST_SECONDS
    assert sum(each["clean"] for each in found) > count // 20
    assert sum(each["controls"] for each in found) > count // 1000


def test_a_number_is_always_the_same_small_file():
    made = [mutated(number) for number in range(200)]
    assert made == [mutated(number) for number in range(200)]
    assert len({tuple(files.values()) for files in made}) > 150
    assert max(len(data) for files in seeds() for data in files.values()) < MAX_SEED_BYTES

"""Nothing that a real loader runs is clean, and nothing is run to say so."""

from __future__ import annotations

import json
import subprocess
import sys
from math import gcd
from pathlib import Path
from typing import Any

import pytest

from tests.verification.scan.generator import NUM_SAMPLES, sample

pytestmark = pytest.mark.extended

ROOT = Path(__file__).parents[3]
NUM_SAMPLED = 400
NUM_SOAKED = 20_000

CLEAN_CARRIERS = {
    "pickle", "pickle named pt", "pickle of another ending", "pickle without an ending", "torch",
    "DCP item", "joblib", "transformers", "transformers, a bare pickle",
}  # fmt: skip
"""Those that are clean with a value that runs nothing: without them the test would prove nothing."""


def told(module: str, samples: str, numbers: list[int]) -> Any:
    """The answer of a process of ``module`` about these samples."""
    plan = {"samples": samples, "numbers": numbers}
    command = [sys.executable, "-m", f"tests.verification.scan.{module}"]
    done = subprocess.run(command, input=json.dumps(plan), capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_nothing_that_runs_is_clean(request):
    wanted = NUM_SOAKED if request.config.getoption("--soak") else NUM_SAMPLED
    # A stride that shares no factor with any dimension of the samples.
    step = next(n for n in range(max(1, NUM_SAMPLES // wanted), NUM_SAMPLES) if gcd(n, NUM_SAMPLES) == 1)
    numbers = list(range(0, NUM_SAMPLES, step))[: max(wanted, 1)]
    ran = {int(number) for number, loaders in told("judge", "generator", numbers)["ran"].items() if loaders}
    found = told("scanner", "generator", numbers)
    assert len(ran) > len(numbers) // 4
    assert [sample(number).label for number in sorted(ran & set(found["clean"]))] == []
    assert found["events"] == []
    assert set(found["controls"]) >= CLEAN_CARRIERS

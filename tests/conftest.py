"""Fixtures for every room: checkpoints made by the real frameworks, and a way to resume them there."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))

import fixtures
from fixtures import jobs, launch
from fixtures.store import Fixture
from tests.support.truth import Truth

Resume = Callable[[str, str, Path, int], Truth]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak", action="store_true", help="run the full matrices instead of their core")


@pytest.fixture(scope="session")
def checkpoint() -> Callable[[str, str, int], Fixture]:
    """`checkpoint(kind, case, world_size)`: a checkpoint and its truth, built if it is not cached."""
    return fixtures.get


@pytest.fixture
def resume(tmp_path: Path) -> Resume:
    """`resume(kind, case, checkpoint, world_size)`: what the framework holds after loading, and its next losses."""

    def run(kind: str, case: str, checkpoint: Path, world_size: int) -> Truth:
        folder = tmp_path / f"resumed-{kind}-{case}-{world_size}"
        launch.pool(world_size).run(jobs.resume, kind, case, str(checkpoint), str(folder))
        return Truth.load(folder)

    return run

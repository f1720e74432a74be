"""`python -m benchmarks.training` at a tiny size: each work measures both contestants."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.training import PROMISED, Asked, Turn, measured, ratio, rows

TINY = Asked(ranks=2, rounds=1, steps=20, size_bytes=2_000_000, model="cnn")


@pytest.mark.soak
@pytest.mark.parametrize("work", PROMISED)
def test_both_are_measured(work: str, tmp_path: Path) -> None:
    [turn] = measured(work, TINY, tmp_path)
    assert turn.ours > 0 and turn.theirs > 0
    assert list(tmp_path.iterdir()) == []
    assert f"| {work} | " in rows({work: [turn]})[-1]


def test_a_ratio_is_the_median_of_the_rounds() -> None:
    assert ratio([Turn(1, 2), Turn(3, 2), Turn(2, 2)]) == 1

"""`python -m benchmarks.training` at a tiny size: each work measures both contestants."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.training import PROMISED, Asked, Spent, Turn, measured, processor_ratio, ratio, rows

TINY = Asked(ranks=2, rounds=1, steps=20, size_bytes=2_000_000, model="cnn")


@pytest.mark.soak
@pytest.mark.parametrize("work", PROMISED)
def test_both_are_measured(work: str, tmp_path: Path) -> None:
    [turn] = measured(work, TINY, tmp_path)
    assert turn.ours.seconds > 0 and turn.theirs.seconds > 0
    assert (turn.ours.processor is not None) == work.endswith("-step")
    assert list(tmp_path.iterdir()) == []
    assert f"| {work} | " in rows({work: [turn]})[-1]


def test_a_ratio_is_the_median_of_the_rounds() -> None:
    turns = [Turn(Spent(ours, 3 * ours), Spent(2, 2)) for ours in (1, 3, 2)]
    assert (ratio(turns), processor_ratio(turns)) == (1, 3)


def test_a_work_whose_processor_time_is_not_measured_has_no_such_ratio() -> None:
    turns = [Turn(Spent(1), Spent(2))]
    assert processor_ratio(turns) is None
    assert rows({"resume": turns})[-1] == "| resume | 1.0000 s | 2.0000 s | 0.50 | at most 1.2 |  |"

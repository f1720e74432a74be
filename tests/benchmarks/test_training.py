"""The works of training at a tiny size: each work measures both contestants."""

from __future__ import annotations

import pytest

from benchmarks.training import OURS, PROMISED, THEIRS, Asked, take_turns_in_ranks
from benchmarks.turns import Taken, compare, ratio

pytestmark = pytest.mark.extended

TINY = Asked(ranks=2, rounds=1, steps=20, size_bytes=2_000_000, model="cnn")


@pytest.mark.soak
@pytest.mark.parametrize("work", PROMISED)
def test_both_are_measured(work, tmp_path):
    turns = take_turns_in_ranks(work, TINY, tmp_path)
    [ours], [theirs] = turns[OURS], turns[THEIRS]
    assert ours.wall > 0 and theirs.wall > 0
    assert (ours.cpu > 0) == (theirs.cpu > 0) == work.endswith("-step")
    assert list(tmp_path.iterdir()) == []
    assert f"| {work} | " in compare({work: (turns[OURS], turns[THEIRS])}, PROMISED)[-1]


def test_a_ratio_is_the_median_of_the_rounds():
    ours, theirs = [Taken(wall, 3 * wall) for wall in (1, 3, 2)], [Taken(2, 2)] * 3
    assert (ratio("wall", ours, theirs), ratio("cpu", ours, theirs)) == (1, 3)


def test_a_work_whose_processor_time_is_not_measured_has_no_such_ratio():
    assert (
        compare({"resume": ([Taken(1)], [Taken(2)])}, PROMISED)[-1]
        == "| resume | 1.0000 s | 2.0000 s | 0.50 | at most 1.2 |  |  |"
    )

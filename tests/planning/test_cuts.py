"""Files are cut so that most of what one stored range holds lies in parts of its own, and every part is of a size."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_tools.core.part_rules import SPARE_BYTES, min_part_limit
from ckpt_tools.planning.cuts import StoredRun, cut_at_stored_ranges

pytestmark = pytest.mark.quick

LEAST = 500
MOST = min_part_limit(LEAST)
assert MOST == 1128

many = settings(max_examples=100, deadline=None)


def ends(size: int, *runs: StoredRun, least: int = LEAST, most: int = MOST) -> list[int]:
    return cut_at_stored_ranges(
        size, runs, min_bytes=least, max_bytes=most, floor_to_boundary=lambda position: position
    )


def copied(size: int, runs: list[StoredRun], found: list[int]) -> int:
    """Bytes in parts of ``LEAST`` and more that lie within one run."""
    parts = pairwise([0, *found])
    return sum(b - a for a, b in parts if b - a >= LEAST and any(start <= a and b <= stop for start, stop in runs))


@pytest.mark.parametrize(
    ("size", "runs", "expected"),
    [
        (0, [], [0]),
        (300, [], [300]),
        (2000, [], [1128, 2000]),
        (2000, [(0, 2000)], [1128, 2000]),
        (1700, [(0, 1000), (1000, 1700)], [1000, 1700]),
        # As large as can be, and halves where the last would be too small.
        (2500, [(0, 2500)], [1128, 1814, 2500]),
        # What is between two runs is large enough.
        (2500, [(0, 1000), (1600, 2500)], [1000, 1600, 2500]),
        # It is not: the run before it has 1000 - 500 - 64 to spare, and that is enough,
        (2000, [(0, 1000), (1100, 2000)], [600, 1100, 2000]),
        # or is not, and the run behind it gives the rest and what a cut may lose,
        (2000, [(0, 700), (900, 2000)], [564, 1128, 2000]),
        # or that cannot either: the longer of the two is left.
        (1300, [(0, 600), (601, 1300)], [601, 1300]),
        (1300, [(0, 700), (701, 1300)], [700, 1300]),
        # A head of a few bytes takes what it lacks of the first run.
        (1500, [(20, 1500)], [564, 1500]),
        (520, [(20, 520)], [520]),
        # What is behind the last run may be of any size.
        (1003, [(0, 1000)], [1000, 1003]),
        # Too small to be copied.
        (1500, [(0, 499), (499, 998)], [750, 1500]),
    ],
)
def test_where_parts_end(size, runs, expected):
    assert ends(size, *runs) == expected


def test_of_runs_with_a_little_between_them_every_other_is_given_up():
    """Of 5 runs that can spare too little for a gap on both sides, 3 are copied."""
    runs = [(700 * n + n, 700 * (n + 1) + n) for n in range(5)]
    assert copied(3504, runs, ends(3504, *runs)) == 3 * 700


@st.composite
def files(draw: st.DrawFn) -> tuple[int, list[StoredRun]]:
    """A size, and runs in it."""
    runs: list[StoredRun] = []
    at = 0
    lengths = st.one_of(st.integers(1, 3000), st.sampled_from([LEAST, LEAST + SPARE_BYTES, MOST, MOST + 1, 2 * LEAST]))
    gaps = st.one_of(st.just(0), st.integers(1, 20), st.integers(0, 2000), st.just(LEAST))
    for _ in range(draw(st.integers(0, 8))):
        start = at + draw(gaps)
        at = start + draw(lengths)
        runs.append((start, at))
    return at + draw(gaps), runs


@many
@given(files(), st.integers(MOST, 3 * MOST))
def test_parts_cover_the_file_and_are_neither_too_small_nor_too_large(file, most):
    size, runs = file
    found = ends(size, *runs, most=most)
    sizes = [b - a for a, b in pairwise([0, *found])]
    assert found[-1] == size and max(sizes) <= most
    assert all(each >= LEAST for each in sizes[:-1])


@many
@given(files(), st.sampled_from([1, 2, 3, 8, 16]))
def test_no_element_is_split(file, item):
    size, runs = file[0] * item, [(a * item, b * item) for a, b in file[1]]
    found = cut_at_stored_ranges(
        size, runs, min_bytes=LEAST, max_bytes=MOST, floor_to_boundary=lambda position: position - position % item
    )
    assert all(end % item == 0 for end in found)
    assert all(LEAST <= b - a <= MOST for a, b in pairwise([0, *found[:-1]]))


@many
@given(st.lists(st.integers(LEAST, 5 * LEAST), min_size=1, max_size=8))
def test_runs_without_anything_between_them_are_copied_whole(lengths):
    bounds = [sum(lengths[:n]) for n in range(len(lengths) + 1)]
    runs = list(pairwise(bounds))
    assert copied(bounds[-1], runs, ends(bounds[-1], *runs)) == bounds[-1]


@many
@given(files())
def test_little_is_lost(file):
    """At most what each gap takes of its neighbours, and of two short neighbours the shorter."""
    size, all_runs = file
    runs = [run for run in all_runs if run[1] - run[0] >= LEAST]
    lost = sum(b - a for a, b in runs) - copied(size, runs, ends(size, *runs))
    assert lost <= len(runs) * 2 * (LEAST + SPARE_BYTES)


def test_of_ten_thousand_runs_every_other_is_copied():
    found = ends(10**7, *[(1000 * n + 1, 1000 * (n + 1)) for n in range(10_000)])
    assert (found[:4], len(found)) == ([1001, 2000, 3001, 4000], 10_000)

"""Boxes against numpy: every operation marks the same elements as indexing an array of row-major positions."""

from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ckpt_tools.core.boxes import (
    Box,
    Shape,
    box_to_interval,
    contiguous_strides,
    interval_to_boxes,
    is_contiguous,
    iter_contiguous_runs,
    ravel_index,
)
from ckpt_tools.testing import strategies

pytestmark = pytest.mark.quick

many = settings(max_examples=60, deadline=None)


def positions(box: Box, shape: Shape) -> NDArray[Any]:
    """Row-major positions of the elements of ``box``, in the box's own row-major order."""
    index = tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))
    return np.arange(prod(shape)).reshape(shape)[index].reshape(-1)


@st.composite
def boxes_in(draw: st.DrawFn, count: int) -> tuple[Shape, list[Box]]:
    shape = draw(strategies.shapes())
    return shape, [draw(strategies.boxes(shape)) for _ in range(count)]


@pytest.mark.parametrize(
    ("start", "stop"),
    [((0,), (1, 2)), ((2,), (1,)), ((-1,), (1,)), ((0, 0), (1,)), ((0, 3), (5, 2))],
)
def test_what_is_no_box_cannot_be_built(start, stop):
    with pytest.raises(ValueError, match="a box cannot run from"):
        Box(start, stop)


def test_a_box_without_dims_is_one_element_and_one_of_a_shape_covers_it():
    scalar = Box((), ())
    assert (scalar.shape, scalar.numel, scalar.intersect(scalar)) == ((), 1, scalar)
    assert interval_to_boxes(0, 1, ()) == [scalar]
    assert list(iter_contiguous_runs(scalar, ())) == [(0, 1)]
    assert Box.whole((2, 3)) == Box((0, 0), (2, 3))
    assert Box.whole((0, 3)).numel == 0


@many
@given(boxes_in(2))
def test_intersect_holds_what_both_hold(case):
    shape, (a, b) = case
    common = a.intersect(b)
    expected = np.intersect1d(positions(a, shape), positions(b, shape))
    assert (common is None) == (expected.size == 0)
    if common is not None:
        assert np.array_equal(positions(common, shape), expected)
    assert common == b.intersect(a)


@many
@given(boxes_in(2))
def test_relative_to_undoes_shift(case):
    _, (box, other) = case
    assert box.shift(other.start).relative_to(other.start) == box
    with pytest.raises(ValueError, match="a box cannot run from"):
        Box((1,), (2,)).relative_to((2,))


@pytest.mark.parametrize(
    ("shape", "strides"), [((), ()), ((5,), (1,)), ((2, 3, 4), (12, 4, 1)), ((2, 0, 4), (0, 4, 1)), ((1, 1), (1, 1))]
)
def test_contiguous_strides(shape, strides):
    assert contiguous_strides(shape) == strides


@many
@given(strategies.shapes(min_extent=1), st.data())
def test_flat_index_is_ravel_multi_index(shape, data):
    index = tuple(data.draw(st.integers(0, extent - 1)) for extent in shape)
    assert ravel_index(index, shape) == (np.ravel_multi_index(index, shape) if shape else 0)


@many
@given(boxes_in(1))
def test_is_contiguous_and_flat_interval(case):
    shape, (box,) = case
    found = positions(box, shape)
    assert is_contiguous(box, shape) == bool((np.diff(found) == 1).all())
    if is_contiguous(box, shape):
        assert np.array_equal(np.arange(*box_to_interval(box, shape)), found)


@many
@given(strategies.shapes(), st.data())
def test_from_flat_covers_the_interval_in_order_in_few_boxes(shape, data):
    start, stop = data.draw(strategies.intervals(prod(shape)))
    found = interval_to_boxes(start, stop, shape)
    covered = [position for box in found for position in positions(box, shape).tolist()]
    assert covered == list(range(start, stop))
    assert len(found) <= max(1, 2 * len(shape) - 1)
    assert all(box.numel and box.is_within(shape) and is_contiguous(box, shape) for box in found)


def test_from_flat_of_an_interval_that_crosses_everything_and_of_trillions_of_elements():
    assert interval_to_boxes(5, 30, (3, 3, 4)) == [
        Box((0, 1, 1), (1, 2, 4)),
        Box((0, 2, 0), (1, 3, 4)),
        Box((1, 0, 0), (2, 3, 4)),
        Box((2, 0, 0), (3, 1, 4)),
        Box((2, 1, 0), (3, 2, 2)),
    ]
    (box,) = interval_to_boxes((1 << 49) + 7, (1 << 49) + 9, (1 << 20, 1 << 20, 1 << 10))
    assert box == Box((1 << 19, 0, 7), ((1 << 19) + 1, 1, 9))


@many
@given(boxes_in(1))
def test_runs_are_the_maximal_intervals(case):
    shape, (box,) = case
    found = positions(box, shape)
    edges = np.flatnonzero(np.diff(found) != 1) + 1
    expected = [(int(part[0]), int(part[-1]) + 1) for part in np.split(found, edges) if part.size]
    assert list(iter_contiguous_runs(box, shape)) == expected

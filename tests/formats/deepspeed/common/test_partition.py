"""The geometry of ZeRO partitions, against literal examples read off DeepSpeed's files and a plain reckoning."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tools.formats.deepspeed.common.partition import GroupCut, ParamCut, Vector, round_robin_order, sub_groups

NUMELS = st.lists(st.integers(1, 40), min_size=1, max_size=8)
WORLD_SIZES = st.integers(1, 9)


def rows(vector: Vector) -> list[tuple[int, int, int, int]]:
    """(parameter, start, stop, padding) of each row."""
    columns = (vector.params, vector.starts, vector.stops, vector.paddings)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def spelled(vector: Vector) -> list[tuple[int, int] | None]:
    """Every element of a vector: (parameter, element), or None for padding."""
    found: list[tuple[int, int] | None] = []
    for param, start, stop, padding in rows(vector):
        found += [(param, element) for element in range(start, stop)]
        found += [None] * padding
    return found


def all_elements(numels: list[int]) -> list[tuple[int, int]]:
    return [(param, element) for param, numel in enumerate(numels) for element in range(numel)]


def test_a_group_is_padded_at_its_end_to_twice_the_world_size_and_cut_evenly():
    cut = GroupCut.of([5, 4], world_size=2)
    assert cut.size == 6
    assert rows(cut.vector(0)) == [(0, 0, 5, 0), (1, 0, 1, 0)]
    assert rows(cut.vector(1)) == [(1, 1, 4, 3)]


def test_one_element_on_four_ranks_leaves_three_with_padding_alone():
    cut = GroupCut.of([1], world_size=4)
    assert [rows(cut.vector(rank)) for rank in range(4)] == [[(0, 0, 1, 1)], *([[(0, 0, 0, 2)]] * 3)]
    assert [cut.vector(rank).num_padding for rank in range(4)] == [1, 2, 2, 2]


def test_a_partition_may_begin_exactly_where_the_elements_end():
    cut = GroupCut.of([4, 4], world_size=3)
    assert cut.size == 4
    assert [rows(cut.vector(rank)) for rank in range(3)] == [[(0, 0, 4, 0)], [(1, 0, 4, 0)], [(0, 0, 0, 4)]]


def test_stage_3_pads_every_parameter():
    cut = ParamCut.of([5, 1, 4], world_size=2)
    assert rows(cut.vector(0)) == [(0, 0, 3, 0), (1, 0, 1, 0), (2, 0, 2, 0)]
    assert rows(cut.vector(1)) == [(0, 3, 5, 1), (1, 1, 1, 1), (2, 2, 4, 0)]


def test_offsets_are_where_rows_start():
    assert ParamCut.of([5, 1, 4], world_size=2).vector(1).offsets.tolist() == [0, 3, 4]


def test_trimming_takes_the_padding_and_nothing_else():
    vector = GroupCut.of([5, 4], world_size=2).vector(1)
    assert (vector.numel, vector.trimmed().numel, vector.trimmed().num_padding) == (6, 3, 0)


def test_a_sub_group_ends_with_the_parameter_that_reaches_its_size():
    assert sub_groups([60, 50, 100, 1], 100) == [range(2), range(2, 3), range(3, 4)]
    assert sub_groups([60, 40], 100) == [range(2)]
    assert sub_groups([1, 1], 10**9) == [range(2)]


def test_round_robin_deals_parameters_out_to_the_ranks():
    assert round_robin_order(5, 2) == [0, 2, 4, 1, 3]
    assert round_robin_order(2, 4) == [0, 1]


@given(NUMELS, WORLD_SIZES)
def test_the_ranks_of_a_group_hold_its_flattening_in_order(numels, world_size):
    cut = GroupCut.of(numels, world_size)
    flat = [element for rank in range(world_size) for element in spelled(cut.vector(rank))]
    padding = -sum(numels) % (2 * world_size)
    assert flat == [*all_elements(numels), *([None] * padding)]


@given(NUMELS, WORLD_SIZES)
def test_the_ranks_of_stage_3_hold_each_parameter_in_order(numels, world_size):
    cut = ParamCut.of(numels, world_size)
    vectors = [spelled(cut.vector(rank)) for rank in range(world_size)]
    assert len({len(vector) for vector in vectors}) == 1
    held = [element for vector in vectors for element in vector if element is not None]
    assert sorted(held) == all_elements(numels)
    assert len(vectors[0]) == sum(-(-numel // world_size) for numel in numels)


@given(NUMELS, WORLD_SIZES, st.integers(1, 60))
def test_sub_groups_are_all_parameters_in_order(numels, world_size, size):
    shares = ParamCut.of(numels, world_size).shares.tolist()
    found = sub_groups(shares, size)
    assert [position for part in found for position in part] == list(range(len(numels)))
    assert all(sum(shares[i] for i in part) >= size for part in found[:-1])
    assert all(sum(shares[i] for i in part[:-1]) < size for part in found)


@given(st.integers(1, 20), WORLD_SIZES)
def test_dealing_out_is_a_permutation(num_params, world_size):
    assert sorted(round_robin_order(num_params, world_size)) == list(range(num_params))


def test_both_cuts_are_cuts():
    cuts: list[GroupCut | ParamCut] = [GroupCut.of([3], 1), ParamCut.of([3], 1)]
    assert all(np.array_equal(cut.vector(0).starts, [0]) for cut in cuts)

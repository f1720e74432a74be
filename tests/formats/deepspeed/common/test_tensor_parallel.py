"""Tensor-parallel runs of DeepSpeed: the rules with literal expectations, and runs that go on without it."""

from typing import Any

import numpy as np
import pytest

import ckpt_tools
from ckpt_tools.core.boxes import Box
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.shards import ByteRange, Shard, ShardTable
from ckpt_tools.errors import DifferenceError, FormatError, IncompleteError, MalformedError, UnsupportedError
from ckpt_tools.formats.deepspeed.common.partition import (
    GroupPartition,
    ParamPartition,
    VectorLayout,
    round_robin_order,
    split_sub_groups,
)
from ckpt_tools.formats.deepspeed.common.tensor_parallel import MergeRules
from fixtures import launch
from fixtures.corpus import deepspeed
from tests.layouts.contents import contents
from tests.support.damage import TAG, changed, copied_run, damage_test, unlink, updated
from tests.support.refusals import refusal_test
from tests.support.resumed import assert_goes_on
from tests.support.saved_files import change_file

Shape = tuple[int, ...]


def whole(info: dict[str, Any], shapes: list[Shape], name: str = "w") -> list[Any]:
    """The whole of two parts whose elements count 0, 1, ... and 100, 101, ..., through a table of real shards."""
    join = MergeRules.of({"universal_checkpoint_version": 0.4, **info}, "file").plan_merge(name, shapes)
    tables, data = [], {}
    for rank, shape in enumerate(shapes):
        numel = int(np.prod(shape))
        data[f"{rank}"] = np.arange(numel, dtype=np.float32) + 100 * rank
        cut = numel // 3
        shards = [
            Shard(Box((a,), (b,)), ByteRange(f"{rank}", 4 * a, 4 * b)) for a, b in ((0, cut), (cut, numel)) if a < b
        ]
        tables.append(ShardTable.build((numel,), DType.FLOAT32, shards))
    table = join.build_shard_table(tables, shapes)
    out = np.full(join.shape, -1, np.float32)
    for row, shard in enumerate(table):
        extents, strides = shard.box.shape, table.get_strides(row)
        base = data[shard.at.file][shard.at.start // 4 :]
        view = np.lib.stride_tricks.as_strided(base, extents, [4 * s for s in strides])
        out[tuple(slice(a, b) for a, b in zip(shard.box.start, shard.box.stop, strict=True))] = view
    return out.tolist()  # type: ignore[no-any-return]


SUB_PARAMS = {"patterns": ["w"], "partition_dim": 0}
JOINED: dict[str, tuple[dict[str, Any], list[Shape], list[Any]]] = {
    "along dim 0 without a rule": ({"x": 1}, [(2, 2), (1, 2)], [[0, 1], [2, 3], [100, 101]]),
    "rows along dim 1": ({"parameter_with_row_parallelism_patterns": [r"^w$"]}, [(2, 2), (2, 1)],
        [[0, 1, 100], [2, 3, 101]]),
    "a replicated one from the first": ({"tp_replicated_parameter_patterns": ["w"]}, [(2, 1), (2, 1)], [[0], [1]]),
    "a vocabulary without its padding": ({"vocabulary_parameter_patterns": ["w"], "original_vocab_size": 3},
        [(2, 1), (2, 1)], [[0], [1], [100]]),
    "two halves, half by half": ({"parameter_with_2_sub_params_cat_dim_0": ["w"]}, [(4,), (4,)],
        [0, 1, 100, 101, 2, 3, 102, 103]),
    "widths of their own": ({"parameter_with_sub_params": [{**SUB_PARAMS, "shape": [(3, 2), -1]}],
        "sub_param_shard_widths": {"w": [[2, 1], [1, 1]]}}, [(3, 1), (2, 1)], [[0], [1], [100], [2], [101]]),
    "a number of parts, in older files": ({"parameter_with_sub_params": [{**SUB_PARAMS, "shape": (3, -1)}],
        "universal_checkpoint_version": 0.2}, [(3, 1), (3, 1)], [[0], [100], [1], [101], [2], [102]]),
}  # fmt: skip


@pytest.mark.parametrize(("info", "shapes", "expected"), JOINED.values(), ids=JOINED)
def test_parts_are_joined(info, shapes, expected):
    assert whole(info, shapes) == expected


def blocks(*ranks: tuple[list[int], list[dict[str, Any]]], shape: list[int]) -> dict[str, Any]:
    found = {str(number): {"shard_shape": part, "pieces": pieces} for number, (part, pieces) in enumerate(ranks)}
    return {"affine_map": {"version": 1, "params": {"^w$": {"logical_shape": shape, "ranks": found}}}}


def piece(shape: list[int], source: list[Any], dest: list[Any], *locations: int, **more: Any) -> dict[str, Any]:
    return {"shape": shape, "source": source, "dest": dest, "locations": list(locations), **more}


def test_blocks_go_before_categories():
    first = [piece([1, 2], [2, [2, 1]], [0, [2, 1]], 0)]
    second = [piece([1, 2], [0, [2, 1]], [0, [2, 1]], 1)]
    info = blocks(([1, 2], first), ([1, 2], second), shape=[2, 2]) | {"tp_replicated_parameter_patterns": ["w"]}
    assert whole(info, [(1, 2), (1, 2)]) == [[100, 101], [0, 1]]


SUB = {"parameter_with_sub_params": [{"patterns": ["w"], "shape": [(2, 2)], "partition_dim": 0}]}

REFUSED: dict[str, tuple[Any, list[Shape], type[FormatError], str]] = {
    "no rules": (None, [(1,), (1,)], UnsupportedError, "no universal_checkpoint_info"),
    "an average": ({"parameter_to_average_patterns": ["w"]}, [(1,), (1,)], UnsupportedError, "averaged"),
    "said to be impossible": ({"autotp_unsupported_parameter_patterns": {"w": "why"}}, [(1,), (1,)], UnsupportedError,
        "cannot be joined"),
    "replicas of two shapes": ({"tp_replicated_parameter_patterns": ["w"]}, [(1,), (2,)], MalformedError, "whole"),
    "other shapes": ({"x": 1}, [(1, 2), (1, 3)], MalformedError, "cannot be joined along dim 0"),
    "two patterns": ({"tp_replicated_parameter_patterns": ["w", "."]}, [(1,), (1,)], MalformedError, "several"),
    "a slow pattern": ({"tp_replicated_parameter_patterns": ["(w+)+$"]}, [(1,), (1,)], UnsupportedError, "very long"),
    "many repeats": ({"tp_replicated_parameter_patterns": [".*" * 9]}, [(1,), (1,)], UnsupportedError, "very long"),
    "no pattern": ({"tp_replicated_parameter_patterns": ["["]}, [(1,), (1,)], MalformedError, "regular expression"),
    "a number": ({"tp_replicated_parameter_patterns": [7]}, [(1,), (1,)], MalformedError, "malformed pattern"),
    "no widths": (SUB, [(2,), (2,)], MalformedError, "sub_param_shard_widths"),
    "wrong widths": (SUB | {"sub_param_shard_widths": {"w": [[2, 0]]}}, [(2,), (2,)], MalformedError, "widths"),
    "widths of another": (SUB | {"sub_param_shard_widths": {"w": [[2, 0], [1, 1]]}}, [(2,), (2,)], MalformedError,
        "do not fill"),
    "a vocabulary of no size": ({"vocabulary_parameter_patterns": ["w"]}, [(1,), (1,)], MalformedError, "vocab_size"),
    "a newer map": ({"affine_map": {"version": 2, "params": {}}}, [(1,), (1,)], UnsupportedError, "version 2"),
    "a scaled block": (blocks(([1], [piece([1], [0, [1]], [0, [1]], 0, scale=0.5)]), ([1], []), shape=[1]),
        [(1,), (1,)], UnsupportedError, "multiplied by 0.5"),
    "a block that is no box": (blocks(([2], [piece([2], [0, [2]], [0, [1]], 0)]), ([2], []), shape=[4]), [(2,), (2,)],
        UnsupportedError, "not a box"),
    "a block of another part": (blocks(([3], []), ([2], []), shape=[4]), [(2,), (2,)], MalformedError, "in affine_map"),
}  # fmt: skip


def join(info: Any, shapes: list[Shape]) -> object:
    return MergeRules.of(info and {"universal_checkpoint_version": 0.4, **info}, "file").plan_merge("w", shapes)


test_what_cannot_be_joined_is_refused = refusal_test(
    *((name, lambda _, row=row: join(*row), kind, words) for name, (*row, kind, words) in REFUSED.items())
)


# Files of real runs


NATIVE = "deepspeed-tp-zero2-fp32"
"""A run with ZeRO-2 of 2 x 2 ranks."""
MODEL, OPTIM = "mp_rank_0{}_model_states.pt", "zero_pp_rank_1_mp_rank_01_optim_states.pt"
LACKING, WRONG, OTHER = IncompleteError, MalformedError, UnsupportedError
no_rules = changed(MODEL.format(0), lambda content: content.pop("universal_checkpoint_info"))

test_files_that_do_not_fit_are_an_error = pytest.mark.extended(
    damage_test(
        NATIVE,
        ("a part is missing", unlink("*mp_rank_01*"), LACKING, "cut into 2 parts.*mp_rank_01 is missing"),
        ("a model file is missing", unlink(MODEL.format(1)), LACKING, r"mp_rank_01_model_states\.pt"),
        ("an optimizer file is missing", unlink(OPTIM), LACKING, "zero_pp_rank_1_mp_rank_01"),
        ("parts of two steps", updated(MODEL.format(1), global_steps=3), WRONG, "its global_steps is 3, but that of"),
        ("a run without rules", no_rules, OTHER, "no universal_checkpoint_info"),
    )
)


@pytest.fixture
def native(tmp_path):
    return copied_run(NATIVE, tmp_path)


@pytest.mark.extended
def test_what_the_ranks_have_for_themselves_is_noted(native):
    change_file(native / TAG / "mp_rank_01_model_states.pt", lambda content: content.update(epoch=9))
    notes = [f"{note.what}: {note.why}" for note in contents(native)[0].notes]
    assert any("client_state of the other ranks" in note for note in notes), notes


@pytest.mark.extended
def test_buffers_of_which_the_ranks_have_other_values_are_no_copies(native, tmp_path):
    change_file(native / TAG / "mp_rank_01_model_states.pt", lambda content: content["module"]["table"].add_(1))
    for verb in (ckpt_tools.verify, lambda run: ckpt_tools.convert(run, tmp_path / "out.pt")):
        with pytest.raises(DifferenceError, match="table of tensor-parallel ranks 0 and 1: their bits differ"):
            verb(native)
    assert not (tmp_path / "out.pt").exists()


@pytest.mark.extended
@pytest.mark.parametrize(("stage", "dtype", "to"), [(2, "fp32", 3), pytest.param(3, "bf16", 1, marks=pytest.mark.soak)])
def test_the_run_goes_on_without_tensor_parallelism(stage, dtype, to, tmp_path):
    state, losses = deepspeed.run_parallel(tmp_path / "run", stage, dtype)
    ckpt_tools.convert(tmp_path / "run", tmp_path / "out", to=f"zero{to}", world_size=3)
    resumed, next_losses = launch.pool(3).run(deepspeed.load_whole, str(tmp_path / "out"), to, dtype)[0]
    assert_goes_on(resumed, next_losses, state, losses, rtol=1e-5 if dtype == "fp32" else 1e-2)


# The geometry of ZeRO partitions, as literal examples read off DeepSpeed's files


def rows(vector: VectorLayout) -> list[tuple[int, int, int, int]]:
    """(parameter, start, stop, padding) of each row."""
    columns = (vector.params, vector.starts, vector.stops, vector.paddings)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def test_a_group_is_padded_at_its_end_to_twice_the_world_size_and_cut_evenly():
    halves, fourths = GroupPartition.of([5, 4], world_size=2), GroupPartition.of([1], world_size=4)
    assert [rows(halves.lay_out_rank(rank)) for rank in range(2)] == [[(0, 0, 5, 0), (1, 0, 1, 0)], [(1, 1, 4, 3)]]
    assert [rows(fourths.lay_out_rank(rank)) for rank in range(4)] == [[(0, 0, 1, 1)], *([[(0, 0, 0, 2)]] * 3)]


def test_stage_3_pads_every_parameter():
    cut = ParamPartition.of([5, 1, 4], world_size=2)
    assert rows(cut.lay_out_rank(0)) == [(0, 0, 3, 0), (1, 0, 1, 0), (2, 0, 2, 0)]
    assert rows(cut.lay_out_rank(1)) == [(0, 3, 5, 1), (1, 1, 1, 1), (2, 2, 4, 0)]


def test_sub_groups_end_with_the_parameter_that_reaches_their_size_and_round_robin_deals_out():
    assert split_sub_groups([60, 50, 100, 1], 100) == [range(2), range(2, 3), range(3, 4)]
    assert split_sub_groups([60, 40], 100) == [range(2)]
    assert round_robin_order(5, 2) == [0, 2, 4, 1, 3] and round_robin_order(2, 4) == [0, 1]

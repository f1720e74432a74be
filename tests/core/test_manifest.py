"""What a manifest refuses, and that what it accepts is an exact cover."""

import pickle
from collections.abc import Callable
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_tools.core.boxes import Box, Shape
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.literals import is_number, make_number_table, read_literal_number
from ckpt_tools.core.manifest import MASTER, Kind, Manifest, ParamGroup, StateKey, TensorEntry
from ckpt_tools.core.shards import ByteRange, Framing, RowTable, Shard, ShardTable
from ckpt_tools.errors import IncompleteError, MalformedError
from ckpt_tools.testing import strategies
from ckpt_tools.testing.stored import stored_tensors
from tests.support.refusals import refusal_test

pytestmark = pytest.mark.quick

Refused = Callable[[Path], object]

many = settings(max_examples=60, deadline=None)


def packed(shape: Shape, boxes: list[Box], dtype: DType = DType.UINT8) -> ShardTable:
    """A table whose pieces lie one after the other in one file."""
    shards, cursor = [], 0
    for box in boxes:
        size = box.numel * dtype.item_bytes
        shards.append(Shard(box, ByteRange("f", cursor, cursor + size)))
        cursor += size
    return ShardTable.build(shape, dtype, shards)


def entry(shape: Shape, boxes: list[Box]) -> TensorEntry:
    return TensorEntry(shape, DType.UINT8, Kind.PARAMETER, packed(shape, boxes))


def _index(box: Box) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))


def test_a_state_key_reads_as_its_name_and_a_byte_range_runs_forward():
    assert str(StateKey("a.b")) == "a.b"
    assert str(StateKey("a.b", MASTER)) == "a.b (master)"
    for start, stop in ((-1, 2), (3, 2)):
        with pytest.raises(ValueError, match="bytes cannot run"):
            ByteRange("f", start, stop)


class TestShardTable:
    @pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0, 2)])
    def test_a_whole_tensor_goes_to_another_process(self, shape):
        """Workers on Ray get the tables of their tasks pickled."""
        at = ByteRange("f", 8, 8 + 2 * prod(shape))
        table = pickle.loads(pickle.dumps(ShardTable.whole(shape, DType.INT16, at)))
        built = ShardTable.build(shape, DType.INT16, [Shard(Box.whole(shape), at)])
        assert list(table) == list(built)
        assert (table.shape, table.dtype, table.framing, table.num_bytes) == (
            shape,
            DType.INT16,
            built.framing,
            at.stop - 8,
        )

    def test_columns_hold_what_was_given(self):
        shards = [
            Shard(Box((0, 0), (1, 3)), ByteRange("b", 4, 10)),
            Shard(Box((1, 0), (2, 3)), ByteRange("a", 0, 6)),
        ]
        table = ShardTable.build((2, 3), DType.INT16, shards)
        assert list(table) == shards
        assert (len(table), table.num_bytes, table.numels.tolist()) == (2, 12, [3, 3])
        assert (table.files, table.file_ids.tolist()) == (("b", "a"), [0, 1])
        assert table.get_strides(1) == (3, 1)

    def test_strides_are_kept_for_every_shard_once_one_has_them(self):
        shards = [
            Shard(Box((0, 0), (2, 2)), ByteRange("a", 0, 4), (1, 2)),
            Shard(Box((2, 0), (3, 2)), ByteRange("a", 4, 6)),
        ]
        table = ShardTable.build((3, 2), DType.UINT8, shards)
        assert [shard.strides for shard in table] == [(1, 2), (2, 1)]
        assert table.flat_index is None

    def test_the_length_of_an_item_with_framing_is_its_own_business(self):
        shard = Shard(Box((0,), (4,)), ByteRange("f", 0, 700))
        assert len(ShardTable.build((4,), DType.UINT8, [shard], framing=Framing.TORCH_ITEM)) == 1

    @many
    @given(strategies.shapes(), st.data())
    def test_a_flattening_unfolds_into_the_same_bytes(self, shape, data):
        numel, item = prod(shape), 4
        table = packed((numel,), data.draw(strategies.flat_shardings(shape)), DType.FLOAT32)
        found = np.full(numel, -1)
        for shard in table.unflatten(shape):
            where = np.arange(numel).reshape(shape)[_index(shard.box)].reshape(-1)
            assert shard.at.stop - shard.at.start == len(where) * item
            found[where] = np.arange(shard.at.start // item, shard.at.stop // item)
        assert found.tolist() == list(range(numel))

    @many
    @given(stored_tensors())
    def test_flat_is_where_the_shards_are_in_row_major_order(self, stored):
        table = stored.entry.shards
        positions = np.arange(prod(table.shape)).reshape(table.shape)
        places = [positions[_index(shard.box)].reshape(-1) for shard in table]
        is_flat = table.strides is None and all((np.diff(place) == 1).all() for place in places)
        assert (table.flat_index is not None) == is_flat
        if table.flat_index is not None:
            intervals = sorted((int(p[0]), int(p[-1]) + 1, row) for row, p in enumerate(places) if p.size)
            assert list(zip(*(column.tolist() for column in table.flat_index), strict=True)) == [
                (row, start, stop) for start, stop, row in intervals
            ]


SCALAR = Box((), ())
PINWHEEL = [
    Box((0, 0), (1, 2)),
    Box((0, 2), (2, 3)),
    Box((2, 1), (3, 3)),
    Box((1, 0), (3, 1)),
    Box((1, 1), (2, 2)),
]


class TestCover:
    @many
    @given(strategies.shapes(min_extent=1), st.data())
    def test_a_missing_piece_is_incomplete(self, shape, data):
        boxes = data.draw(strategies.box_shardings(shape))
        left = boxes.pop(data.draw(st.integers(0, len(boxes) - 1)))
        if left.numel:
            with pytest.raises(IncompleteError, match=f"^{left.numel:,} of {prod(shape):,} elements are in no shard"):
                entry(shape, boxes)
        else:
            entry(shape, boxes)

    @many
    @given(strategies.shapes(min_ndim=1), st.data())
    def test_any_boxes_are_judged_as_counting_judges_them(self, shape, data):
        boxes = data.draw(st.lists(strategies.boxes(shape), max_size=7))
        count: Any = np.zeros(shape, int)
        for box in boxes:
            count[_index(box)] += 1
        expected = MalformedError if (count > 1).any() else IncompleteError if (count == 0).any() else None
        if expected is None:
            entry(shape, boxes)
        else:
            with pytest.raises(expected):
                entry(shape, boxes)

    def test_covers_of_a_kind(self):
        entry((3, 3), PINWHEEL)  # no plane cuts it
        entry((), [SCALAR])
        entry((0, 3), [])
        entry((0, 3), [Box((0, 0), (0, 3)), Box((0, 3), (0, 3)), Box((0, 1), (0, 2))])
        # FSDP leaves an empty chunk at the end of a short tensor.
        entry((5, 2), [Box((0, 0), (2, 2)), Box((2, 0), (4, 2)), Box((4, 0), (5, 2)), Box((5, 0), (5, 2))])

    def test_many_shards_are_checked_in_seconds(self):
        side = 500
        rows, columns = np.divmod(np.arange(side * side), side)
        starts = np.stack([rows, columns], axis=1)[np.random.default_rng(0).permutation(side * side)]
        offsets = np.arange(side * side)
        table = RowTable(
            (side, side), DType.UINT8, starts, starts + 1, ("f",), np.zeros_like(offsets), offsets, offsets + 1
        )
        assert len(TensorEntry((side, side), DType.UINT8, Kind.PARAMETER, table).shards) == side * side


def test_a_cast_changes_what_it_is_read_as_and_not_what_is_stored():
    whole = TensorEntry((2, 3), DType.FLOAT32, Kind.STATE, packed((6,), [Box((0,), (6,))], DType.FLOAT32))
    cast = whole.cast_to(DType.BFLOAT16)
    assert (cast.dtype, cast.shards.dtype, cast.num_bytes) == (DType.BFLOAT16, DType.FLOAT32, 12)


WEIGHT = entry((2,), [Box((0,), (2,))])


def manifest(aliases: dict[str, str], *groups: ParamGroup) -> Manifest:
    return Manifest("f", {StateKey("w"): WEIGHT}, aliases, groups)


def test_a_manifest_is_read_only_and_apart_from_what_it_was_made_of():
    step = TensorEntry((), DType.UINT8, Kind.STATE, packed((), [SCALAR]))
    tensors = {StateKey("w"): WEIGHT, StateKey("w", "step"): step}
    made = Manifest("f", tensors)
    tensors.clear()
    assert (made.fqns, list(made.select_kinds(Kind.STATE))) == ({"w"}, [StateKey("w", "step")])
    with pytest.raises(TypeError):
        made.tensors[StateKey("x")] = WEIGHT  # type: ignore[index]
    manifest({"tied": "w"}, ParamGroup(("w", "tied"), {"lr": 0.1}))


def test_other_tensors_are_checked_again_and_the_same_ones_are_kept():
    made = manifest({"tied": "w"})
    assert replace(made, step=7).tensors is made.tensors
    with pytest.raises(MalformedError, match="not a tensor"):
        replace(made, tensors={StateKey("v"): WEIGHT})
    with pytest.raises(MalformedError, match="not text"):
        replace(made, tensors={StateKey("w"): WEIGHT, StateKey("\ud800"): WEIGHT})
    assert replace(made, tensors={StateKey("v"): WEIGHT}, aliases={}).fqns == {"v"}
    assert made == manifest({"tied": "w"})


@given(st.one_of(st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False)))
def test_a_number_as_a_literal_file_comes_back_in_its_type(number):
    assert is_number(number)
    table, files = make_number_table(number, "step")
    step = TensorEntry((), table.dtype, Kind.STATE, table)
    made = Manifest("test", {StateKey("w", "step"): step}, literals=files)
    found = read_literal_number(made, step)
    assert (found, type(found)) == (number, type(number))
    assert read_literal_number(replace(made, literals={}), step) is None
    assert read_literal_number(made, step.cast_to(DType.FLOAT32)) is None
    assert not any(map(is_number, [None, "1", 2**63, -(2**63) - 1, 1j, [1]]))


def of_four(*stop: int, size: int, strides: tuple[int, ...] | None = None, start: int = 0) -> Refused:
    """A shard of a tensor of four bytes, from 0 to ``stop``, in so many bytes of its file."""

    def build(_: Path) -> object:
        shard = Shard(Box((0,) * len(stop), stop), ByteRange("part.bin", start, start + size), strides)
        return ShardTable.build((4,), DType.UINT8, [shard])

    return build


def moved(*columns: str) -> Refused:
    """A table some columns of which are one less."""
    table = packed((4,), [Box((0,), (4,))])
    return lambda _: replace(table, **{name: getattr(table, name) - 1 for name in columns})


def of_shape(*shape: int) -> Refused:
    return lambda _: ShardTable.build(shape, DType.FLOAT32, [])


def covered_by(shape: Shape, *boxes: Box) -> Refused:
    return lambda _: entry(shape, [*boxes])


def stored_in(*geometry: int) -> Refused:
    table = packed(geometry, [Box.whole(geometry)])
    return lambda _: TensorEntry((2, 3), DType.UINT8, Kind.PARAMETER, table)


def twice_strided(_: Path) -> object:
    shard = Shard(Box((0, 0), (2, 2)), ByteRange("f", 0, 4), (1, 2))
    return TensorEntry((2, 2), DType.UINT8, Kind.BUFFER, ShardTable.build((2, 2), DType.UINT8, [shard, shard]))


MALFORMED, TOO_LARGE = MalformedError, r"tensor of shape .* is too large"
SHORT_AND_LONG = [Box((0, 0), (4, 1)), Box((0, 2), (2, 3)), Box((2, 0), (3, 1))]

test_a_refusal = refusal_test(
    ("a box beyond the tensor", of_four(5, size=5), MALFORMED, "outside"),
    ("too few bytes", of_four(4, size=3), MALFORMED, r"^part\.bin: 3 bytes cannot hold 4 elements of uint8$"),
    ("too many bytes", of_four(4, size=5), MALFORMED, "5 bytes"),
    ("too many dims", of_four(4, 1, size=4), MALFORMED, "."),
    ("too few dims", of_four(size=1), MALFORMED, "."),
    ("few bytes for the strides", of_four(4, size=6, strides=(2,)), MALFORMED, "6 bytes"),
    ("many bytes for the strides", of_four(4, size=8, strides=(2,)), MALFORMED, "8 bytes"),
    ("a negative stride", of_four(4, size=4, strides=(-1,)), MALFORMED, "."),
    ("bytes of no elements", of_four(0, size=1, strides=(1,)), MALFORMED, "."),
    ("bytes beyond all files", of_four(4, size=4, start=1 << 63), MALFORMED, "."),
    ("a box beyond all addresses", of_four(1 << 63, size=0), MALFORMED, "."),
    ("2^63 elements", of_shape(1 << 63), MALFORMED, TOO_LARGE),
    ("2^64 elements", of_shape(1 << 32, 1 << 32), MALFORMED, TOO_LARGE),
    ("none of 2^80 elements", of_shape(0, 1 << 40, 1 << 40), MALFORMED, TOO_LARGE),
    ("2^64 bytes", of_shape(1 << 61, 2), MALFORMED, TOO_LARGE),
    ("a negative extent", of_shape(0, -1), MALFORMED, TOO_LARGE),
    ("negative columns", moved("starts", "stops"), MALFORMED, "outside"),
    ("negative bytes", moved("byte_starts", "byte_stops"), MALFORMED, "negative byte range"),
    ("an overlap", covered_by((3, 3), Box((0, 0), (2, 2)), *PINWHEEL[1:4]), MALFORMED, "overlap"),
    ("a gap", covered_by((3, 3), *PINWHEEL[:4]), IncompleteError, "1 of 9 elements"),
    ("an overlap behind a short box", covered_by((4, 3), *SHORT_AND_LONG), MALFORMED, "overlap"),
    ("two scalars", covered_by((), SCALAR, SCALAR), MALFORMED, "overlap"),
    ("no scalar", covered_by(()), IncompleteError, "1 of 1 elements"),
    ("strided pieces", twice_strided, MALFORMED, "overlap"),
    *((f"shards in {it}", stored_in(*it), MALFORMED, "shards of shape") for it in ((5,), (3, 2), (1, 6))),
    ("a tie to nobody", lambda _: manifest({"tied": "nobody"}), MALFORMED, "is tied to"),
    ("a tie of an owner", lambda _: manifest({"w": "w"}), MALFORMED, "is tied to"),
    ("a tie to a tie", lambda _: manifest({"tied": "other", "other": "w"}), MALFORMED, "is tied to"),
    ("a group of nothing", lambda _: manifest({}, ParamGroup(("x",), {})), MALFORMED, "a parameter group names 'x'"),
)

"""What a manifest refuses, and that what it accepts is an exact cover."""

from __future__ import annotations

import pickle
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_tools.core.boxes import Box, Shape
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.manifest import MASTER, Kind, Manifest, ParamGroup, StateKey, TensorEntry
from ckpt_tools.core.shards import ByteRange, Framing, RowTable, Shard, ShardTable
from ckpt_tools.errors import IncompleteError, MalformedError
from ckpt_tools.testing import strategies
from ckpt_tools.testing.stored import stored_tensors

pytestmark = pytest.mark.quick

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


def test_a_state_key_reads_as_its_name():
    assert str(StateKey("a.b")) == "a.b"
    assert str(StateKey("a.b", MASTER)) == "a.b (master)"


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2)])
def test_a_byte_range_runs_forward(start, stop):
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
        assert table.stride(1) == (3, 1)

    def test_strides_are_kept_for_every_shard_once_one_has_them(self):
        shards = [
            Shard(Box((0, 0), (2, 2)), ByteRange("a", 0, 4), (1, 2)),
            Shard(Box((2, 0), (3, 2)), ByteRange("a", 4, 6)),
        ]
        table = ShardTable.build((3, 2), DType.UINT8, shards)
        assert [shard.strides for shard in table] == [(1, 2), (2, 1)]
        assert table.flat is None

    @pytest.mark.parametrize(
        "shard",
        [
            Shard(Box((0,), (5,)), ByteRange("f", 0, 5)),
            Shard(Box((0,), (4,)), ByteRange("f", 0, 3)),
            Shard(Box((0,), (4,)), ByteRange("f", 0, 5)),
            Shard(Box((0, 0), (4, 1)), ByteRange("f", 0, 4)),
            Shard(Box((), ()), ByteRange("f", 0, 1)),
            Shard(Box((0,), (4,)), ByteRange("f", 0, 6), (2,)),
            Shard(Box((0,), (4,)), ByteRange("f", 0, 8), (2,)),
            Shard(Box((0,), (4,)), ByteRange("f", 0, 4), (-1,)),
            Shard(Box((0,), (0,)), ByteRange("f", 0, 1), (1,)),
            Shard(Box((0,), (4,)), ByteRange("f", 1 << 63, (1 << 63) + 4)),
            Shard(Box((1 << 63,), (1 << 63,)), ByteRange("f", 0, 0)),
        ],
    )
    def test_a_shard_that_cannot_be_is_malformed(self, shard):
        with pytest.raises(MalformedError):
            ShardTable.build((4,), DType.UINT8, [shard])

    @pytest.mark.parametrize("shape", [(1 << 63,), (1 << 32, 1 << 32), (0, 1 << 40, 1 << 40), (1 << 61, 2), (0, -1)])
    def test_a_shape_beyond_all_addresses_is_malformed(self, shape):
        with pytest.raises(MalformedError, match=r"tensor of shape .* is too large"):
            ShardTable.build(shape, DType.FLOAT32, [])

    def test_the_length_of_an_item_with_framing_is_its_own_business(self):
        shard = Shard(Box((0,), (4,)), ByteRange("f", 0, 700))
        assert len(ShardTable.build((4,), DType.UINT8, [shard], framing=Framing.TORCH_ITEM)) == 1

    def test_the_message_names_the_file(self):
        with pytest.raises(MalformedError, match=r"^part\.bin: 3 bytes cannot hold 2 elements of int16$"):
            ShardTable.build((2,), DType.INT16, [Shard(Box((0,), (2,)), ByteRange("part.bin", 0, 3))])

    def test_negative_columns_are_malformed(self):
        table = packed((4,), [Box((0,), (4,))])
        with pytest.raises(MalformedError, match="outside"):
            replace(table, starts=table.starts - 1, stops=table.stops - 1)
        with pytest.raises(MalformedError, match="negative byte range"):
            replace(table, byte_starts=table.byte_starts - 1, byte_stops=table.byte_stops - 1)

    @many
    @given(strategies.shapes(), st.data())
    def test_a_flattening_unfolds_into_the_same_bytes(self, shape, data):
        numel, item = prod(shape), 4
        table = packed((numel,), data.draw(strategies.flat_shardings(shape)), DType.FLOAT32)
        found = np.full(numel, -1)
        for shard in table.in_shape(shape):
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
        assert (table.flat is not None) == is_flat
        if table.flat is not None:
            intervals = sorted((int(p[0]), int(p[-1]) + 1, row) for row, p in enumerate(places) if p.size)
            assert list(zip(*(column.tolist() for column in table.flat), strict=True)) == [
                (row, start, stop) for start, stop, row in intervals
            ]

    @many
    @given(strategies.shapes(min_extent=1), st.data())
    def test_boxes_of_intervals_are_flat(self, shape, data):
        boxes = data.draw(strategies.unfolded_shardings(shape))
        flat = packed(shape, boxes).flat
        assert flat is not None
        assert flat.starts.tolist() == [0, *flat.stops.tolist()[:-1]]
        assert flat.stops.tolist()[-1] == prod(shape)


def _index(box: Box) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))


PINWHEEL = [
    Box((0, 0), (1, 2)),
    Box((0, 2), (2, 3)),
    Box((2, 1), (3, 3)),
    Box((1, 0), (3, 1)),
    Box((1, 1), (2, 2)),
]


class TestCover:
    @many
    @given(strategies.shapes(), st.data())
    def test_every_sharding_is_a_cover(self, shape, data):
        entry(shape, data.draw(strategies.box_shardings(shape)))
        boxes = data.draw(strategies.flat_shardings(shape))
        TensorEntry(shape, DType.UINT8, Kind.STATE, packed((prod(shape),), boxes))

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
    @given(strategies.shapes(), st.data())
    def test_a_further_piece_overlaps(self, shape, data):
        boxes = data.draw(strategies.box_shardings(shape))
        extra = data.draw(strategies.boxes(shape))
        boxes.insert(data.draw(st.integers(0, len(boxes))), extra)
        if extra.numel:
            with pytest.raises(MalformedError, match="overlap"):
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

    def test_a_pinwheel_is_a_cover_that_no_plane_cuts(self):
        entry((3, 3), PINWHEEL)

    def test_a_pinwheel_that_overlaps_itself_is_malformed(self):
        with pytest.raises(MalformedError, match="overlap"):
            entry((3, 3), [Box((0, 0), (2, 2)), *PINWHEEL[1:4]])

    def test_a_pinwheel_without_its_middle_is_incomplete(self):
        with pytest.raises(IncompleteError, match="1 of 9 elements"):
            entry((3, 3), PINWHEEL[:4])

    def test_a_long_box_overlaps_one_that_starts_after_a_short_one_ended(self):
        boxes = [Box((0, 0), (4, 1)), Box((0, 2), (2, 3)), Box((2, 0), (3, 1))]
        with pytest.raises(MalformedError, match="overlap"):
            entry((4, 3), boxes)

    def test_two_scalars_overlap_and_none_is_incomplete(self):
        scalar = Box((), ())
        entry((), [scalar])
        with pytest.raises(MalformedError, match="overlap"):
            entry((), [scalar, scalar])
        with pytest.raises(IncompleteError, match="1 of 1 elements"):
            entry((), [])

    def test_an_empty_tensor_needs_no_shard_and_bears_many(self):
        entry((0, 3), [])
        entry((0, 3), [Box((0, 0), (0, 3)), Box((0, 3), (0, 3)), Box((0, 1), (0, 2))])

    def test_fsdp_leaves_an_empty_chunk_at_the_end_of_a_short_tensor(self):
        entry((5, 2), [Box((0, 0), (2, 2)), Box((2, 0), (4, 2)), Box((4, 0), (5, 2)), Box((5, 0), (5, 2))])

    def test_strided_pieces_are_checked_too(self):
        piece = Shard(Box((0, 0), (2, 2)), ByteRange("f", 0, 4), (1, 2))
        with pytest.raises(MalformedError, match="overlap"):
            TensorEntry((2, 2), DType.UINT8, Kind.BUFFER, ShardTable.build((2, 2), DType.UINT8, [piece, piece]))

    def test_many_shards_are_checked_in_seconds(self):
        side = 500
        rows, columns = np.divmod(np.arange(side * side), side)
        starts = np.stack([rows, columns], axis=1)[np.random.default_rng(0).permutation(side * side)]
        offsets = np.arange(side * side)
        table = RowTable(
            (side, side), DType.UINT8, starts, starts + 1, ("f",), np.zeros_like(offsets), offsets, offsets + 1
        )
        assert len(TensorEntry((side, side), DType.UINT8, Kind.PARAMETER, table).shards) == side * side


class TestTensorEntry:
    @pytest.mark.parametrize("geometry", [(5,), (2, 3), (3, 2), (1, 6)])
    def test_shards_are_in_the_tensors_shape_or_its_flattening(self, geometry):
        table = packed(geometry, [Box.whole(geometry)])
        if geometry == (2, 3):
            TensorEntry((2, 3), DType.UINT8, Kind.PARAMETER, table)
        else:
            with pytest.raises(MalformedError, match="shards of shape"):
                TensorEntry((2, 3), DType.UINT8, Kind.PARAMETER, table)

    def test_a_cast_changes_what_it_is_read_as_and_not_what_is_stored(self):
        whole = TensorEntry((2, 3), DType.FLOAT32, Kind.STATE, packed((6,), [Box((0,), (6,))], DType.FLOAT32))
        cast = whole.cast(DType.BFLOAT16)
        assert (cast.dtype, cast.shards.dtype, cast.num_bytes) == (DType.BFLOAT16, DType.FLOAT32, 12)


class TestManifest:
    weight = entry((2,), [Box((0,), (2,))])

    def test_names_and_kinds(self):
        step = TensorEntry((), DType.UINT8, Kind.STATE, packed((), [Box((), ())]))
        manifest = Manifest("f", {StateKey("w"): self.weight, StateKey("w", "step"): step})
        assert manifest.fqns == {"w"}
        assert list(manifest.of_kind(Kind.STATE)) == [StateKey("w", "step")]

    def test_it_is_read_only_and_apart_from_what_it_was_made_of(self):
        tensors = {StateKey("w"): self.weight}
        manifest = Manifest("f", tensors)
        tensors.clear()
        assert list(manifest.tensors) == [StateKey("w")]
        with pytest.raises(TypeError):
            manifest.tensors[StateKey("x")] = self.weight  # type: ignore[index]

    @pytest.mark.parametrize("aliases", [{"tied": "nobody"}, {"w": "w"}, {"tied": "other", "other": "w"}])
    def test_a_tie_leads_from_a_free_name_to_an_owner(self, aliases):
        with pytest.raises(MalformedError, match="is tied to"):
            Manifest("f", {StateKey("w"): self.weight}, aliases=aliases)

    def test_groups_name_tensors_or_ties(self):
        tensors, aliases = {StateKey("w"): self.weight}, {"tied": "w"}
        Manifest("f", tensors, aliases, (ParamGroup(("w", "tied"), {"lr": 0.1}),))
        with pytest.raises(MalformedError, match="a parameter group names 'x'"):
            Manifest("f", tensors, aliases, (ParamGroup(("x",), {}),))

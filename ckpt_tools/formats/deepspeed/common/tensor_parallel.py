"""Rules that join the parts of a tensor-parallel run: ``universal_checkpoint_info`` of the model's files.

AutoTP and Megatron-DeepSpeed list patterns of names there, a category each; newer versions also have the place of every
block of each parameter (``affine_map``), which goes before the categories. checkpoint/ds_to_universal.py
``merge_tp_slices`` is the reference; docs/formats/deepspeed-parallel.md has the rules. Integers and names only: no file
is opened here. What takes arithmetic (an average, a scaled block) is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any

from ckpt_tools.core.boxes import Box, Shape, contiguous_strides
from ckpt_tools.core.shards import ByteRange, Shard, ShardTable
from ckpt_tools.core.values import Opaque, Value, are_naturals, as_dict, format_brief
from ckpt_tools.errors import MalformedError, UnsupportedError

REPLICATED_PATTERNS = "tp_replicated_parameter_patterns"
AVERAGED_PATTERNS = "parameter_to_average_patterns"
ROW_PARALLEL_PATTERNS = "parameter_with_row_parallelism_patterns"
VOCABULARY_PATTERNS = "vocabulary_parameter_patterns"
TWO_SUB_PARAM_PATTERNS = "parameter_with_2_sub_params_cat_dim_0"
SUB_PARAM_ENTRIES = "parameter_with_sub_params"
SUB_PARAM_WIDTHS = "sub_param_shard_widths"
UNSUPPORTED_PATTERNS = "autotp_unsupported_parameter_patterns"

AFFINE_VERSION = 1
"""checkpoint/affine.py ``AFFINE_MAP_FORMAT_VERSION``."""

WIDTHS_SINCE_VERSION = 0.4
"""``universal_checkpoint_version`` since which the widths of sub-parameters are stated."""

MAX_PATTERN_CHARS = 512
_REPEATS = re.compile(r"\\.|([*+{])")
_REPEATED_GROUP = re.compile(r"\)[*+?{]|\\[1-9]|\(\?")
MAX_REPEATS = 3
"""Repeats in a pattern: its time may grow with the length of a name to this power."""

BoxPair = tuple[Box, Box]
"""A box of a rank's part, and the box of the whole that it is."""


PARTITION_ENTRIES = ("universal_checkpoint_info", "mp_world_size", "checkpoint_parallel_dimensions")
"""Entries of a model's file on how the run cut its model, which do not apply to the whole."""


@dataclass(frozen=True, slots=True)
class ParameterMerge:
    """A whole parameter of ``shape``, and the boxes that each rank has of it. ``num_cropped`` is the number of rows of
    padding that were left out."""

    shape: Shape
    rank_boxes: tuple[tuple[BoxPair, ...], ...]
    num_cropped: int = 0

    def build_shard_table(self, part_tables: Sequence[ShardTable], part_shapes: Sequence[Shape]) -> ShardTable:
        """The shards of the whole, from the tables and shapes of the ranks' parts. A rank without boxes is not read."""
        shards = [
            shard
            for table, shape, boxes in zip(part_tables, part_shapes, self.rank_boxes, strict=True)
            for shard in (_move_shards(table.unflatten(shape), boxes) if boxes else ())
        ]
        return ShardTable.build(self.shape, part_tables[0].dtype, shards)


def _move_shards(table: ShardTable, boxes: Sequence[BoxPair]) -> Iterator[Shard]:
    """Shards of the whole: the overlap of each shard of a rank's part with each box, moved to the whole's coordinates.

    The strides of the stored shard stay. From them comes the byte of the overlap's first element, and the span of bytes
    that holds all its elements.
    """
    item_bytes = table.dtype.item_bytes
    for row in range(len(table)):
        shard_box, byte_range, strides = table.get_box(row), table.get_byte_range(row), table.get_strides(row)
        for part_box, whole_box in boxes:
            overlap = shard_box.intersect(part_box)
            if overlap is None:
                continue
            start_element = sum(s * i for s, i in zip(strides, overlap.relative_to(shard_box.start).start, strict=True))
            span_elements = 1 + sum((extent - 1) * s for extent, s in zip(overlap.shape, strides, strict=True))
            start_byte = byte_range.start + start_element * item_bytes
            target_box = overlap.relative_to(part_box.start).shift(whole_box.start)
            stop_byte = start_byte + span_elements * item_bytes
            yield Shard(target_box, ByteRange(byte_range.file, start_byte, stop_byte), strides)


@dataclass(frozen=True, slots=True)
class MergeRules:
    """The rules of ``universal_checkpoint_info``. ``path`` is their file, for messages."""

    info: Mapping[Value, Value]
    path: str

    @classmethod
    def of(cls, info: Value, path: str) -> MergeRules:
        """Raises FormatError if there are no rules, or unknown ones."""
        if not isinstance(info, dict) or not info:
            raise UnsupportedError(
                "it is of a tensor-parallel run and has no universal_checkpoint_info, the rules by which the parts "
                "are joined; save with AutoTP of DeepSpeed 0.18 or later, or with Megatron-DeepSpeed's "
                "--universal-checkpoint",
                path=path,
            )
        rules = cls(info, path)
        affine_map = rules._read_mapping("affine_map")
        if affine_map and affine_map.get("version", AFFINE_VERSION) not in range(AFFINE_VERSION + 1):
            raise UnsupportedError(f"its affine_map has version {format_brief(affine_map['version'])}", path=path)
        return rules

    def plan_merge(self, name: str, shapes: Sequence[Shape]) -> ParameterMerge:
        """The way to join the parts of parameter ``name``; ``shapes`` are those of the parts, one a rank. Raises
        UnsupportedError if joining takes arithmetic; MalformedError if the rules do not fit the parts."""
        blocks = self._read_mapping("affine_map").get("params", {})
        if not isinstance(blocks, dict):
            raise self._make_entry_error("affine_map")
        if (pattern := self._find_pattern([*blocks], name)) is not None:
            merge = self._merge_by_blocks(name, blocks[pattern], shapes)
        else:
            merge = self._merge_by_category(name, shapes)
        return self._crop_vocabulary(merge) if self._is_in_category(VOCABULARY_PATTERNS, name) else merge

    def does_mention(self, text: str) -> bool:
        """Whether a pattern or a name of the rules has ``text``."""
        return text in repr(self.info)

    # The content of the file

    def _read_mapping(self, key: str) -> Mapping[Value, Value]:
        mapping = self.info.get(key)
        if mapping is not None and not isinstance(mapping, dict):
            raise self._make_entry_error(key)
        return mapping or {}

    def _make_entry_error(self, key: str) -> MalformedError:
        return self._make_malformed_error(key, f"its universal_checkpoint_info has a malformed {key}")

    def _make_malformed_error(self, key: str, message: str) -> MalformedError:
        return MalformedError(message, path=self.path, key=key)

    def _make_unsupported_error(self, key: str, message: str) -> UnsupportedError:
        return UnsupportedError(message, path=self.path, key=key)

    def _is_in_category(self, key: str, name: str) -> bool:
        patterns = self.info.get(key) or []
        if not isinstance(patterns, list | tuple | dict):
            raise self._make_entry_error(key)
        return self._find_pattern(list(patterns), name) is not None

    def _find_pattern(self, patterns: Sequence[Value], name: str) -> str | None:
        """The only one of ``patterns`` that matches from the start of ``name``, as in DeepSpeed; None if none does.
        Raises MalformedError if several do."""
        matching = [pattern for pattern in patterns if self._compile_pattern(pattern).match(name)]
        if len(matching) > 1:
            raise self._make_malformed_error(name, f"several patterns of one kind match it: {format_brief(matching)}")
        return str(matching[0]) if matching else None

    def _compile_pattern(self, pattern: Value) -> re.Pattern[str]:
        if not isinstance(pattern, str):
            raise self._make_entry_error("pattern")
        repeats = sum(1 for match in _REPEATS.finditer(pattern) if match[1])
        if len(pattern) > MAX_PATTERN_CHARS or _REPEATED_GROUP.search(pattern) or repeats > MAX_REPEATS:
            raise UnsupportedError(f"its pattern {format_brief(pattern)} could take very long to match", path=self.path)
        try:
            return re.compile(pattern)
        except re.error as error:
            why = f"its pattern {format_brief(pattern)} is not a regular expression"
            raise MalformedError(why, path=self.path) from error

    # Categories

    def _merge_by_category(self, name: str, shapes: Sequence[Shape]) -> ParameterMerge:
        if self._is_in_category(UNSUPPORTED_PATTERNS, name):
            raise self._make_unsupported_error(name, "the run states that its parts cannot be joined")
        if self._is_in_category(REPLICATED_PATTERNS, name):
            return self.merge_replicated(name, shapes)
        if self._is_in_category(AVERAGED_PATTERNS, name):
            message = "its tensor-parallel copies differ and would have to be averaged, which is not supported"
            raise self._make_unsupported_error(name, message)
        if self._is_in_category(TWO_SUB_PARAM_PATTERNS, name):
            self._check_other_dims(name, shapes, 0)
            halves = [[-(-shape[0] // 2) for shape in shapes], [shape[0] // 2 for shape in shapes]]
            return self._merge_sub_params(name, shapes, 0, halves)
        for entry in self.info.get(SUB_PARAM_ENTRIES) or ():
            entry = entry.attributes if isinstance(entry, Opaque) else entry
            if not isinstance(entry, dict) or not isinstance(entry.get("patterns"), list | tuple):
                raise self._make_entry_error(SUB_PARAM_ENTRIES)
            for pattern in entry["patterns"]:
                if self._compile_pattern(pattern).match(name):
                    return self._merge_by_sub_params(name, pattern, entry, shapes)
        return self.merge_along(name, shapes, 1 if self._is_in_category(ROW_PARALLEL_PATTERNS, name) else 0)

    def merge_along(self, name: str, shapes: Sequence[Shape], dim: int) -> ParameterMerge:
        """Joins parts of ``shapes`` one after another along ``dim``."""
        self._check_other_dims(name, shapes, dim)
        return self._merge_sub_params(name, shapes, dim, [[shape[dim] for shape in shapes]])

    def _merge_by_sub_params(
        self, name: str, pattern: str, entry: Mapping[Value, Value], shapes: Sequence[Shape]
    ) -> ParameterMerge:
        dim, view_shape = entry.get("partition_dim"), entry.get("shape")
        ndim = len(shapes[0])
        if type(dim) is not int or not isinstance(view_shape, list | tuple) or not 0 <= dim < len(view_shape):
            raise self._make_entry_error(SUB_PARAM_ENTRIES)
        other_dims = [d for d in range(ndim) if d != dim]
        if len(view_shape) != ndim or not all(_is_same_extent(view_shape[d], shapes[0][d]) for d in other_dims):
            view_text = f"{format_brief(view_shape)} of a tensor of shape {list(shapes[0])}"
            raise self._make_unsupported_error(name, f"its sub-parameters are {view_text}, which is not supported")
        sizes = view_shape[dim]
        if type(sizes) is int:
            total_extent = sum(shape[dim] for shape in shapes)
            if sizes < 1 or total_extent % sizes:
                raise self._make_entry_error(SUB_PARAM_ENTRIES)
            sizes = (total_extent // sizes,) * sizes
        if not are_naturals(sizes, None):
            raise self._make_entry_error(SUB_PARAM_ENTRIES)
        return self._merge_sub_params(name, shapes, dim, self._read_widths(pattern, sizes, len(shapes), name))

    def _read_widths(self, pattern: str, sizes: Sequence[int], num_ranks: int, name: str) -> list[list[int]]:
        """``widths[sub][rank]``: the width of each sub-parameter on each rank. ``sizes`` are the widths of the whole
        ones."""
        version = self.info.get("universal_checkpoint_version", 0.0)
        if not isinstance(version, int | float):
            raise self._make_entry_error("universal_checkpoint_version")
        if version < WIDTHS_SINCE_VERSION:
            if any(size % num_ranks for size in sizes):
                message = f"its sub-parameters of {list(sizes)} were cut unevenly, and how is not stated"
                raise self._make_unsupported_error(name, message)
            return [[size // num_ranks] * num_ranks for size in sizes]
        widths = self._read_mapping(SUB_PARAM_WIDTHS).get(pattern)
        if not isinstance(widths, list | tuple) or len(widths) != len(sizes):
            raise self._make_entry_error(SUB_PARAM_WIDTHS)
        for rank_widths, size in zip(widths, sizes, strict=True):
            if not are_naturals(rank_widths, None) or len(rank_widths) != num_ranks or sum(rank_widths) != size:
                raise self._make_entry_error(SUB_PARAM_WIDTHS)
        return [list(each) for each in widths]

    def _crop_vocabulary(self, merge: ParameterMerge) -> ParameterMerge:
        """``merge`` without the rows that pad the vocabulary, those from ``original_vocab_size`` on."""
        rows = self.info.get("original_vocab_size")
        if type(rows) is not int or rows < 1 or not merge.shape:
            raise self._make_entry_error("original_vocab_size")
        if merge.shape[0] <= rows:
            return merge
        shape = (rows, *merge.shape[1:])
        rank_boxes = tuple(tuple(_crop_boxes(boxes, Box.whole(shape))) for boxes in merge.rank_boxes)
        return ParameterMerge(shape, rank_boxes, merge.shape[0] - rows)

    # Blocks

    def _merge_by_blocks(self, name: str, entry: Value, shapes: Sequence[Shape]) -> ParameterMerge:
        if not isinstance(entry, dict) or not isinstance(entry.get("ranks"), dict):
            raise self._make_entry_error("affine_map")
        shape = self._require_naturals(entry.get("logical_shape"))
        entry_by_rank = {str(rank): value for rank, value in entry["ranks"].items()}
        if entry_by_rank.keys() != {str(rank) for rank in range(len(shapes))}:
            raise self._make_entry_error("affine_map")
        blocks = (self._read_blocks(name, r, entry_by_rank[str(r)], part, shape) for r, part in enumerate(shapes))
        return ParameterMerge(shape, tuple(map(tuple, blocks)))

    def _read_blocks(
        self, name: str, rank: int, entry: Value, part_shape: Shape, whole_shape: Shape
    ) -> Iterator[BoxPair]:
        if not isinstance(entry, dict) or not isinstance(entry.get("pieces"), list | tuple):
            raise self._make_entry_error("affine_map")
        if self._require_naturals(entry.get("shard_shape")) != part_shape:
            shape_text = format_brief(entry["shard_shape"])
            message = f"its part on rank {rank} is {list(part_shape)}, but {shape_text} in affine_map"
            raise self._make_malformed_error(name, message)
        for piece in entry["pieces"]:
            if not isinstance(piece, dict) or not are_naturals(piece.get("locations"), None):
                raise self._make_entry_error("affine_map")
            if piece.get("scale", 1.0) != 1.0:
                scale = format_brief(piece["scale"])
                message = f"a block of it is stored multiplied by {scale}, which is not supported"
                raise self._make_unsupported_error(name, message)
            shape = self._require_naturals(piece.get("shape"))
            if prod(shape) and rank == min(piece["locations"], default=rank):
                part_box = self._parse_box(name, piece.get("dest"), shape, part_shape)
                yield part_box, self._parse_box(name, piece.get("source"), shape, whole_shape)

    def _parse_box(self, name: str, view: Value, shape: Shape, tensor_shape: Shape) -> Box:
        """The box of shape ``shape`` in a tensor of ``tensor_shape`` that ``view``, an offset and strides in elements,
        is. Raises UnsupportedError if it is none."""
        if not isinstance(view, list | tuple) or len(view) != 2 or type(view[0]) is not int or view[0] < 0:
            raise self._make_entry_error("affine_map")
        strides, tensor_strides = self._require_naturals(view[1]), contiguous_strides(tensor_shape)
        not_a_box = UnsupportedError("a block of it in affine_map is not a box, which is not supported", key=name)
        if len(shape) != len(tensor_shape) or len(strides) != len(tensor_shape):
            raise not_a_box
        # A box has the strides of the contiguous tensor in every dim in which it is longer than 1. The offset is then
        # the sum of start * stride over the dims, which division by the strides takes apart.
        if any(n > 1 and a != b for n, a, b in zip(shape, strides, tensor_strides, strict=True)):
            raise not_a_box
        start, remaining_offset = [], view[0]
        for stride in tensor_strides:
            start.append(remaining_offset // stride if stride else 0)
            remaining_offset = remaining_offset % stride if stride else remaining_offset
        box = Box(tuple(start), tuple(a + n for a, n in zip(start, shape, strict=True)))
        if not box.is_within(tensor_shape):
            raise not_a_box
        return box

    def _require_naturals(self, values: Value) -> Shape:
        if not are_naturals(values):
            raise self._make_entry_error("affine_map")
        return tuple(values)

    # Parts

    def merge_replicated(self, name: str, shapes: Sequence[Shape]) -> ParameterMerge:
        """Joins copies of the whole, one a rank: that of the first rank is read."""
        if len(set(shapes)) > 1:
            shapes_text = format_brief([list(shape) for shape in shapes])
            message = f"every tensor-parallel rank should have it whole, and they have {shapes_text}"
            raise self._make_malformed_error(name, message)
        whole_box = Box.whole(shapes[0])
        return ParameterMerge(shapes[0], (((whole_box, whole_box),), *((),) * (len(shapes) - 1)))

    def _merge_sub_params(
        self, name: str, shapes: Sequence[Shape], dim: int, widths: Sequence[Sequence[int]]
    ) -> ParameterMerge:
        """Joins parts that have a piece of every sub-parameter, ``widths[sub][rank]`` wide along ``dim``; the whole has
        the pieces of a sub-parameter together. A fused qkv on two ranks, along dim 0:

            rank 0:  q0 k0 v0        rank 1:  q1 k1 v1        whole:  q0 q1 k0 k1 v0 v1
        """
        self._check_other_dims(name, shapes, dim)
        for rank, shape in enumerate(shapes):
            if sum(width[rank] for width in widths) != shape[dim]:
                part_text = f"its part on rank {rank} has the shape {list(shape)}"
                raise self._make_malformed_error(name, f"{part_text}, which its sub-parameters do not fill")
        whole_shape = (*shapes[0][:dim], sum(shape[dim] for shape in shapes), *shapes[0][dim + 1 :])
        # Where each sub-parameter starts in the whole, and in the loop, where the rank's piece of it does.
        starts = list(accumulate((sum(width) for width in widths), initial=0))
        rank_boxes = []
        for rank, shape in enumerate(shapes):
            sub_param_starts = [start + sum(width[:rank]) for start, width in zip(starts, widths, strict=False)]
            rank_boxes.append(tuple(_place_sub_params(shape, dim, [width[rank] for width in widths], sub_param_starts)))
        return ParameterMerge(whole_shape, tuple(rank_boxes))

    def _check_other_dims(self, name: str, shapes: Sequence[Shape], dim: int) -> None:
        other_extents = {(len(shape), *shape[:dim], *shape[dim + 1 :]) for shape in shapes}
        if len(other_extents) > 1 or dim >= len(shapes[0]):
            shapes_text = format_brief([list(shape) for shape in shapes])
            raise self._make_malformed_error(name, f"its parts of {shapes_text} cannot be joined along dim {dim}")


def _is_same_extent(view_extent: Value, extent: int) -> bool:
    """Whether the extent that ``parameter_with_sub_params`` states for a dim is ``extent``: -1 stands for any, a list
    for the sum of its parts."""
    return (sum(view_extent) if are_naturals(view_extent, None) else view_extent) in (-1, extent)


def _crop_boxes(boxes: Sequence[BoxPair], limit: Box) -> Iterator[BoxPair]:
    for part_box, whole_box in boxes:
        overlap = whole_box.intersect(limit)
        if overlap is not None:
            yield overlap.relative_to(whole_box.start).shift(part_box.start), overlap


def _place_sub_params(shape: Shape, dim: int, widths: Sequence[int], starts: Sequence[int]) -> Iterator[BoxPair]:
    """The boxes of a part of ``shape``: pieces of ``widths`` one after another along ``dim``, each at one of ``starts``
    in the whole."""
    cursor = 0
    for width, start in zip(widths, starts, strict=True):
        box = Box.whole((*shape[:dim], width, *shape[dim + 1 :]))
        if box.numel:
            dims = range(len(shape))
            part_start, whole_start = (tuple(at if d == dim else 0 for d in dims) for at in (cursor, start))
            yield box.shift(part_start), box.shift(whole_start)
        cursor += width


def drop_partition_entries(extra: Mapping[str, Any]) -> dict[str, Any]:
    """The extras of a manifest without ``PARTITION_ENTRIES`` among DeepSpeed's entries."""
    entries = as_dict(extra.get("deepspeed"))
    kept_entries = {name: value for name, value in entries.items() if name not in PARTITION_ENTRIES}
    return {**extra, "deepspeed": kept_entries} if entries else dict(extra)

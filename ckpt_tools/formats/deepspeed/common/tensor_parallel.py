"""Rules that join the parts of a tensor-parallel run: ``universal_checkpoint_info`` of the model's files.

AutoTP and Megatron-DeepSpeed list patterns of names there, a category each; newer versions also have the place of every
block of each parameter (``affine_map``), which goes before the categories. checkpoint/ds_to_universal.py
``merge_tp_slices`` is the reference; docs/formats/deepspeed.md has the rules. Integers and names only: no file is
opened here. What takes arithmetic (an average, a scaled block) is refused by name.
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
from ckpt_tools.core.values import Opaque, Value, are_naturals, format_brief
from ckpt_tools.errors import MalformedError, UnsupportedError

REPLICATED = "tp_replicated_parameter_patterns"
AVERAGED = "parameter_to_average_patterns"
ROWS = "parameter_with_row_parallelism_patterns"
VOCABULARY = "vocabulary_parameter_patterns"
HALVES = "parameter_with_2_sub_params_cat_dim_0"
SUB_PARAMS = "parameter_with_sub_params"
WIDTHS = "sub_param_shard_widths"
UNSUPPORTED = "autotp_unsupported_parameter_patterns"

AFFINE_VERSION = 1
"""checkpoint/affine.py ``AFFINE_MAP_FORMAT_VERSION``."""

WIDTHS_SINCE = 0.4
"""``universal_checkpoint_version`` since which the widths of sub-parameters are stated."""

MAX_PATTERN = 512
_REPEATS = re.compile(r"\\.|([*+{])")
_REPEATED_GROUP = re.compile(r"\)[*+?{]|\\[1-9]|\(\?")
MAX_REPEATS = 3
"""Repeats in a pattern: its time may grow with the length of a name to this power."""

Placed = tuple[Box, Box]
"""A box of a rank's part, and the box of the whole that it is."""


CUTTING = ("universal_checkpoint_info", "mp_world_size", "checkpoint_parallel_dimensions")
"""Entries of a model's file on how the run cut its model, which do not apply to the whole."""


@dataclass(frozen=True, slots=True)
class Join:
    """A whole parameter of ``shape``, and by rank the boxes that each has of it. ``num_cropped`` are rows of padding
    that were left out."""

    shape: Shape
    ranks: tuple[tuple[Placed, ...], ...]
    num_cropped: int = 0

    def table(self, parts: Sequence[ShardTable], shapes: Sequence[Shape]) -> ShardTable:
        shards = [
            shard
            for table, shape, boxes in zip(parts, shapes, self.ranks, strict=True)
            for shard in (_moved(table.unflatten(shape), boxes) if boxes else ())
        ]
        return ShardTable.build(self.shape, parts[0].dtype, shards)


def _moved(table: ShardTable, boxes: Sequence[Placed]) -> Iterator[Shard]:
    item = table.dtype.item_bytes
    for row in range(len(table)):
        stored, at, strides = table.get_box(row), table.get_byte_range(row), table.get_strides(row)
        for there, here in boxes:
            common = stored.intersect(there)
            if common is None:
                continue
            skipped = sum(s * i for s, i in zip(strides, common.relative_to(stored.start).start, strict=True))
            span = 1 + sum((extent - 1) * s for extent, s in zip(common.shape, strides, strict=True))
            start = at.start + skipped * item
            placed = common.relative_to(there.start).shift(here.start)
            yield Shard(placed, ByteRange(at.file, start, start + span * item), strides)


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules of ``universal_checkpoint_info``. ``path`` is their file, for messages."""

    info: Mapping[Value, Value]
    path: str

    @classmethod
    def of(cls, info: Value, path: str) -> Rules:
        """Raises FormatError where there are no rules, or unknown ones."""
        if not isinstance(info, dict) or not info:
            raise UnsupportedError(
                "it is of a tensor-parallel run and has no universal_checkpoint_info, the rules by which the parts "
                "are joined; save with AutoTP of DeepSpeed 0.18 or later, or with Megatron-DeepSpeed's "
                "--universal-checkpoint",
                path=path,
            )
        rules = cls(info, path)
        affine = rules._mapping("affine_map")
        if affine and affine.get("version", AFFINE_VERSION) not in range(AFFINE_VERSION + 1):
            raise UnsupportedError(f"its affine_map has version {format_brief(affine['version'])}", path=path)
        return rules

    def join(self, name: str, shapes: Sequence[Shape]) -> Join:
        """The join of parts of ``shapes``, one a rank. Raises UnsupportedError if it takes arithmetic; MalformedError
        if the rules do not fit the parts."""
        blocks = self._mapping("affine_map").get("params", {})
        if not isinstance(blocks, dict):
            raise self._bad("affine_map")
        pattern = self._one([*blocks], name)
        is_block = pattern is not None
        found = self._by_blocks(name, blocks[pattern], shapes) if is_block else self._by_category(name, shapes)
        return self._cropped(found) if self._matches(VOCABULARY, name) else found

    def mention(self, text: str) -> bool:
        """Whether a pattern or a name of the rules has ``text``."""
        return text in repr(self.info)

    # The content of the file

    def _mapping(self, key: str) -> Mapping[Value, Value]:
        found = self.info.get(key)
        if found is not None and not isinstance(found, dict):
            raise self._bad(key)
        return found or {}

    def _bad(self, key: str) -> MalformedError:
        return self._malformed(key, f"its universal_checkpoint_info has a malformed {key}")

    def _malformed(self, key: str, message: str) -> MalformedError:
        return MalformedError(message, path=self.path, key=key)

    def _unsupported(self, key: str, message: str) -> UnsupportedError:
        return UnsupportedError(message, path=self.path, key=key)

    def _matches(self, key: str, name: str) -> bool:
        patterns = self.info.get(key) or []
        if not isinstance(patterns, list | tuple | dict):
            raise self._bad(key)
        return self._one(list(patterns), name) is not None

    def _one(self, patterns: Sequence[Value], name: str) -> str | None:
        """The one of ``patterns`` that matches from the start of the name, as in DeepSpeed."""
        found = [pattern for pattern in patterns if self._compiled(pattern).match(name)]
        if len(found) > 1:
            raise self._malformed(name, f"several patterns of one kind match it: {format_brief(found)}")
        return str(found[0]) if found else None

    def _compiled(self, pattern: Value) -> re.Pattern[str]:
        if not isinstance(pattern, str):
            raise self._bad("pattern")
        repeats = sum(1 for match in _REPEATS.finditer(pattern) if match[1])
        if len(pattern) > MAX_PATTERN or _REPEATED_GROUP.search(pattern) or repeats > MAX_REPEATS:
            raise UnsupportedError(f"its pattern {format_brief(pattern)} could take very long to match", path=self.path)
        try:
            return re.compile(pattern)
        except re.error as error:
            raise MalformedError(
                f"its pattern {format_brief(pattern)} is not a regular expression", path=self.path
            ) from error

    # Categories

    def _by_category(self, name: str, shapes: Sequence[Shape]) -> Join:
        if self._matches(UNSUPPORTED, name):
            raise self._unsupported(name, "the run states that its parts cannot be joined")
        if self._matches(REPLICATED, name):
            return self.replicated(name, shapes)
        if self._matches(AVERAGED, name):
            message = "its tensor-parallel copies differ and would have to be averaged, which is not supported"
            raise self._unsupported(name, message)
        if self._matches(HALVES, name):
            self._check_others(name, shapes, 0)
            first = [-(-shape[0] // 2) for shape in shapes]
            return self._sub_params(name, shapes, 0, [first, [s[0] - f for s, f in zip(shapes, first, strict=True)]])
        for entry in self.info.get(SUB_PARAMS) or ():
            entry = entry.attributes if isinstance(entry, Opaque) else entry
            if not isinstance(entry, dict) or not isinstance(entry.get("patterns"), list | tuple):
                raise self._bad(SUB_PARAMS)
            for pattern in entry["patterns"]:
                if self._compiled(pattern).match(name):
                    return self._by_sub_params(name, pattern, entry, shapes)
        return self.along(name, shapes, 1 if self._matches(ROWS, name) else 0)

    def along(self, name: str, shapes: Sequence[Shape], dim: int) -> Join:
        """Parts of ``shapes``, one after another along ``dim``."""
        self._check_others(name, shapes, dim)
        return self._sub_params(name, shapes, dim, [[shape[dim] for shape in shapes]])

    def _by_sub_params(self, name: str, pattern: str, entry: Mapping[Value, Value], shapes: Sequence[Shape]) -> Join:
        dim, spec = entry.get("partition_dim"), entry.get("shape")
        ndim = len(shapes[0])
        if type(dim) is not int or not isinstance(spec, list | tuple) or not 0 <= dim < len(spec):
            raise self._bad(SUB_PARAMS)
        if len(spec) != ndim or any(not _fits(spec[d], shapes[0][d]) for d in range(ndim) if d != dim):
            tensor = f"a tensor of shape {list(shapes[0])}"
            raise self._unsupported(
                name, f"its sub-parameters are {format_brief(spec)} of {tensor}, which is not supported"
            )
        sizes = spec[dim]
        if type(sizes) is int:
            total = sum(shape[dim] for shape in shapes)
            if sizes < 1 or total % sizes:
                raise self._bad(SUB_PARAMS)
            sizes = (total // sizes,) * sizes
        if not are_naturals(sizes, None):
            raise self._bad(SUB_PARAMS)
        return self._sub_params(name, shapes, dim, self._widths(pattern, sizes, len(shapes), name))

    def _widths(self, pattern: str, sizes: Sequence[int], num_ranks: int, name: str) -> list[list[int]]:
        """The width on each rank, of each sub-parameter."""
        version = self.info.get("universal_checkpoint_version", 0.0)
        if not isinstance(version, int | float):
            raise self._bad("universal_checkpoint_version")
        if version < WIDTHS_SINCE:
            if any(size % num_ranks for size in sizes):
                message = f"its sub-parameters of {list(sizes)} were cut unevenly, and how is not stated"
                raise self._unsupported(name, message)
            return [[size // num_ranks] * num_ranks for size in sizes]
        widths = self._mapping(WIDTHS).get(pattern)
        if not isinstance(widths, list | tuple) or len(widths) != len(sizes):
            raise self._bad(WIDTHS)
        for each, size in zip(widths, sizes, strict=True):
            if not are_naturals(each, None) or len(each) != num_ranks or sum(each) != size:
                raise self._bad(WIDTHS)
        return [list(each) for each in widths]

    def _cropped(self, found: Join) -> Join:
        """Without the rows that pad the vocabulary."""
        rows = self.info.get("original_vocab_size")
        if type(rows) is not int or rows < 1 or not found.shape:
            raise self._bad("original_vocab_size")
        if found.shape[0] <= rows:
            return found
        shape = (rows, *found.shape[1:])
        ranks = tuple(tuple(_within(boxes, Box.whole(shape))) for boxes in found.ranks)
        return Join(shape, ranks, found.shape[0] - rows)

    # Blocks

    def _by_blocks(self, name: str, entry: Value, shapes: Sequence[Shape]) -> Join:
        if not isinstance(entry, dict) or not isinstance(entry.get("ranks"), dict):
            raise self._bad("affine_map")
        shape = self._naturals(entry.get("logical_shape"))
        ranks = {str(rank): value for rank, value in entry["ranks"].items()}
        if ranks.keys() != {str(rank) for rank in range(len(shapes))}:
            raise self._bad("affine_map")
        return Join(
            shape, tuple(tuple(self._blocks(name, r, ranks[str(r)], shapes[r], shape)) for r in range(len(shapes)))
        )

    def _blocks(self, name: str, rank: int, entry: Value, part: Shape, whole: Shape) -> Iterator[Placed]:
        if not isinstance(entry, dict) or not isinstance(entry.get("pieces"), list | tuple):
            raise self._bad("affine_map")
        if self._naturals(entry.get("shard_shape")) != part:
            stated = format_brief(entry["shard_shape"])
            raise self._malformed(name, f"its part on rank {rank} is {list(part)}, but {stated} in affine_map")
        for piece in entry["pieces"]:
            if not isinstance(piece, dict) or not are_naturals(piece.get("locations"), None):
                raise self._bad("affine_map")
            if piece.get("scale", 1.0) != 1.0:
                message = (
                    f"a block of it is stored multiplied by {format_brief(piece['scale'])}, which is not supported"
                )
                raise self._unsupported(name, message)
            shape = self._naturals(piece.get("shape"))
            if prod(shape) and rank == min(piece["locations"], default=rank):
                ends = (self._box(name, piece.get(key), shape, of) for key, of in (("dest", part), ("source", whole)))
                yield next(ends), next(ends)

    def _box(self, name: str, view: Value, shape: Shape, of: Shape) -> Box:
        """The box of a tensor of shape ``of`` that a view of offset and strides is."""
        if not isinstance(view, list | tuple) or len(view) != 2 or type(view[0]) is not int or view[0] < 0:
            raise self._bad("affine_map")
        strides, wanted = self._naturals(view[1]), contiguous_strides(of)
        not_a_box = UnsupportedError("a block of it in affine_map is not a box, which is not supported", key=name)
        if len(shape) != len(of) or len(strides) != len(of):
            raise not_a_box
        if any(n > 1 and a != b for n, a, b in zip(shape, strides, wanted, strict=True)):
            raise not_a_box
        start, left = [], view[0]
        for stride in wanted:
            start.append(left // stride if stride else 0)
            left = left % stride if stride else left
        box = Box(tuple(start), tuple(a + n for a, n in zip(start, shape, strict=True)))
        if not box.is_within(of):
            raise not_a_box
        return box

    def _naturals(self, found: Value) -> Shape:
        if not are_naturals(found):
            raise self._bad("affine_map")
        return tuple(found)

    # Parts

    def replicated(self, name: str, shapes: Sequence[Shape]) -> Join:
        """Every rank has the whole; the first one's is read."""
        if len(set(shapes)) > 1:
            have = format_brief([list(shape) for shape in shapes])
            raise self._malformed(name, f"every tensor-parallel rank should have it whole, and they have {have}")
        whole = Box.whole(shapes[0])
        return Join(shapes[0], (((whole, whole),), *((),) * (len(shapes) - 1)))

    def _sub_params(self, name: str, shapes: Sequence[Shape], dim: int, widths: Sequence[Sequence[int]]) -> Join:
        """Each part is a piece of every sub-parameter, ``widths[sub][rank]`` wide along ``dim``; the whole has each
        sub-parameter's pieces together."""
        self._check_others(name, shapes, dim)
        for rank, shape in enumerate(shapes):
            if sum(width[rank] for width in widths) != shape[dim]:
                part = f"its part on rank {rank} has the shape {list(shape)}"
                raise self._malformed(name, f"{part}, which its sub-parameters do not fill")
        whole = (*shapes[0][:dim], sum(shape[dim] for shape in shapes), *shapes[0][dim + 1 :])
        starts = list(accumulate((sum(width) for width in widths), initial=0))
        ranks = []
        for rank, shape in enumerate(shapes):
            before = [start + sum(width[:rank]) for start, width in zip(starts, widths, strict=False)]
            ranks.append(tuple(_pieces(shape, dim, [width[rank] for width in widths], before)))
        return Join(whole, tuple(ranks))

    def _check_others(self, name: str, shapes: Sequence[Shape], dim: int) -> None:
        others = {(len(shape), *shape[:dim], *shape[dim + 1 :]) for shape in shapes}
        if len(others) > 1 or dim >= len(shapes[0]):
            parts = format_brief([list(shape) for shape in shapes])
            raise self._malformed(name, f"its parts of {parts} cannot be joined along dim {dim}")


def _fits(spec: Value, extent: int) -> bool:
    """Whether a dim of a view is that of the tensor: -1 stands for any, a list for the sum of its parts."""
    return (sum(spec) if are_naturals(spec, None) else spec) in (-1, extent)


def _within(boxes: Sequence[Placed], limit: Box) -> Iterator[Placed]:
    for there, here in boxes:
        common = here.intersect(limit)
        if common is not None:
            yield common.relative_to(here.start).shift(there.start), common


def _pieces(shape: Shape, dim: int, widths: Sequence[int], starts: Sequence[int]) -> Iterator[Placed]:
    cursor = 0
    for width, start in zip(widths, starts, strict=True):
        box = Box.whole((*shape[:dim], width, *shape[dim + 1 :]))
        if box.numel:
            there, here = (tuple(at if d == dim else 0 for d in range(len(shape))) for at in (cursor, start))
            yield box.shift(there), box.shift(here)
        cursor += width


def whole_extra(extra: Mapping[str, Any]) -> dict[str, Any]:
    own = extra.get("deepspeed")
    if not isinstance(own, dict):
        return dict(extra)
    return {**extra, "deepspeed": {name: value for name, value in own.items() if name not in CUTTING}}

"""Places of the elements of a rank's tensor in the whole tensor.

``local_global_slices_pairs`` in the metadata of a file is ``LOCAL#GLOBAL;...``, and each side has a slice ``start,stop,
step`` for each dim, with ``|`` between (nanotron, parallel/parameters.py, SlicesPair). Rows of several projections in
one tensor, such as those of QKV, have a pair each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from operator import sub

from ckpt_tools.core.boxes import Box, Shape, contiguous_strides, interval_to_boxes, is_row_major, ravel_index
from ckpt_tools.core.shards import ByteRange, Shard
from ckpt_tools.errors import MalformedError, UnsupportedError


@dataclass(frozen=True, slots=True)
class NanotronTensorPart:
    """A rank's tensor of shape ``local_shape``, whose boxes are boxes of the tensor of ``shape``."""

    local_shape: Shape
    shape: Shape
    box_pairs: tuple[tuple[Box, Box], ...]

    @classmethod
    def whole(cls, shape: Shape) -> NanotronTensorPart:
        return cls(shape, shape, ((Box.whole(shape), Box.whole(shape)),))

    @classmethod
    def parse(cls, pairs: str, shape: Shape, local: Shape) -> NanotronTensorPart:
        """From the metadata of a file. Raises MalformedError, or UnsupportedError for slices with steps."""
        box_pairs = []
        for pair in pairs.split(";"):
            inner, _, outer = pair.partition("#")
            boxes = _parse_box(inner, local), _parse_box(outer, shape)
            if boxes[0].shape != boxes[1].shape:
                raise MalformedError(f"its slices {pair:.200} are of two sizes")
            box_pairs.append(boxes)
        return cls(local, shape, tuple(box_pairs))

    def iter_shards(self, start: int, stop: int, byte_range: ByteRange, item_bytes: int) -> Iterator[Shard]:
        """The elements ``[start, stop)`` of the rank's tensor, flattened, which are the bytes ``byte_range``."""
        # stored bytes       ...[start ===== stop]...    an interval of the rank's flattened tensor (ZeRO-1), or all
        # interval_to_boxes  boxes of the rank's tensor  e.g. rows 2 to 5 of a [6, n] block of q, k and v
        # overlap            with ``inner`` of a pair    the rows of k alone
        # target_box         moved by outer - inner      where these rows are in the whole tensor
        # The first element of an overlap gives its byte; its rows keep the strides of the rank's tensor.
        strides = contiguous_strides(self.local_shape)
        for box in interval_to_boxes(start, stop, self.local_shape):
            for inner, outer in self.box_pairs:
                overlap = box.intersect(inner)
                if overlap is None:
                    continue
                first_element = ravel_index(overlap.start, self.local_shape) - start
                num_spanned = sum((n - 1) * stride for n, stride in zip(overlap.shape, strides, strict=True)) + 1
                begin = byte_range.start + first_element * item_bytes
                target_box = overlap.shift(tuple(map(sub, outer.start, inner.start)))
                shard_strides = None if is_row_major(overlap.shape, strides) else strides
                yield Shard(
                    target_box, ByteRange(byte_range.file, begin, begin + num_spanned * item_bytes), shard_strides
                )


def _parse_box(text: str, shape: Shape) -> Box:
    parts = [each.split(",") for each in text.split("|")]
    if len(parts) != len(shape) or any(len(part) != 3 for part in parts):
        raise MalformedError(f"its slices {text:.200} are not of {len(shape)} dims")
    bounds = [_parse_bounds(part, size) for part, size in zip(parts, shape, strict=True)]
    return Box(tuple(start for start, _ in bounds), tuple(stop for _, stop in bounds))


def _parse_bounds(part: list[str], size: int) -> tuple[int, int]:
    try:
        start, stop, step = (None if each == "None" else int(each) for each in part)
    except ValueError:
        raise MalformedError(f"{','.join(part):.200} is not a slice") from None
    if step not in (None, 1):
        raise UnsupportedError(f"its slices have a step of {step}, which is not supported")
    start, stop = 0 if start is None else start, size if stop is None else stop
    if not 0 <= start <= stop <= size:
        raise MalformedError(f"the slice {start}:{stop} is not within {size}")
    return start, stop


def compute_zero1_interval(numel: int, rank: int, ranks: int) -> tuple[int, int]:
    """The elements of a flattened tensor that a data-parallel rank updates with ZeRO-1: the first ranks have one more
    where the ranks do not divide them (nanotron, optim/zero.py, _partition_parameters)."""
    per_rank, remainder = divmod(numel, ranks)
    start = rank * per_rank + min(rank, remainder)
    return start, start + per_rank + (rank < remainder)

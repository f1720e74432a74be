"""Indices of numpy: parsed from text such as ``0:2, :`` without evaluating it, and split into the boxes of a tensor to
read and an index into what was read. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckpt_tools.core.boxes import Box, Shape
from ckpt_tools.errors import UsageError

Index = tuple[int | slice | EllipsisType, ...]

_INTEGER = r"\s*([+-]?[0-9]{1,18})?\s*"
_SLICE = re.compile(rf"{_INTEGER}:{_INTEGER}(?::{_INTEGER})?", re.ASCII)
_INTEGER_ONLY = re.compile(r"[+-]?[0-9]{1,18}", re.ASCII)


def split_index(text: str) -> tuple[str, str | None]:
    """``NAME[INDEX]`` as its two parts; the index is None without brackets at the end."""
    name, bracket, index = text.rpartition("[")
    return (name, index[:-1]) if bracket and index.endswith("]") else (text, None)


def parse_index(text: str) -> Index:
    """The index of ``text``: integers, slices and an ellipsis with commas between them.

    Raises:
        UsageError: a part is something else, or the step of a slice is 0.
    """
    return tuple(_parse_index_part(part.strip(), text) for part in text.split(","))


def _parse_index_part(part: str, text: str) -> int | slice | EllipsisType:
    if part == "...":
        return ...
    if _INTEGER_ONLY.fullmatch(part):
        return int(part)
    slice_match = _SLICE.fullmatch(part)
    if slice_match is None:
        raise UsageError(
            f"[{text}]: {part or 'an empty part'} is not an integer, a slice (0:2, ::2) or an ellipsis (...)"
        )
    first, last, step = (None if each is None else int(each) for each in slice_match.groups())
    if step == 0:
        raise UsageError(f"[{text}]: the step of a slice cannot be 0")
    return slice(first, last, step)


@dataclass(frozen=True, slots=True)
class IndexSelection:
    """The elements that an index of numpy means: ``boxes`` to read one after the other, ``shape`` of the array
    that they make, and ``local_index``, the index of the elements in it."""

    boxes: tuple[Box, ...]
    shape: Shape
    local_index: tuple[Any, ...]


def resolve_index(index: Any, shape: Shape) -> IndexSelection:
    """``index`` of a tensor of ``shape``: integers, slices, an ellipsis, arrays of integers and masks.

    Of the first dim that is not indexed by an integer, only the rows that an array names are in the boxes, and those
    that follow each other as one box. Of every other dim it is the smallest interval.

    Raises:
        IndexError: as numpy does; also for ``None`` and a single ``True`` or ``False``.
    """
    # For each dim: the positions that are wanted, the smallest interval that holds them, and their index within it.
    dim_indices = _normalize_index(index, shape)
    bounding_ranges = [_find_bounding_range(part) for part in dim_indices]
    local_index = [_make_local_index(part) for part in dim_indices]
    # Along the first dim that is not an integer, an array of rows is read as several boxes, one for each run of rows.
    axis = next((dim for dim, part in enumerate(dim_indices) if not isinstance(part, int)), len(dim_indices))
    rows = dim_indices[axis] if axis < len(dim_indices) else None
    row_runs = bounding_ranges[axis : axis + 1]
    if isinstance(rows, np.ndarray) and rows.size:
        unique, inverse = np.unique(rows, return_inverse=True)
        gaps = np.flatnonzero(np.diff(unique) != 1)
        row_runs = list(map(range, unique[[0, *(gaps + 1)]].tolist(), (unique[[*gaps, -1]] + 1).tolist()))
        local_index[axis] = inverse.reshape(rows.shape)
    boxes = [_make_box([*bounding_ranges[:axis], run, *bounding_ranges[axis + 1 :]]) for run in row_runs]
    boxes = boxes or [_make_box(bounding_ranges)]  # of a tensor without dims, or where all are integers
    extents = list(boxes[0].shape)
    extents[axis : axis + 1] = [sum(map(len, row_runs))] if row_runs else []
    # Without dims, only an ellipsis gives an array.
    return IndexSelection(tuple(boxes), tuple(extents), (*local_index, ...))


_DimIndex = range | int | NDArray[np.intp]
"""The positions that are wanted of one dim; an integer takes the dim away."""


def _normalize_index(index: Any, shape: Shape) -> list[_DimIndex]:
    index_parts = [_convert_index_array(part) for part in (index if isinstance(index, tuple) else (index,))]
    ellipsis_positions = [position for position, part in enumerate(index_parts) if part is Ellipsis]
    if len(ellipsis_positions) > 1:
        raise IndexError("an index can only have a single ellipsis")
    ellipsis_at = ellipsis_positions[0] if ellipsis_positions else len(index_parts)
    num_implicit_dims = len(shape) - sum(_count_indexed_dims(part) for part in index_parts)
    if num_implicit_dims < 0:
        raise IndexError(f"{len(shape) - num_implicit_dims} indices for a tensor of {len(shape)} dims")
    index_parts[ellipsis_at : ellipsis_at + 1] = [slice(None)] * num_implicit_dims
    dim_indices: list[_DimIndex] = []
    for part in index_parts:
        dim_indices += _expand_positions(part, shape, len(dim_indices))
    return dim_indices


def _convert_index_array(part: Any) -> Any:
    """A list, an array or a tensor as an array of integers or a mask; everything else as it is."""
    is_array = hasattr(part, "__array__") or (isinstance(part, Sequence) and not isinstance(part, str | bytes))
    if not is_array:
        return part
    array = np.asarray(part)
    if not array.ndim:
        return array.item()
    if array.dtype.kind not in "iub" and array.size:
        raise IndexError(f"arrays that index a stored tensor are of integers or booleans, not {array.dtype}")
    return array if array.dtype.kind in "iub" else array.astype(np.intp)


def _count_indexed_dims(part: Any) -> int:
    if part is Ellipsis:
        return 0
    return part.ndim if isinstance(part, np.ndarray) and part.dtype == bool else 1


def _expand_positions(part: Any, shape: Shape, dim: int) -> list[_DimIndex]:
    """The positions in ``dim``, and in the dims after it if a mask covers them."""
    if isinstance(part, slice):
        return [range(shape[dim])[part]]
    if isinstance(part, np.ndarray) and part.dtype == bool:
        if part.shape != shape[dim : dim + part.ndim]:
            covered = list(shape[dim : dim + part.ndim])
            raise IndexError(f"a mask of shape {list(part.shape)} does not fit dims of shape {covered}")
        return [*part.nonzero()]
    size = shape[dim]
    if isinstance(part, np.ndarray):
        for position in (int(part.min()), int(part.max())) if part.size else ():
            _check_position(position, size, dim)
        array = part.astype(np.intp)
        return [np.where(array < 0, array + size, array)]
    if isinstance(part, bool) or not hasattr(part, "__index__"):
        kinds = "integers, slices, an ellipsis, arrays of integers and masks"
        raise IndexError(f"only {kinds} index a stored tensor, not {type(part).__name__}")
    return [_check_position(part.__index__(), size, dim)]


def _check_position(position: int, size: int, dim: int) -> int:
    """``position`` counted from the front. Raises IndexError."""
    if not -size <= position < size:
        raise IndexError(f"index {position} is out of bounds for dim {dim} of size {size}")
    return position % size


def _find_bounding_range(part: _DimIndex) -> range:
    """The smallest interval that holds the positions."""
    if isinstance(part, int):
        return range(part, part + 1)
    if not len(part) or (isinstance(part, np.ndarray) and not part.size):
        return range(0)
    if isinstance(part, range):
        return range(min(part[0], part[-1]), max(part[0], part[-1]) + 1)
    return range(int(part.min()), int(part.max()) + 1)


def _make_local_index(part: _DimIndex) -> Any:
    """The positions as an index into the smallest interval; a negative step starts at its end."""
    if isinstance(part, int):
        return 0
    return slice(None, None, part.step) if isinstance(part, range) else part - _find_bounding_range(part).start


def _make_box(spans: Sequence[range]) -> Box:
    return Box(tuple(span.start for span in spans), tuple(span.stop for span in spans))

"""An index of numpy as the boxes of a tensor to read and an index into what was read. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckpt_tools.core.boxes import Box, Shape


@dataclass(frozen=True, slots=True)
class Selection:
    """The elements that an index of numpy means: ``boxes`` to read one after the other, ``shape`` of the array
    that they make, and ``inside``, the index of the elements in it."""

    boxes: tuple[Box, ...]
    shape: Shape
    inside: tuple[Any, ...]


def selection(index: Any, shape: Shape) -> Selection:
    """``index`` of a tensor of ``shape``: integers, slices, an ellipsis, arrays of integers and masks.

    Of the first dim that is not indexed by an integer, only the rows that an array names are in the boxes, and those
    that follow each other as one box. Of every other dim it is the smallest interval.

    Raises:
        IndexError: as numpy does; also for ``None`` and a single ``True`` or ``False``.
    """
    parts = _parts(index, shape)
    spans, inside = [_span(part) for part in parts], [_inside(part) for part in parts]
    axis = next((dim for dim, part in enumerate(parts) if not isinstance(part, int)), len(parts))
    rows = parts[axis] if axis < len(parts) else None
    runs = spans[axis : axis + 1]
    if isinstance(rows, np.ndarray) and rows.size:
        unique, inverse = np.unique(rows, return_inverse=True)
        runs, inside[axis] = _runs(unique), inverse.reshape(rows.shape)
    boxes = tuple(_box([*spans[:axis], run, *spans[axis + 1 :]]) for run in runs) or (_box(spans),)
    extents = list(boxes[0].shape)
    extents[axis : axis + 1] = [sum(map(len, runs))] if runs else []
    # Without dims, only an ellipsis gives an array.
    return Selection(boxes, tuple(extents), (*inside, ...))


_Part = range | int | NDArray[np.intp]
"""The positions that are wanted of one dim; an integer takes the dim away."""


def _parts(index: Any, shape: Shape) -> list[_Part]:
    given = [_array(part) for part in (index if isinstance(index, tuple) else (index,))]
    gaps = [position for position, part in enumerate(given) if part is Ellipsis]
    if len(gaps) > 1:
        raise IndexError("an index can only have a single ellipsis")
    at = gaps[0] if gaps else len(given)
    missing = len(shape) - sum(_num_dims(part) for part in given)
    if missing < 0:
        raise IndexError(f"{len(shape) - missing} indices for a tensor of {len(shape)} dims")
    given[at : at + 1] = [slice(None)] * missing
    found: list[_Part] = []
    for part in given:
        found += _positions(part, shape, len(found))
    return found


def _array(part: Any) -> Any:
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


def _num_dims(part: Any) -> int:
    if part is Ellipsis:
        return 0
    return part.ndim if isinstance(part, np.ndarray) and part.dtype == bool else 1


def _positions(part: Any, shape: Shape, dim: int) -> list[_Part]:
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
            _check(position, size, dim)
        array = part.astype(np.intp)
        return [np.where(array < 0, array + size, array)]
    if isinstance(part, bool) or not hasattr(part, "__index__"):
        kinds = "integers, slices, an ellipsis, arrays of integers and masks"
        raise IndexError(f"only {kinds} index a stored tensor, not {type(part).__name__}")
    return [_check(part.__index__(), size, dim)]


def _check(position: int, size: int, dim: int) -> int:
    """``position`` counted from the front. Raises IndexError."""
    if not -size <= position < size:
        raise IndexError(f"index {position} is out of bounds for dim {dim} of size {size}")
    return position % size


def _span(part: _Part) -> range:
    """The smallest interval that holds the positions."""
    if isinstance(part, int):
        return range(part, part + 1)
    if not len(part) or (isinstance(part, np.ndarray) and not part.size):
        return range(0)
    if isinstance(part, range):
        return range(min(part[0], part[-1]), max(part[0], part[-1]) + 1)
    return range(int(part.min()), int(part.max()) + 1)


def _inside(part: _Part) -> Any:
    """The positions as an index into the smallest interval; a negative step starts at its end."""
    if isinstance(part, int):
        return 0
    return slice(None, None, part.step) if isinstance(part, range) else part - _span(part).start


def _runs(rows: NDArray[np.intp]) -> list[range]:
    """Sorted rows as intervals."""
    gaps = np.flatnonzero(np.diff(rows) != 1)
    return list(map(range, rows[[0, *(gaps + 1)]].tolist(), (rows[[*gaps, -1]] + 1).tolist()))


def _box(spans: Sequence[range]) -> Box:
    return Box(tuple(span.start for span in spans), tuple(span.stop for span in spans))

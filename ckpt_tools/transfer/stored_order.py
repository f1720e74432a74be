"""Hits on items whose bytes are stored in another order than row-major, such as transposed tensors. Pure: no store."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ckpt_tools.core.boxes import Shape, contiguous_strides, interval_to_boxes
from ckpt_tools.errors import MalformedError
from ckpt_tools.planning.hits import BoxHit, FlatHit, Hit

if TYPE_CHECKING:
    from ckpt_tools.serialization.torch_zip import ItemLocation


def to_stored_order_hits(hit: Hit, location: ItemLocation) -> Iterator[BoxHit]:
    """A hit on an item whose bytes are not row-major, as hits that count its elements as they are stored."""
    if isinstance(hit, FlatHit):
        destination_start = hit.destination_start
        for box in interval_to_boxes(hit.start, hit.stop, location.shape):
            start, strides = _flat_offset(box.start, location.strides), contiguous_strides(box.shape)
            geometry = (box.shape, start, location.strides, destination_start, strides)
            yield BoxHit(hit.at, hit.framing, hit.dtype, hit.numel, *geometry)
            destination_start += box.numel
        return
    if hit.shape not in (None, location.shape):
        raise MalformedError(
            f"the item at byte {hit.at.start:,} holds {list(location.shape)} but its index states "
            f"{list(hit.shape or ())}",
            path=hit.at.file,
        )
    yield from _split_into_uniform_steps(hit, location)


def _split_into_uniform_steps(hit: BoxHit, location: ItemLocation) -> Iterator[BoxHit]:
    """Hits with the strides of the item's own order that together are ``hit``."""
    # The strides of a hit count elements in row-major order of the item. Along one dim of the hit, such a step is one
    # step of the item's index (``unravel_index`` of the stride), as long as no index leaves its extent. If one does,
    # the hit is cut at every index of that dim, and each part is tried again.
    first = np.unravel_index(hit.start, location.shape)
    strides = [stride if extent > 1 else 0 for stride, extent in zip(hit.strides, hit.extents, strict=True)]
    item_steps = [np.unravel_index(stride, location.shape) for stride in strides]
    for dim, (extent, step) in enumerate(zip(hit.extents, item_steps, strict=True)):
        last_index = [at + (extent - 1) * by for at, by in zip(first, step, strict=True)]
        if any(at >= size for at, size in zip(last_index, location.shape, strict=True)):
            yield from (
                part
                for index in range(extent)
                for part in _split_into_uniform_steps(_hit_at_index(hit, dim, index), location)
            )
            return
        first = tuple(last_index)
    start = _flat_offset(np.unravel_index(hit.start, location.shape), location.strides)
    yield replace(hit, start=start, strides=tuple(_flat_offset(step, location.strides) for step in item_steps))


def _hit_at_index(hit: BoxHit, dim: int, index: int) -> BoxHit:
    """The part of a hit at one index of a dim."""
    return replace(
        hit,
        extents=(*hit.extents[:dim], 1, *hit.extents[dim + 1 :]),
        start=hit.start + index * hit.strides[dim],
        destination_start=hit.destination_start + index * hit.destination_strides[dim],
    )


def _flat_offset(index: Iterable[Any], strides: Shape) -> int:
    return sum(int(at) * stride for at, stride in zip(index, strides, strict=True))

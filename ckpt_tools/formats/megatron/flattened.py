"""Tensors as megatron-core up to 0.14 stored optimizer state: flattened, and cut by data parallel ranks. Pure geometry.

A tensor of shape ``[X, Y]`` in pieces of ``[x, y]`` was stored as one of ``[X / x, Y / y, x * y]``: the first axes say
which piece, the last one runs through its elements, and each rank wrote an interval of it (megatron-core 0.12,
strategies/torch.py, ``sharded_tensor_to_torch_sharded_tensor``). ``mcore_data`` in the index has the shape ``[X, Y]``.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import prod

from ckpt_tools.core.boxes import Box, Shape, from_flat
from ckpt_tools.errors import MalformedError


def piece_shape(stored: Shape, shape: Shape) -> Shape:
    """``[x, y]`` of a tensor of ``shape`` that is stored as ``stored``. Raises MalformedError."""
    pairs = list(zip(stored[:-1], shape, strict=False))
    fits = len(stored) == len(shape) + 1 and all(count and not size % count for count, size in pairs)
    piece = tuple(size // count for count, size in pairs) if fits else ()
    if not fits or prod(piece) != stored[-1]:
        raise MalformedError(f"a tensor of shape {list(shape)} cannot be stored as {list(stored)}")
    return piece


def boxes(stored: Box, piece: Shape) -> Iterator[tuple[Box, int]]:
    """The boxes of the tensor that the box ``stored`` of its stored form holds, each with the position of its first
    element among those of ``stored``."""
    at = 0
    for cell in product(*map(range, stored.start[:-1], stored.stop[:-1])):
        origin = tuple(index * size for index, size in zip(cell, piece, strict=True))
        for box in from_flat(stored.start[-1], stored.stop[-1], piece):
            yield box.shift(origin), at
            at += box.numel

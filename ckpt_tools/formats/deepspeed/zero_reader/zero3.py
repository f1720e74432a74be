"""Stage 3: each parameter is cut evenly, and a rank concatenates its cuts.

stage3.py: a rank's cut is ``ceil(numel / world size)`` elements, padded at its end; ``fp32_flat_groups`` has one vector
a sub-group, and ``param_shapes`` lists the parameters in the same order. Cuts are laid along all the vectors of a rank
one after the other, as zero_to_fp32.py does (``GatheredTensor``), so that a cut may straddle two of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import numpy as np

from ckpt_tools.core.boxes import Shape
from ckpt_tools.core.shards import Ints
from ckpt_tools.errors import MalformedError
from ckpt_tools.formats.deepspeed.zero_reader.flat import Flats, Pieces


def share(numel: int, world_size: int) -> int:
    """Elements of a parameter on each rank, padding included."""
    return -(-numel // world_size)


def locate(param_shapes: Sequence[Mapping[str, Shape]], masters: Flats) -> dict[str, Pieces]:
    """The pieces of every parameter that has elements.

    Raises:
        MalformedError: the partitions are not those of these parameters.
    """
    world_size = len(masters.files)
    bounds = np.concatenate([[0], np.cumsum(masters.numels[0])])
    _check_sizes(masters, sum(share(prod(s), world_size) for group in param_shapes for s in group.values()))
    found: dict[str, Pieces] = {}
    cursor = 0
    for shapes in param_shapes:
        for name, shape in shapes.items():
            if prod(shape):
                found[name] = pieces(cursor, prod(shape), world_size, bounds)
            cursor += share(prod(shape), world_size)
    return found


def _check_sizes(masters: Flats, expected: int) -> None:
    """All ranks hold vectors of the same lengths, together as long as the parameters' cuts."""
    found = int(masters.numels[0].sum())
    if found != expected:
        raise MalformedError(
            f"its partitions have {found:,} elements, but param_shapes states {expected:,}", path=masters.files[0]
        )
    wrong = np.flatnonzero((masters.numels != masters.numels[0]).any(axis=1))
    if len(wrong):
        rank = int(wrong[0])
        lengths = masters.numels[[rank, 0]].tolist()
        raise MalformedError(
            f"its partitions have {lengths[0]} elements, but those of rank 0 have {lengths[1]}",
            path=masters.files[rank],
        )


def pieces(start: int, numel: int, world_size: int, bounds: Ints) -> Pieces:
    """The pieces of a parameter whose cut lies at element ``start`` of each rank's vectors.

    ``bounds`` are where the vectors start and at last end. Ranks that hold nothing but padding are left out.
    """
    cut = share(numel, world_size)
    first = int(np.searchsorted(bounds, start, side="right")) - 1
    last = int(np.searchsorted(bounds, start + cut, side="left"))
    ranks = np.arange(share(numel, cut), dtype=np.int64)
    parts = [_part(ranks, numel, cut, start, bounds, flat) for flat in range(first, last)]
    return Pieces(numel, *(np.concatenate(column) for column in zip(*parts, strict=True)))


def _part(
    ranks: Ints, numel: int, cut: int, start: int, bounds: Ints, flat: int
) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    """What of the cuts lies in one vector: ranks, starts, stops, flats, offsets."""
    lower = max(0, int(bounds[flat]) - start)
    upper = min(cut, int(bounds[flat + 1]) - start)
    starts = ranks * cut + lower
    stops = np.minimum(ranks * cut + upper, numel)
    held = stops > starts
    num_held = int(held.sum())
    offset = start + lower - int(bounds[flat])
    return (
        ranks[held],
        starts[held],
        stops[held],
        np.full(num_held, flat, np.int64),
        np.full(num_held, offset, np.int64),
    )

"""How FSDP2 cuts a tensor over ranks. Pure geometry.

``fully_shard`` places ``Shard(0)``, which cuts dim 0 as ``torch.chunk`` does: ceil(rows / ranks) rows each, fewer for
the last, none for the ranks behind it. DCP lists the empty pieces of these too. All of them start where the tensor
ends, and an item is known by its name and its start, so only one of them is kept.
"""

from __future__ import annotations

from ckpt_tools.core.boxes import Box, Shape


def is_cut(shape: Shape) -> bool:
    """Whether FSDP2 can cut a parameter of ``shape``: it refuses 0-d ones and cannot train empty ones."""
    return bool(shape) and 0 not in shape


def row_chunks(shape: Shape, world_size: int) -> list[Box]:
    """The chunks of a tensor that is cut, chunk r being rank r's; where ranks are left over, the last one is empty."""
    rows = shape[0]
    step = -(-rows // world_size)
    starts = list(range(0, rows, step))
    if len(starts) < world_size:
        starts.append(rows)
    inner, origin = shape[1:], (0,) * (len(shape) - 1)
    return [Box((start, *origin), (min(start + step, rows), *inner)) for start in starts]

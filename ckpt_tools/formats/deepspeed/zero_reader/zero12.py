"""Stages 1 and 2: each param group is one vector, padded at the end and cut evenly.

stage_1_and_2.py: ``flatten_dense_tensors_aligned`` pads a group to a multiple of twice the world size,
``get_data_parallel_partitions`` cuts it, and ``_get_groups_without_padding`` trims the masters, so that the last ranks
may hold less or nothing; the optimizer's slots keep the padding. BF16_Optimizer trims neither.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod

import numpy as np

from ckpt_tools.core.boxes import Shape
from ckpt_tools.core.shards import Ints
from ckpt_tools.errors import MalformedError
from ckpt_tools.formats.deepspeed.zero_reader.flat import Flats, Pieces

ALIGNMENT_FACTOR = 2
"""A partition has a multiple of so many elements: ``nccl_start_alignment_factor``."""


def locate(
    param_shapes: Sequence[Mapping[str, Shape]],
    masters: Flats,
    paddings: Ints,
    alignment_paddings: Sequence[Sequence[int]] | None,
) -> dict[str, Pieces]:
    """The pieces of every parameter that has elements.

    ``paddings`` are ``[world size, num groups]``: elements that a trimmed master lacks. ``alignment_paddings`` are the
    zeros after each parameter.

    Raises:
        MalformedError: the partitions are not those of these parameters.
    """
    num_groups = masters.numels.shape[1]
    if len(param_shapes) != num_groups:
        raise MalformedError(
            f"{num_groups} groups of partitions, but param_shapes has {len(param_shapes)}", path=masters.files[0]
        )
    found: dict[str, Pieces] = {}
    for group, shapes in enumerate(param_shapes):
        found |= locate_group(group, shapes, masters, paddings, alignment_paddings)
    return found


def locate_group(
    group: int,
    shapes: Mapping[str, Shape],
    masters: Flats,
    paddings: Ints,
    alignment_paddings: Sequence[Sequence[int]] | None,
) -> dict[str, Pieces]:
    """The pieces of one group's parameters. Raises MalformedError."""
    partition = partition_size(group, masters, paddings)
    spans = list(_spans(shapes, _gaps(shapes, alignment_paddings, group, masters.files[0])))
    _check_sizes(masters, group, partition, spans[-1][2] if spans else 0)
    return cut_group(group, shapes, partition, alignment_paddings, masters.files[0])


def cut_group(
    group: int,
    shapes: Mapping[str, Shape],
    partition: int,
    alignment_paddings: Sequence[Sequence[int]] | None,
    path: str,
) -> dict[str, Pieces]:
    """The pieces of parameters of which a rank holds ``partition`` elements. Raises MalformedError."""
    gaps = _gaps(shapes, alignment_paddings, group, path)
    spans = _spans(shapes, gaps)
    return {name: _pieces(start, stop, partition, group) for name, start, stop in spans if stop > start}


def partition_size(group: int, masters: Flats, paddings: Ints) -> int:
    """The elements of a partition, padding included."""
    return _most_common(masters.numels[:, group] + paddings[:, group])


def _most_common(numels: Ints) -> int:
    """What most ranks say, so that a message names the rank that differs."""
    found, counts = np.unique(numels, return_counts=True)
    return int(found[np.argmax(counts)])


def _gaps(
    shapes: Mapping[str, Shape], alignment_paddings: Sequence[Sequence[int]] | None, group: int, path: str
) -> Sequence[int]:
    gaps = alignment_paddings[group] if alignment_paddings is not None else [0] * len(shapes)
    if len(gaps) != len(shapes):
        raise MalformedError(f"{len(gaps)} param_alignment_paddings for {len(shapes)} parameters", path=path)
    return gaps


def _spans(shapes: Mapping[str, Shape], gaps: Sequence[int]) -> Iterator[tuple[str, int, int]]:
    """Each parameter's name, start and stop in the flattened group."""
    cursor = 0
    for (name, shape), gap in zip(shapes.items(), gaps, strict=True):
        yield name, cursor, cursor + prod(shape)
        cursor += prod(shape) + gap


def _check_sizes(masters: Flats, group: int, partition: int, numel: int) -> None:
    """Every rank has the elements of its partition, all or without the padding."""
    world_size = len(masters.files)
    surplus = partition * world_size - numel
    if not 0 <= surplus < max(1, ALIGNMENT_FACTOR * world_size):
        raise MalformedError(
            f"group {group} has {world_size} partitions of {partition:,} elements, which do not fit the {numel:,} "
            "of param_shapes",
            path=masters.files[0],
        )
    trimmed = np.clip(numel - np.arange(world_size) * partition, 0, partition)
    saved = masters.numels[:, group]
    wrong = np.flatnonzero((saved != trimmed) & (saved != partition))
    if len(wrong):
        rank = int(wrong[0])
        raise MalformedError(
            f"its partition of group {group} has {int(saved[rank]):,} elements instead of {int(trimmed[rank]):,}",
            path=masters.files[rank],
        )


def _pieces(start: int, stop: int, partition: int, group: int) -> Pieces:
    """The pieces of a parameter at ``[start, stop)`` of a group that is cut every ``partition`` elements."""
    ranks = np.arange(start // partition, -(-stop // partition), dtype=np.int64)
    lower = np.maximum(ranks * partition, start)
    upper = np.minimum((ranks + 1) * partition, stop)
    return Pieces(
        numel=stop - start,
        ranks=ranks,
        starts=lower - start,
        stops=upper - start,
        flats=np.full(len(ranks), group, np.int64),
        offsets=lower - ranks * partition,
    )


def locate_whole(pieces: Mapping[str, Pieces], momentum: Flats) -> dict[str, Pieces]:
    """Where Muon's momentum of each parameter lies: whole, in the vector of every rank that holds a part of the
    parameter. It is read from the first of them.

    ``pieces`` are the parameters' own, in the order of their groups.

    Raises:
        MalformedError: a rank's vector is not as long as the parameters that it should hold.
    """
    ends: dict[tuple[int, int], int] = {}
    found: dict[str, Pieces] = {}
    for name, own in pieces.items():
        flat = int(own.flats[0])
        if flat not in momentum.dtypes:
            continue
        offsets = {rank: ends.get((rank, flat), 0) for rank in own.ranks.tolist()}
        ends |= {(rank, flat): offset + own.numel for rank, offset in offsets.items()}
        first = int(own.ranks[0])
        found[name] = _whole(own.numel, first, flat, offsets[first])
    _check_whole(ends, momentum)
    return found


def _whole(numel: int, rank: int, flat: int, offset: int) -> Pieces:
    columns = ([rank], [0], [numel], [flat], [offset])
    return Pieces(numel, *(np.array(column, np.int64) for column in columns))


def _check_whole(ends: Mapping[tuple[int, int], int], momentum: Flats) -> None:
    for flat in momentum.dtypes:
        for rank, path in enumerate(momentum.files):
            expected, saved = ends.get((rank, flat), 0), int(momentum.numels[rank, flat])
            if expected != saved:
                raise MalformedError(
                    f"its {momentum.name} of group {flat} has {saved:,} elements; the whole parameters of its "
                    f"partition have {expected:,}",
                    path=path,
                )

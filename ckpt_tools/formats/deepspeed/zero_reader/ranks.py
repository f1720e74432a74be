"""The optimizer files of all ranks, reduced to where each of their vectors lies.

Of a rank only numbers are kept: a thousand files of values would be gigabytes. Files are opened one after the other:
parsing holds the interpreter, and eight threads took 1.7 times as long for 256 files on two cores.

What a slot of the optimizer is, its value tells: as long as the masters it is cut with them, a number or a 0-d tensor
belongs to every parameter of the partition, and anything else (the block scales of an 8-bit optimizer) is kept under
its rank, as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ckpt_tools.core.shards import Ints
from ckpt_tools.core.values import StoredTensor, Value, brief
from ckpt_tools.errors import MalformedError
from ckpt_tools.formats.deepspeed.common.files import File, OptimStates
from ckpt_tools.formats.deepspeed.zero_reader.flat import Flats, Vector
from ckpt_tools.stores.source import Source


@dataclass(frozen=True, slots=True)
class RankState:
    """One rank: its masters, its slots by flat, its paddings, and state of other kinds (``file`` is set if any)."""

    masters: dict[int, Vector]
    slots: dict[str, dict[int, Vector]]
    paddings: tuple[int, ...]
    rest: Mapping[int, Mapping[str, Value]]
    file: File | None

    @classmethod
    def of(cls, states: OptimStates) -> RankState:
        slots: dict[str, dict[int, Vector]] = {}
        rest: dict[int, dict[str, Value]] = {}
        for flat, state in enumerate(states.states):
            for slot, value in state.items():
                if _is_flat(value, states.masters[flat].numel, states.paddings[flat]):
                    slots.setdefault(slot, {})[flat] = vector(states.file, value)
                elif value is not None and not is_scalar(value):
                    rest.setdefault(flat, {})[slot] = value
        masters = {flat: vector(states.file, master) for flat, master in enumerate(states.masters)}
        return cls(masters, slots, states.paddings, rest, states.file if rest else None)


def _is_flat(value: Value, numel: int, padding: int) -> bool:
    """Whether a slot is cut as the masters are; it may have the padding that they lack."""
    return (
        isinstance(value, StoredTensor)
        and len(value.shape) == 1
        and value.shape[0] in (numel, numel + padding)
        and value.is_contiguous
    )


def is_scalar(value: Value) -> bool:
    """Whether a slot is one value for all parameters of a partition."""
    return isinstance(value, bool | int | float) or (isinstance(value, StoredTensor) and not value.shape)


def vector(file: File, tensor: StoredTensor) -> Vector:
    return Vector(file.start(tensor), tensor.numel, tensor.dtype)


@dataclass(frozen=True, slots=True)
class Partitions:
    """All ranks: masters and slots as flats, and ``paddings`` ``[world size, num flats]``."""

    masters: Flats
    slots: tuple[Flats, ...]
    paddings: Ints
    rest: tuple[tuple[int, RankState], ...]


def read_partitions(source: Source, paths: Sequence[str], first: OptimStates) -> Partitions:
    """The vectors of every rank; ``first`` is what rank 0 said.

    Raises:
        FormatError: a file is missing or damaged, or does not agree with that of rank 0.
    """
    others = [_read_rank(source, path, first) for path in paths[1:]]
    return _gathered([RankState.of(first), *others], paths, len(first.masters))


def _read_rank(source: Source, path: str, first: OptimStates) -> RankState:
    states = OptimStates.of(File.open(source, path))
    for name in ("stage", "world_size", "is_bf16_optimizer", "alignment_paddings"):
        found, expected = getattr(states, name), getattr(first, name)
        if found != expected:
            raise MalformedError(f"its {name} is {brief(found)} but that of rank 0 is {brief(expected)}", path=path)
    if len(states.masters) != len(first.masters):
        raise MalformedError(f"it has {len(states.masters)} partitions, but rank 0 has {len(first.masters)}", path=path)
    return RankState.of(states)


def _gathered(ranks: Sequence[RankState], paths: Sequence[str], num_flats: int) -> Partitions:
    names = dict.fromkeys(name for rank in ranks for name in rank.slots)
    return Partitions(
        masters=Flats.of("the masters", paths, [rank.masters for rank in ranks], num_flats),
        slots=tuple(Flats.of(name, paths, [rank.slots.get(name, {}) for rank in ranks], num_flats) for name in names),
        paddings=np.array([rank.paddings for rank in ranks], np.int64).reshape(len(ranks), num_flats),
        rest=tuple((number, rank) for number, rank in enumerate(ranks) if rank.rest),
    )

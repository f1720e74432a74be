"""The optimizer files of all ranks, reduced to the places of their vectors.

Of a rank only numbers are kept: a thousand files of values would be gigabytes. Files are opened one after the other:
parsing holds the interpreter, and eight threads took 1.7 times as long for 256 files on two cores.

What a slot of the optimizer is, its value tells: as long as the masters it is cut with them, a number or a 0-d tensor
belongs to every parameter of the partition, and anything else (the block scales of an 8-bit optimizer) is kept under
its rank, as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ckpt_tools.core.shards import Ints
from ckpt_tools.core.step_claims import StepClaim, is_finite_number
from ckpt_tools.core.values import Opaque, StoredTensor, Value, are_naturals, format_brief
from ckpt_tools.errors import MalformedError, UnsupportedError
from ckpt_tools.formats.deepspeed.common.files import MAX_PADDING, File, OptimStates, checked, plain
from ckpt_tools.formats.deepspeed.common.partition import MOMENTUM, is_muon
from ckpt_tools.formats.deepspeed.zero_reader.flat import Flats, Vector
from ckpt_tools.stores.source import Source


@dataclass(frozen=True, slots=True)
class RankState:
    """One rank: its masters, its slots by flat, its paddings, and state of other kinds (``file`` is set if any).

    ``momentum`` is Muon's in stages 1 and 2, whose vectors may hold whole parameters."""

    masters: dict[int, Vector]
    slots: dict[str, dict[int, Vector]]
    momentum: dict[int, Vector]
    paddings: tuple[int, ...]
    rest: Mapping[int, Mapping[str, Value]]
    file: File | None
    steps: tuple[StepClaim, ...]

    @classmethod
    def of(cls, states: OptimStates, source: Source) -> RankState:
        slots: dict[str, dict[int, Vector]] = {}
        momentum: dict[int, Vector] = {}
        rest: dict[int, dict[str, Value]] = {}
        muon = {flat for group in states.groups if is_muon(group.options) for flat in group.flats}
        for flat, state in enumerate(states.states):
            numel = states.masters[flat].numel  # A slot may have the padding that the masters lack.
            for slot, value in state.items():
                if slot == MOMENTUM and flat in muon and states.stage < 3 and _is_vector(value):
                    momentum[flat] = vector(states.file, value)
                elif _is_vector(value) and value.shape[0] - numel in (0, states.paddings[flat]):
                    slots.setdefault(slot, {})[flat] = vector(states.file, value)
                elif value is not None and not is_scalar(value):
                    rest.setdefault(flat, {})[slot] = value
        masters = {flat: vector(states.file, master) for flat, master in enumerate(states.masters)}
        steps = tuple(_claims(states, source))
        return cls(masters, slots, momentum, states.paddings, rest, states.file if rest else None, steps)


def _claims(states: OptimStates, source: Source) -> Iterator[StepClaim]:
    """The step and the learning rate of each group that all ranks cut: the groups of experts are the ranks' own."""
    path, counts = states.file.path, states.partition_counts
    for number, group in enumerate(states.groups):
        flat = next((flat for flat in group.flats if flat < len(states.states)), None)
        if flat is None or counts[flat if flat < len(counts) else 0] < states.world_size:
            continue
        step = states.file.number(source, states.states[flat].get("step", group.options.get("step")))
        for name, value in ((f"step of group {number}", step), (f"lr of group {number}", group.options.get("lr"))):
            if is_finite_number(value):
                yield StepClaim(name, value, path, of_rank=True)


def _is_vector(value: Value) -> bool:
    return isinstance(value, StoredTensor) and len(value.shape) == 1 and value.is_contiguous


def is_scalar(value: Value) -> bool:
    """Whether a slot is one value for all parameters of a partition."""
    return isinstance(value, bool | int | float) or (isinstance(value, StoredTensor) and not value.shape)


def vector(file: File, tensor: StoredTensor) -> Vector:
    return Vector(file.start(tensor), tensor.numel, tensor.dtype)


@dataclass(frozen=True, slots=True)
class Partitions:
    """All ranks: masters and slots as flats, and ``paddings`` ``[world size, num flats]``.

    ``momentum`` has Muon's vectors if they are not cut as the masters are."""

    masters: Flats
    slots: tuple[Flats, ...]
    momentum: Flats
    paddings: Ints
    rest: tuple[tuple[int, RankState], ...]
    steps: tuple[StepClaim, ...]


Visit = Callable[[OptimStates], object]


def read_partitions(
    source: Source, paths: Sequence[str], first: OptimStates, visit: Visit = lambda states: None
) -> Partitions:
    """The vectors of every rank; ``first`` has those of rank 0. ``visit`` sees the states of all ranks in their order.
    Raises FormatError if a file is missing or damaged, or does not agree with that of rank 0."""
    visit(first)
    others = [_read_rank(source, path, first, visit) for path in paths[1:]]
    return _gathered([RankState.of(first, source), *others], paths, len(first.masters))


def _read_rank(source: Source, path: str, first: OptimStates, visit: Visit) -> RankState:
    states = OptimStates.of(File.open(source, path))
    counts, expected_counts = states.partition_counts, first.partition_counts
    if counts != expected_counts and sorted(counts) == sorted(expected_counts):
        raise UnsupportedError(
            "its param groups of experts are in another order than those of rank 0, as DeepSpeed takes them from a "
            "set; set PYTHONHASHSEED=0 for all ranks, load the run and save it",
            path=path,
        )
    for name in ("stage", "partition_counts", "is_bf16_optimizer", "alignment_paddings"):
        found, expected = getattr(states, name), getattr(first, name)
        if found != expected:
            raise MalformedError(
                f"its {name} is {format_brief(found)} but that of rank 0 is {format_brief(expected)}", path=path
            )
    if len(states.masters) != len(first.masters):
        raise MalformedError(f"it has {len(states.masters)} partitions, but rank 0 has {len(first.masters)}", path=path)
    visit(states)
    return RankState.of(states, source)


def _gathered(ranks: Sequence[RankState], paths: Sequence[str], num_flats: int) -> Partitions:
    cut = {flat for flat in range(num_flats) if _is_cut(ranks, flat)}
    slots = [dict(rank.slots) for rank in ranks]
    for rank, own in zip(ranks, slots, strict=True):
        if found := {flat: vector for flat, vector in rank.momentum.items() if flat in cut}:
            own[MOMENTUM] = {**own.get(MOMENTUM, {}), **found}
    whole = [{flat: vector for flat, vector in rank.momentum.items() if flat not in cut} for rank in ranks]
    names = dict.fromkeys(name for own in slots for name in own)
    return Partitions(
        masters=Flats.of("the masters", paths, [rank.masters for rank in ranks], num_flats),
        slots=tuple(Flats.of(name, paths, [own.get(name, {}) for own in slots], num_flats) for name in names),
        momentum=Flats.of(MOMENTUM, paths, whole, num_flats),
        paddings=np.array([rank.paddings for rank in ranks], np.int64).reshape(len(ranks), num_flats),
        rest=tuple((number, rank) for number, rank in enumerate(ranks) if rank.rest),
        steps=tuple(claim for rank in ranks for claim in rank.steps),
    )


def _is_cut(ranks: Sequence[RankState], flat: int) -> bool:
    """Whether Muon's momentum is cut as the masters are, which no single rank can tell: by its padding the vector of
    whole parameters may be as long."""
    found = [(rank.masters[flat].numel + rank.paddings[flat], rank.momentum.get(flat)) for rank in ranks]
    return all(vector is not None and vector.numel == size for size, vector in found)


Mapped = Mapping[str, tuple[int, int]]
"""The number of elements of each parameter of a group on a rank, and their start in the rank's vector."""


def slice_mappings(file: File) -> list[Mapped]:
    """``param_slice_mappings``: the elements of each parameter on the rank, as its file states them."""
    own = checked(file.content, "optimizer_state_dict", dict, file.path)
    found: list[Mapped] = []
    for group in checked(own, "param_slice_mappings", list, file.path):
        if not isinstance(group, dict):
            raise MalformedError("its param_slice_mappings are not dictionaries", path=file.path)
        addresses: dict[str, tuple[int, int]] = {}
        for name, address in group.items():
            if not isinstance(name, str):
                raise MalformedError(f"its param_slice_mappings have the key {format_brief(name)}", path=file.path)
            attributes: Any = plain(address) if isinstance(address, Opaque) else None
            numbers: Any = isinstance(attributes, dict) and [attributes.get(key) for key in ("numel", "start")]
            if not are_naturals(numbers) or max(numbers) > MAX_PADDING:
                raise MalformedError("its param_slice_mappings have no addresses", path=file.path)
            addresses[name] = numbers[0], numbers[1]
        found.append(addresses)
    return found

"""The optimizer files of all ranks, reduced to the places of their vectors.

Of a rank only numbers are kept: a thousand files of values would be gigabytes. Files are opened one after the other:
parsing holds the interpreter, and eight threads took 1.7 times as long for 256 files on two cores.

The value of an optimizer's slot tells what it is: a vector as long as the masters is cut as they are, a number or a 0-d
tensor belongs to every parameter of the partition, and anything else (the block scales of an 8-bit optimizer) is kept
under its rank, as it is.
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
from ckpt_tools.formats.deepspeed.common.files import (
    MAX_PADDING,
    DeepSpeedFile,
    OptimStates,
    require_entry,
    unwrap_attributes,
)
from ckpt_tools.formats.deepspeed.common.partition import MUON_MOMENTUM_SLOT, is_muon
from ckpt_tools.formats.deepspeed.zero_reader.flat import SlotVectors, StoredVector
from ckpt_tools.stores.source import Source


@dataclass(frozen=True, slots=True)
class RankOptimizerState:
    """The vectors of one rank: by flat its masters, and by name and flat its slots. ``paddings`` are by flat.

    ``momentum`` is Muon's in stages 1 and 2, by flat, whose vectors may hold whole parameters. ``other_slots`` is state
    of other kinds by flat and name; ``file``, from which its tensors are read, is None if there is none.
    """

    masters: dict[int, StoredVector]
    slots: dict[str, dict[int, StoredVector]]
    momentum: dict[int, StoredVector]
    paddings: tuple[int, ...]
    other_slots: Mapping[int, Mapping[str, Value]]
    file: DeepSpeedFile | None
    step_claims: tuple[StepClaim, ...]

    @classmethod
    def of(cls, states: OptimStates, source: Source) -> RankOptimizerState:
        slots: dict[str, dict[int, StoredVector]] = {}
        momentum: dict[int, StoredVector] = {}
        other_slots: dict[int, dict[str, Value]] = {}
        muon_flats = {flat for group in states.groups if is_muon(group.options) for flat in group.flats}
        for flat, state in enumerate(states.states):
            numel = states.masters[flat].numel  # A slot may have the padding that the masters lack.
            for slot, value in state.items():
                if slot == MUON_MOMENTUM_SLOT and flat in muon_flats and states.stage < 3 and _is_vector(value):
                    momentum[flat] = locate_vector(states.file, value)
                elif _is_vector(value) and value.shape[0] - numel in (0, states.paddings[flat]):
                    slots.setdefault(slot, {})[flat] = locate_vector(states.file, value)
                elif value is not None and not is_scalar(value):
                    other_slots.setdefault(flat, {})[slot] = value
        masters = {flat: locate_vector(states.file, master) for flat, master in enumerate(states.masters)}
        claims = tuple(_collect_step_claims(states, source))
        file = states.file if other_slots else None
        return cls(masters, slots, momentum, states.paddings, other_slots, file, claims)


def _collect_step_claims(states: OptimStates, source: Source) -> Iterator[StepClaim]:
    """The step and the learning rate of each group that is cut over all ranks. Groups of experts, which are cut over
    fewer, may differ from rank to rank."""
    path, counts = states.file.path, states.partition_counts
    for number, group in enumerate(states.groups):
        flat = next((flat for flat in group.flats if flat < len(states.states)), None)
        if flat is None or counts[flat if flat < len(counts) else 0] < states.world_size:
            continue
        step = states.file.read_number(source, states.states[flat].get("step", group.options.get("step")))
        for name, value in ((f"step of group {number}", step), (f"lr of group {number}", group.options.get("lr"))):
            if is_finite_number(value):
                yield StepClaim(name, value, path, of_rank=True)


def _is_vector(value: Value) -> bool:
    return isinstance(value, StoredTensor) and len(value.shape) == 1 and value.is_contiguous


def is_scalar(value: Value) -> bool:
    """Whether a slot is a number or a 0-d tensor, one value for all parameters of a partition."""
    return isinstance(value, bool | int | float) or (isinstance(value, StoredTensor) and not value.shape)


def locate_vector(file: DeepSpeedFile, tensor: StoredTensor) -> StoredVector:
    return StoredVector(file.find_start_byte(tensor), tensor.numel, tensor.dtype)


@dataclass(frozen=True, slots=True)
class RankPartitions:
    """The vectors of all ranks. ``paddings`` are ``[world size, num flats]``.

    ``momentum`` has Muon's vectors of whole parameters; those that are cut as the masters are one of ``slots``.
    ``other_slots`` has the number and state of each rank that has some of another kind.
    """

    masters: SlotVectors
    slots: tuple[SlotVectors, ...]
    momentum: SlotVectors
    paddings: Ints
    other_slots: tuple[tuple[int, RankOptimizerState], ...]
    step_claims: tuple[StepClaim, ...]


StatesCallback = Callable[[OptimStates], object]


def read_partitions(
    source: Source, paths: Sequence[str], first_states: OptimStates, on_states: StatesCallback = lambda states: None
) -> RankPartitions:
    """The vectors of every rank. ``paths`` are the optimizer's files in the order of ranks; ``first_states`` is the
    content of the first. ``on_states`` is called with the content of each. Raises FormatError if a file is missing or
    damaged, or does not agree with that of rank 0."""
    on_states(first_states)
    other_ranks = [_read_rank(source, path, first_states, on_states) for path in paths[1:]]
    ranks = [RankOptimizerState.of(first_states, source), *other_ranks]
    return _gather_partitions(ranks, paths, len(first_states.masters))


def _read_rank(source: Source, path: str, first: OptimStates, on_states: StatesCallback) -> RankOptimizerState:
    states = OptimStates.of(DeepSpeedFile.open(source, path))
    counts, expected_counts = states.partition_counts, first.partition_counts
    if counts != expected_counts and sorted(counts) == sorted(expected_counts):
        raise UnsupportedError(
            "its param groups of experts are in another order than those of rank 0, as DeepSpeed takes them from a "
            "set; set PYTHONHASHSEED=0 for all ranks, load the run and save it",
            path=path,
        )
    for name in ("stage", "partition_counts", "is_bf16_optimizer", "alignment_paddings"):
        value, expected = getattr(states, name), getattr(first, name)
        if value != expected:
            why = f"its {name} is {format_brief(value)} but that of rank 0 is {format_brief(expected)}"
            raise MalformedError(why, path=path)
    if len(states.masters) != len(first.masters):
        why = f"it has {len(states.masters)} partitions, but rank 0 has {len(first.masters)}"
        raise MalformedError(why, path=path)
    on_states(states)
    return RankOptimizerState.of(states, source)


def _gather_partitions(ranks: Sequence[RankOptimizerState], paths: Sequence[str], num_flats: int) -> RankPartitions:
    cut_flats = {flat for flat in range(num_flats) if _is_momentum_partitioned(ranks, flat)}
    rank_slots = [dict(rank.slots) for rank in ranks]
    for rank, own_slots in zip(ranks, rank_slots, strict=True):
        if found := {flat: vector for flat, vector in rank.momentum.items() if flat in cut_flats}:
            own_slots[MUON_MOMENTUM_SLOT] = {**own_slots.get(MUON_MOMENTUM_SLOT, {}), **found}
    whole_momentum = [{f: vector for f, vector in rank.momentum.items() if f not in cut_flats} for rank in ranks]
    slot_names = dict.fromkeys(name for own in rank_slots for name in own)
    return RankPartitions(
        masters=SlotVectors.of("the masters", paths, [rank.masters for rank in ranks], num_flats),
        slots=tuple(
            SlotVectors.of(name, paths, [own.get(name, {}) for own in rank_slots], num_flats) for name in slot_names
        ),
        momentum=SlotVectors.of(MUON_MOMENTUM_SLOT, paths, whole_momentum, num_flats),
        paddings=np.array([rank.paddings for rank in ranks], np.int64).reshape(len(ranks), num_flats),
        other_slots=tuple((number, rank) for number, rank in enumerate(ranks) if rank.other_slots),
        step_claims=tuple(claim for rank in ranks for claim in rank.step_claims),
    )


def _is_momentum_partitioned(ranks: Sequence[RankOptimizerState], flat: int) -> bool:
    """Whether Muon's momentum is cut as the masters are: on every rank it is as long as the padded partition. On a
    single rank, a vector of whole parameters may by chance be as long."""
    partition_numels = [rank.masters[flat].numel + rank.paddings[flat] for rank in ranks]
    momentum_numels = [rank.momentum[flat].numel if flat in rank.momentum else None for rank in ranks]
    return momentum_numels == partition_numels


SliceMapping = Mapping[str, tuple[int, int]]
"""Of each parameter of a group, by name, the number of its elements on a rank and their start in the rank's vector."""


def read_slice_mappings(file: DeepSpeedFile) -> list[SliceMapping]:
    """``param_slice_mappings`` of a rank's file, one mapping a group."""
    state_dict = require_entry(file.content, "optimizer_state_dict", dict, file.path)
    mappings: list[SliceMapping] = []
    for group in require_entry(state_dict, "param_slice_mappings", list, file.path):
        if not isinstance(group, dict):
            raise MalformedError("its param_slice_mappings are not dictionaries", path=file.path)
        addresses: dict[str, tuple[int, int]] = {}
        for name, address in group.items():
            if not isinstance(name, str):
                raise MalformedError(f"its param_slice_mappings have the key {format_brief(name)}", path=file.path)
            attributes: Any = unwrap_attributes(address) if isinstance(address, Opaque) else None
            numel_and_start: Any = isinstance(attributes, dict) and [attributes.get(key) for key in ("numel", "start")]
            if not are_naturals(numel_and_start) or max(numel_and_start) > MAX_PADDING:
                raise MalformedError("its param_slice_mappings have no addresses", path=file.path)
            addresses[name] = numel_and_start[0], numel_and_start[1]
        mappings.append(addresses)
    return mappings

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

import numpy as np

from ckpt_tools.core.shards import Ints
from ckpt_tools.core.step_claims import StepClaim, is_finite_number
from ckpt_tools.core.values import StoredTensor, Value, format_brief
from ckpt_tools.errors import IncompleteError, MalformedError, UnsupportedError
from ckpt_tools.formats.deepspeed.common.files import DeepSpeedFile, ModelStates, OptimStates
from ckpt_tools.formats.deepspeed.common.model_file import check_experts
from ckpt_tools.formats.deepspeed.common.partition import MUON_MOMENTUM_SLOT, is_muon
from ckpt_tools.formats.deepspeed.names import replace_rank
from ckpt_tools.formats.deepspeed.zero_reader.placements import RankVectors, SlotVectors, StoredVector
from ckpt_tools.formats.deepspeed.zero_reader.tag_files import TagFiles
from ckpt_tools.messages.wording import format_count
from ckpt_tools.stores.source import Source


@dataclass(frozen=True, slots=True)
class OtherState:
    """State of ``rank`` of other kinds than vectors and numbers, by flat and name; its tensors are in ``file``."""

    rank: int
    file: DeepSpeedFile
    slots: Mapping[int, Mapping[str, Value]]


@dataclass(frozen=True, slots=True)
class RankPartitions:
    """The vectors of all ranks. ``paddings`` are ``[world size, num flats]``.

    ``momentum`` has Muon's vectors of whole parameters; those that are cut as the masters are one of ``slots``.
    """

    masters: SlotVectors
    slots: tuple[SlotVectors, ...]
    momentum: SlotVectors
    paddings: Ints
    other_states: tuple[OtherState, ...]
    step_claims: tuple[StepClaim, ...]


StatesCallback = Callable[[OptimStates], object]


def read_partitions(
    source: Source, paths: Sequence[str], first_states: OptimStates, on_states: StatesCallback = lambda states: None
) -> RankPartitions:
    """The vectors of every rank. ``paths`` are the optimizer's files in the order of ranks; ``first_states`` is the
    content of the first. ``on_states`` is called with the content of each. Raises FormatError if a file is missing or
    damaged, or does not agree with that of rank 0."""
    num_flats = len(first_states.masters)
    masters: RankVectors = {}
    slots: dict[str, RankVectors] = {}
    momentum: RankVectors = {}
    paddings: list[tuple[int, ...]] = []
    other_states: list[OtherState] = []
    step_claims: list[StepClaim] = []

    def open_states(source: Source, path: str) -> tuple[OptimStates, list[StepClaim]]:
        is_first = path == first_states.file.path
        states = first_states if is_first else OptimStates.of(DeepSpeedFile.open(source, path))
        _check_agreement(states, first_states)
        return states, list(_collect_step_claims(states, source))

    for rank, (states, rank_claims) in enumerate(source.map_files(open_states, paths)):
        on_states(states)
        masters |= {(rank, flat): locate_vector(states.file, master) for flat, master in enumerate(states.masters)}
        muon_flats = {flat for group in states.groups if is_muon(group.options) for flat in group.flats}
        other_slots: dict[int, dict[str, Value]] = {}
        for flat, state in enumerate(states.states):
            numel = states.masters[flat].numel  # A slot may have the padding that the masters lack.
            for slot, value in state.items():
                if slot == MUON_MOMENTUM_SLOT and flat in muon_flats and states.stage < 3 and _is_vector(value):
                    momentum[rank, flat] = locate_vector(states.file, value)
                elif _is_vector(value) and value.shape[0] - numel in (0, states.paddings[flat]):
                    slots.setdefault(slot, {})[rank, flat] = locate_vector(states.file, value)
                elif value is not None and not is_scalar(value):
                    other_slots.setdefault(flat, {})[slot] = value
        other_states += [OtherState(rank, states.file, other_slots)] if other_slots else []
        paddings.append(states.paddings)
        step_claims += rank_claims
    padding_table = np.array(paddings, np.int64).reshape(len(paths), num_flats)
    master_vectors = SlotVectors.of("the masters", paths, masters, num_flats)
    # Muon's momentum may be cut as the masters are: on every rank it is as long as the padded partition. On a single
    # rank, a vector of whole parameters may by chance be as long.
    momentum_vectors = SlotVectors.of(MUON_MOMENTUM_SLOT, paths, momentum, num_flats)
    is_cut = (momentum_vectors.numels == master_vectors.numels + padding_table).all(axis=0)
    cut_momentum = {place: vector for place, vector in momentum.items() if is_cut[place[1]]}
    if cut_momentum:
        slots.setdefault(MUON_MOMENTUM_SLOT, {}).update(cut_momentum)
    whole_momentum = {place: vector for place, vector in momentum.items() if place not in cut_momentum}
    return RankPartitions(
        masters=master_vectors,
        slots=tuple(SlotVectors.of(name, paths, vectors, num_flats) for name, vectors in slots.items()),
        momentum=SlotVectors.of(MUON_MOMENTUM_SLOT, paths, whole_momentum, num_flats),
        paddings=padding_table,
        other_states=tuple(other_states),
        step_claims=tuple(step_claims),
    )


def _check_agreement(states: OptimStates, first: OptimStates) -> None:
    """Raises FormatError if the optimizer's file of a rank does not agree with that of rank 0."""
    path, counts, expected_counts = states.file.path, states.partition_counts, first.partition_counts
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


# Checks that all ranks are there, and that the run is of a kind that is read

PARTITION_GROUPS_ENTRY = "ds_zero_partition_groups"
"""Entry of an optimizer's file in stage 3: for each sub-group the ranks over which it is cut, if experts are."""


def check_file_count(paths: Sequence[str], world_size: int) -> None:
    """Raises IncompleteError if a rank has no file, MalformedError where there are more files than ranks."""
    if len(paths) < world_size:
        missing = replace_rank(paths[0], len(paths))
        raise IncompleteError(f"the file of this rank, one of {world_size}, is missing", path=missing)
    if len(paths) > world_size:
        raise MalformedError(
            f"the checkpoint is of {format_count(world_size, 'rank')}; this file is of another one, perhaps from an "
            "earlier save",
            path=paths[world_size],
        )


def check_rank_count(paths: tuple[str, ...], optim: OptimStates) -> None:
    """Raises FormatError if ``paths`` are not one file a rank, or if the optimizer is of a run with experts."""
    if len(set(optim.partition_counts)) > 1:
        raise IncompleteError(
            "its param groups are cut into different numbers of partitions, as those of experts are, and there are no "
            "files of experts (layer_0_expert_0_mp_rank_00_model_states.pt) beside it",
            path=optim.file.path,
        )
    check_file_count(paths, optim.world_size)


def check_model_file(model: ModelStates, optim: OptimStates) -> None:
    """Raises FormatError if the run has experts that are not in the files, or if model and optimizer differ in the
    number of ranks."""
    check_experts(model)
    if optim.state_dict.get(PARTITION_GROUPS_ENTRY) is not None:
        raise UnsupportedError(
            "its experts are partitioned over groups of their own (AutoEP), and the model's file has no "
            "ds_autoep_layers",
            path=optim.file.path,
        )
    world_size = model.file.content.get("dp_world_size", optim.world_size)
    if world_size != optim.world_size:
        raise MalformedError(
            f"its dp_world_size is {format_brief(world_size)}, but that of the optimizer is {optim.world_size}",
            path=model.file.path,
        )


def check_expert_run(files: TagFiles, model: ModelStates, optim: OptimStates) -> None:
    """Checks a run with experts. Raises FormatError if the optimizer's files are not those of all ranks, or if the
    optimizer is one that is not read for such a run."""
    world_size, path = model.file.content.get("dp_world_size"), model.file.path
    if type(world_size) is not int or not 0 < world_size <= 1 << 24:
        raise MalformedError("it does not state the number of ranks (dp_world_size)", path=path)
    check_file_count(files.optim_paths, world_size)
    if len(optim.partition_counts) != len(optim.masters) or any(world_size % n for n in optim.partition_counts):
        raise MalformedError(
            f"its partition_count is {list(optim.partition_counts)}, but the run has "
            f"{format_count(world_size, 'rank')}",
            path=optim.file.path,
        )
    if any(is_muon(group.options) for group in optim.groups):
        raise UnsupportedError("it is of a run with experts and Muon, which is not supported", path=optim.file.path)

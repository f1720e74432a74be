"""Limits of DeepSpeed's loader of universal checkpoints, and the native targets that do not have them.

Read in DeepSpeed 0.19.8 and seen in runs; docs/formats/universal.md lists them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.manifest import TensorEntry
from ckpt_tools.core.notes import Note, Outcome
from ckpt_tools.errors import UnsupportedError
from ckpt_tools.formats.deepspeed.common.partition import MUON_MOMENTUM_SLOT, is_muon
from ckpt_tools.formats.deepspeed.common.pickled_objects import DEFAULT_SCALER_TEXT
from ckpt_tools.formats.deepspeed.common.training_state import TrainingGroup, TrainingState, make_note
from ckpt_tools.formats.deepspeed.common.written_extras import DeepSpeedExtras, PartitionSettings
from ckpt_tools.formats.deepspeed.names import UNIVERSAL_MASTER_SLOT, split_expert_name
from ckpt_tools.messages.wording import format_count

STEP_SLOT = "step"

STAGE3_SLOTS = ("exp_avg", "exp_avg_sq")
"""Slots that stage 3 opens beside the masters, stage3.py ``load_hp_checkpoint_state_from_checkpoint_dir_stage3``."""

MAX_ELEMENTS_OF_ONE_RANK = 2
"""A group of so few elements is on the first rank at any world size, since partitions have at least two elements; the
others have none of it and fail, base_optimizer.py ``load_hp_checkpoint_state_from_checkpoint_dir``: ``steps[0]``."""


def drop_unportable_state(groups: Sequence[TrainingGroup]) -> tuple[TrainingGroup, ...]:
    """``groups``, without the state of those that have some which cannot be a file of ``zero/<fqn>/``, and with notes
    on that.

    Such a file has as many elements as its parameter, and is copied into float32. A group keeps all of its state or
    none, because an optimizer that finds a part takes it for all. Raises UnsupportedError if a slot has the name of the
    master's file.
    """
    portable_groups = list(groups)
    for number, group in enumerate(groups):
        if slot_names := _list_unportable_slots(group):
            why = f"a universal checkpoint cannot hold {', '.join(slot_names)}; zero1, zero2 and zero3 do"
            note = Note(Outcome.DROPPED, f"optimizer state of parameter group {number}", why)
            portable_groups[number] = replace(group, slots=(), scalars={}, notes=(note,))
    return tuple(portable_groups)


def _list_unportable_slots(group: TrainingGroup) -> list[str]:
    """Slots that cannot be a file: 0-d ones other than ``step``, those that are not float32, and Muon's momentum."""
    for slot in (*group.scalars, *(slot.name for slot in group.slots)):
        if slot == UNIVERSAL_MASTER_SLOT or "/" in slot:
            raise UnsupportedError(
                f"the optimizer has a slot named {slot!r}, which is the name of another file of a universal checkpoint"
            )
    scalars = [slot for slot in group.scalars if slot != STEP_SLOT]
    muon_slots = (MUON_MOMENTUM_SLOT,) if is_muon(group.options) else ()
    return scalars + [slot.name for slot in group.slots if slot.dtype is not DType.FLOAT32 or slot.name in muon_slots]


def select_shared_options(groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The hyperparameters that are equal in all groups: stage 3 sets every group to the same ones.

    DeepSpeed's own files make it give all groups the first one's, weight decay and learning rate included.
    """
    first, *others = groups
    return {
        name: value
        for name, value in first.items()
        if all(name in group and type(group[name]) is type(value) and group[name] == value for group in others)
    }


def correct_scaler_notes(notes: Iterable[Note]) -> Iterator[Note]:
    """``notes`` of ``DeepSpeedExtras``, with that on a new loss scaler corrected: a native checkpoint needs one, but
    here the job keeps its own."""
    for note in notes:
        if note.what == "loss_scaler" and note.outcome is Outcome.DEFAULTED:
            why = note.why.replace(DEFAULT_SCALER_TEXT, "the job keeps its own")
            note = replace(note, outcome=Outcome.MISSING, why=why)
        yield note


def make_loader_notes(state: TrainingState, extras: DeepSpeedExtras) -> Iterator[Note]:
    """Notes for the job that loads the checkpoint."""
    yield from _note_not_loaded("buffer", "buffers", state.buffers.values())
    without_state = [entry for entry in state.frozen.values() if entry.numel]
    more = "without optimizer state (frozen, or tied to others)"
    yield from _note_not_loaded(f"parameter {more}", f"parameters {more}", without_state)
    yield from _note_slots_in_stage3(state.groups)
    yield from _note_groups_in_stage3(state, extras)
    yield from _note_groups_in_stages_1_and_2(state.groups)
    if any(split_expert_name(name) for group in state.groups for name in group.params):
        why = (
            "they have their numbers among all ranks; load it in stage 1 or 2, with ep_size=1 or in a model of the "
            "same names without deepspeed.moe; DeepSpeed stops if it has more expert-parallel ranks, and in stage 3, "
            "for which zero3 is"
        )
        yield Note(Outcome.KEPT, "experts", why)


def _note_not_loaded(singular: str, plural: str, entries: Collection[TensorEntry]) -> Iterator[Note]:
    if entries:
        why = "load_universal does not restore them; zero1, zero2 and zero3 do"
        yield make_note(Outcome.NOT_LOADED, format_count(len(entries), singular, plural), why, entries)


def _note_slots_in_stage3(groups: Sequence[TrainingGroup]) -> Iterator[Note]:
    what = "optimizer state in stage 3"
    missing_slots = _list_missing_in_stage3(groups)
    other_slots = {slot.name for group in groups for slot in group.slots if slot.name not in STAGE3_SLOTS}
    if missing_slots:
        why = f"it loads Adam's state and nothing else, and fails without {', '.join(missing_slots)}; zero3 loads"
        yield Note(Outcome.KEPT, what, why)
    elif other_slots:
        slots = ", ".join(sorted(other_slots))
        why = f"it does not load {slots}, and the next step fails without it; zero3 restores it"
        yield Note(Outcome.KEPT, what, why)


def _list_missing_in_stage3(groups: Sequence[TrainingGroup]) -> list[str]:
    """The slots without which stage 3 fails and that a group does not have."""
    held_slots = [{*group.scalars, *(slot.name for slot in group.slots)} for group in groups]
    return [slot for slot in (*STAGE3_SLOTS, STEP_SLOT) if not all(slot in names for names in held_slots)]


def _note_groups_in_stage3(state: TrainingState, extras: DeepSpeedExtras) -> Iterator[Note]:
    """Notes on what all groups and sub-groups share in stage 3: hyperparameters, and a step. If the step is a tensor,
    each of them counts the same tensor up."""
    if _list_missing_in_stage3(state.groups):
        return
    sub_group_size = PartitionSettings.of(extras.config, 3, DType.FLOAT32).sub_group_size
    options = [group.options for group in state.groups]
    differing_options = sorted({name for group in options for name in group} - set(select_shared_options(options)))
    # DeepSpeed's own optimizers have plain numbers: each sub-group counts up its own.
    steps = [state.manifest.tensors[group.scalars[STEP_SLOT]] for group in state.groups]
    are_numbers = all(set(entry.shards.files) <= state.manifest.literals.keys() for entry in steps)
    shared_values = [] if are_numbers else ["one step count, which runs ahead"]
    if differing_options:
        names = ", ".join(differing_options)
        shared_values.insert(0, f"the same hyperparameters, so that {names} stay as the job sets them")
    if len(options) > 1 and shared_values:
        why = f"they get {', and '.join(shared_values)}; zero3 restores each group's own"
        yield Note(Outcome.KEPT, f"{len(options)} parameter groups in stage 3", why, len(options))
    elif shared_values and sum(state.groups[0].numels) > sub_group_size:
        why = (
            f"a rank with more than sub_group_size ({sub_group_size:,}) elements cuts them into sub-groups, "
            f"which get {shared_values[0]}; zero3 restores each one's own"
        )
        yield Note(Outcome.KEPT, "the step count in stage 3", why)


def _note_groups_in_stages_1_and_2(groups: Sequence[TrainingGroup]) -> Iterator[Note]:
    for number, group in enumerate(groups):
        numel = sum(group.numels)
        if numel <= MAX_ELEMENTS_OF_ONE_RANK:
            why = (
                "stages 1 and 2 fail on more than one rank, where a rank has none of a group's elements; zero1 and "
                "zero2 load"
            )
            yield Note(Outcome.KEPT, f"parameter group {number} of {numel} elements", why)

"""What DeepSpeed's loader of universal checkpoints cannot restore, and which native target can.

Read in DeepSpeed 0.19.8 and seen in runs; docs/formats/universal.md has each with its place in the source.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckpt_tools.dtypes import DType
from ckpt_tools.errors import UnsupportedError
from ckpt_tools.formats.universal.names import MASTER_FILE
from ckpt_tools.formats.zero_writer.state import Group, TrainingState
from ckpt_tools.ledger import Fate, Note
from ckpt_tools.manifest import TensorEntry

STEP = "step"

STAGE3_SLOTS = ("exp_avg", "exp_avg_sq")
"""What stage 3 opens beside the masters, stage3.py ``load_hp_checkpoint_state_from_checkpoint_dir_stage3``."""

MAX_ELEMENTS_OF_ONE_RANK = 2
"""A group so small lies on the first rank at any world size: its partitions have at least two elements."""


def portable(groups: Sequence[Group]) -> tuple[tuple[Group, ...], tuple[Note, ...]]:
    """The groups without the state that has no form in ``zero/<fqn>/``, and what became of it.

    A file there has to have as many elements as its parameter, and is copied into float32. An optimizer that finds a
    part of its state takes it for the whole, so that a group keeps all of it or nothing.

    Raises:
        UnsupportedError: a slot has the name of the master's file.
    """
    notes, found = [], []
    for number, group in enumerate(groups):
        foreign = _foreign(group)
        if foreign:
            why = f"a universal checkpoint has no form for {', '.join(foreign)}; zero1, zero2 and zero3 do"
            notes.append(Note(Fate.DROPPED, f"optimizer state of parameter group {number}", why))
        found.append(replace(group, slots=(), scalars={}) if foreign else group)
    return tuple(found), tuple(notes)


def _foreign(group: Group) -> list[str]:
    for slot in (*group.scalars, *(slot.name for slot in group.slots)):
        if slot == MASTER_FILE or "/" in slot:
            raise UnsupportedError(f"a slot of the optimizer is called {slot!r}, which names another file here")
    scalars = [slot for slot in group.scalars if slot != STEP]
    return scalars + [slot.name for slot in group.slots if slot.dtype is not DType.FLOAT32]


def stage3_options(groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The hyperparameters that all groups share: stage 3 sets every group to the same ones.

    DeepSpeed's own files make it give all groups the first one's, weight decay and learning rate included.
    """
    first, *others = groups
    return {name: value for name, value in first.items() if all(_same(value, group, name) for group in others)}


def _same(value: Any, group: Mapping[str, Any], name: str) -> bool:
    return name in group and type(group[name]) is type(value) and group[name] == value


def notes_of(state: TrainingState) -> Iterator[Note]:
    """What a job that loads the checkpoint has to know."""
    yield from _untrained("buffers", state.buffers.values())
    yield from _untrained("frozen parameters", [entry for entry in state.frozen.values() if entry.numel])
    yield from _in_stage3(state.groups)
    yield from _tiny_groups(state.groups)


def _untrained(what: str, entries: Iterable[TensorEntry]) -> Iterator[Note]:
    found = list(entries)
    if found:
        why = (
            "they are in the checkpoint, but load_universal leaves them as the job made them; "
            "zero1, zero2 and zero3 restore them"
        )
        yield Note(Fate.DROPPED, f"{len(found)} {what}", why, len(found), sum(entry.num_bytes for entry in found))


def _in_stage3(groups: Sequence[Group]) -> Iterator[Note]:
    """Stages 1 and 2 restore all of this."""
    missing = [slot for slot in (*STAGE3_SLOTS, STEP) if not all(_has(group, slot) for group in groups)]
    others = {slot.name for group in groups for slot in group.slots if slot.name not in STAGE3_SLOTS}
    if missing:
        why = f"stage 3 loads Adam's state only and {', '.join(missing)} is not there: it fails; zero3 loads"
        yield Note(Fate.DEFAULTED, "optimizer state in stage 3", why)
    elif others:
        why = f"stage 3 does not load {', '.join(sorted(others))} and starts it afresh; zero3 restores it"
        yield Note(Fate.DEFAULTED, "optimizer state in stage 3", why)
    if len(groups) > 1 and not missing:
        differing = sorted({name for group in groups for name in group.options} - set(stage3_options(_options(groups))))
        names = ", ".join(differing) or "nothing"
        why = (
            f"stage 3 gives all groups the same hyperparameters, so {names} stay as the job sets them, and one step "
            "count, which then runs ahead; zero3 restores each group's"
        )
        yield Note(Fate.DEFAULTED, f"{len(groups)} parameter groups in stage 3", why, len(groups))


def _options(groups: Sequence[Group]) -> list[Mapping[str, Any]]:
    return [group.options for group in groups]


def _has(group: Group, slot: str) -> bool:
    return slot in group.scalars or any(found.name == slot for found in group.slots)


def _tiny_groups(groups: Sequence[Group]) -> Iterator[Note]:
    """base_optimizer.py ``load_hp_checkpoint_state_from_checkpoint_dir``: ``steps[0]`` of a rank's own parameters."""
    for number, group in enumerate(groups):
        numel = sum(group.numels)
        if numel <= MAX_ELEMENTS_OF_ONE_RANK:
            why = (
                "stages 1 and 2 fail on more than one rank where a rank has none of a group's elements; "
                "zero1 and zero2 load"
            )
            yield Note(Fate.DEFAULTED, f"parameter group {number} of {numel} elements", why)

"""The account of a conversion: each tensor and description of the source is written, or a note names it. Pure.

A tensor goes in one of two steps: an option leaves it out of the manifest, or the writer has no place for it. Each step
says so in a note. What neither step named is a defect of this program, never a loss in silence.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator

from ckpt_tools.core.format_names import DESCRIPTIONS
from ckpt_tools.core.manifest import MASTER, WEIGHT, Manifest, StateKey
from ckpt_tools.core.notes import Note, Outcome
from ckpt_tools.core.value_refs import references
from ckpt_tools.core.wording import listed
from ckpt_tools.errors import CkptError

_BY_NUMBER = re.compile(r"[\d,]+ (?:\S+ )?tensors?(?: .*)?")
"""A note on tensors by their number alone, as selecting some makes it."""


def check_account(
    read: Manifest, made: Manifest, written: Collection[StateKey], notes: Iterable[Note], *, is_mapped: bool
) -> None:
    """Every tensor of ``read`` is in ``made`` under its name or another, every one of ``made`` is ``written``, and
    every description of ``read`` is in ``made``; or ``notes`` name them. ``is_mapped`` says that a recipe or an adapter
    made tensors of others: these check by themselves that each has its place.

    Raises:
        CkptError: an item is neither written nor named.
    """
    gone = [note for note in notes if note.outcome in (Outcome.DROPPED, Outcome.DEFAULTED, Outcome.MISSING)]
    named = [note.what for note in gone]
    missing = [] if is_mapped else [*_left_out(read, made)]
    missing += [key for key in made.tensors if key not in written and not _needs_no_bytes(key, made)]
    entries = {ref.key: str(name) for name, value in read.extra.items() for ref in references(value)} if missing else {}
    lost = [str(key) for key in missing if not _is_named(key, entries.get(key), named)]
    lost = lost[sum(note.count for note in gone if _BY_NUMBER.fullmatch(note.what)) :]
    lost += [name for name in DESCRIPTIONS if name in read.extra and name not in made.extra and name not in named]
    if lost:
        raise CkptError(
            f"a defect of ckpt-tools: {listed(lost)} would be neither written nor named in a note; please report it"
        )


def _needs_no_bytes(key: StateKey, made: Manifest) -> bool:
    """Whether it is a plain number, which is written as a value; or state of a parameter without elements, which some
    frameworks store and others do not."""
    weight = made.tensors.get(StateKey(key.fqn))
    return {*made.tensors[key].shards.files} <= made.literals.keys() or (weight is not None and not weight.numel)


def _left_out(read: Manifest, made: Manifest) -> Iterator[StateKey]:
    """Tensors of ``read`` that are not in ``made``, by name or by the shards that a renamed one keeps."""
    kept = {id(entry.shards) for entry in made.tensors.values()}
    for key, entry in read.tensors.items():
        # Of a parameter's two copies one is written where there is room for one.
        master = read.tensors.get(StateKey(key.fqn, MASTER)) if key.slot == WEIGHT else None
        is_there = key in made.tensors or id(entry.shards) in kept or (master is not None and id(master.shards) in kept)
        if not (is_there or key.slot == MASTER):
            yield key


def _is_named(key: StateKey, entry: str | None, named: Iterable[str]) -> bool:
    """``entry`` is the one that refers to the tensor: it goes with it, and the note begins with its name."""
    return any(
        what in (str(key), key.fqn)
        or what.startswith((f"{key.slot} of ", f"optimizer state of {key.fqn}"))
        or (key.slot != WEIGHT and what.startswith("optimizer state of parameter group"))
        or (entry is not None and what.casefold().startswith(entry.casefold()))
        or f".{key.fqn}.".startswith((f".{what}.", f".client_state.{what}."))
        for what in named
    )

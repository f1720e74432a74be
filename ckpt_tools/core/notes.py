"""Notes: what was cast, defaulted, kept or dropped, so that no loss is silent."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from enum import Enum

from ckpt_tools.messages.showing import DisplayableResult

ABSENT_REASON = "none is taken from the source"
"""Reason for a default: the source has none, or none under names of parameters, or a step before left it out."""

ASSUMED_ORDER_ITEM = "the order of the optimizer's parameters"
"""Item of the note that names were found for numbers by the order of the model."""


class Outcome(Enum):
    """The outcome of one item."""

    CAST = "cast"
    """Written in another element type."""
    DEFAULTED = "defaulted"
    """It is in the output, and it is not the source's: a stated value was used."""
    MERGED = "merged"
    """It is in the output as an adapter changes it."""
    AVERAGED = "averaged"
    """It is in the output as the average of several sources."""
    FILLED = "filled"
    """It is in the output as another checkpoint has it: the source lacks it."""
    KEPT = "kept"
    """It is in the output as the source has it, which may not be what is expected."""
    DROPPED = "dropped"
    """It is not in the output: the target has no place for it, or it was not asked for."""
    MISSING = "missing"
    """It is not in the output, because the source does not have it, and what loads the output may ask for it."""
    NOT_LOADED = "not loaded"
    """It is in the output, and the target's own loader does not restore it."""
    DOUBTFUL = "doubtful"
    """It may be of another save: what the files say of it does not agree."""
    NOT_COMPARED = "not compared"
    """It is in what was compared, and was left out of the comparison."""
    NOT_CHECKED = "not checked"
    """A rule of ``check`` does not apply to it, or nothing tells what it should be."""


@dataclass(frozen=True, slots=True, repr=False)
class Note(DisplayableResult):
    """The outcome of one item, and why. ``asked`` is true if the user chose it; else the target format forced it."""

    outcome: Outcome
    what: str
    why: str
    count: int = 1
    num_bytes: int = 0
    asked: bool = False

    @property
    def is_loss(self) -> bool:
        """Whether ``strict`` forbids it."""
        return self.outcome in (Outcome.DROPPED, Outcome.NOT_LOADED) and not self.asked


def merge_notes(notes: Iterable[Note]) -> tuple[Note, ...]:
    """One note for each item, from notes in the order of the steps that made them.

    The last step that handled an item decides its outcome, because it saw what the steps before it left. A loss that
    the user did not ask for stays a loss.
    """
    note_by_item: dict[str, Note] = {}
    for note in notes:
        previous_note = note_by_item.get(note.what, note)
        if previous_note.outcome is note.outcome and previous_note.why != note.why:
            reasons, is_asked = f"{previous_note.why}; {note.why}", previous_note.asked and note.asked
            note_by_item[note.what] = replace(note, why=reasons, asked=is_asked)
        elif note.is_loss or not previous_note.is_loss:
            note_by_item[note.what] = note
    return tuple(note_by_item.values())


def note_unrelated_files(path: str, count: int = 1) -> Note:
    """Note on a file, or a folder of ``count`` files, that belongs to another checkpoint or to none."""
    return Note(Outcome.DROPPED, path, "not part of this checkpoint", count)


def drop_stale_notes(
    notes: Iterable[Note], items_before: Collection[str], items_after: Collection[str]
) -> tuple[Note, ...]:
    """``notes`` without those on kept items of ``items_before`` that are not among ``items_after``: the step that left
    an item out made its own note."""
    dropped_items = frozenset(items_before) - frozenset(items_after)
    return tuple(note for note in notes if note.outcome is not Outcome.KEPT or note.what not in dropped_items)

"""What became of everything in the source, so that no loss is silent."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from ckpt_tools.core.json_fields import json_of
from ckpt_tools.core.showing import Shown


class Outcome(Enum):
    """What happened to an item on its way."""

    CAST = "cast"
    """Written in another element type."""
    DEFAULTED = "defaulted"
    """The target needs it and the source does not say; a stated value was used."""
    KEPT = "kept"
    """It was not understood and goes along as the user's own entry."""
    DROPPED = "dropped"
    """The target has no place for it, or it was not asked for."""


@dataclass(frozen=True, slots=True, repr=False)
class Note(Shown):
    """What became of one item. ``asked`` tells what the user chose from what the target forced."""

    outcome: Outcome
    what: str
    why: str
    count: int = 1
    num_bytes: int = 0
    asked: bool = False

    def shown(self) -> dict[str, object]:
        return {
            "outcome": self.outcome.value,
            "what": self.what,
            "why": self.why,
            "count": self.count,
            "num_bytes": self.num_bytes,
        }

    def to_json(self) -> dict[str, Any]:
        return json_of(self)


def settled(notes: tuple[Note, ...]) -> tuple[Note, ...]:
    """``notes`` without those that say of an entry that it was kept, where a later one says that it was dropped."""
    dropped = {note.what for note in notes if note.outcome is Outcome.DROPPED}
    return tuple(note for note in notes if note.outcome is not Outcome.KEPT or note.what not in dropped)

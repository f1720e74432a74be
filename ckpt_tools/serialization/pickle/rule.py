"""An entry of the closed list."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ckpt_tools.serialization.pickle.shapes import ATTRIBUTES, INT, STR, Shape, row, with_slots


@dataclass(frozen=True, slots=True)
class Rule:
    """Allowed uses of each of ``names`` of each of ``modules``, and why they run no code of the pickle."""

    modules: str
    names: str
    reason: str
    call: tuple[Shape, ...] = ()
    new: tuple[Shape, ...] = ()
    state: Shape | None = None
    has_items: bool = False
    has_pairs: bool = False

    @property
    def keys(self) -> Iterator[tuple[str, str]]:
        return ((module, each) for module in self.modules.split() for each in self.names.split())


NO_ARGUMENTS = row()
ENUM = row(INT | STR)
AN_ENUM = "an enum looks its member up"
ITS_ATTRIBUTES = "its attributes are set one by one; they cannot be hooks"
A_NAME = "a name by itself: importing torch runs nothing of the pickle's"


def plain(modules: str, names: str) -> Rule:
    """A class whose objects are made without arguments and given attributes."""
    return Rule(modules, names, ITS_ATTRIBUTES, new=(NO_ARGUMENTS,), state=with_slots(ATTRIBUTES))

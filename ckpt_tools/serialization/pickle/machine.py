"""The state of the pickle machine, and what every opcode may use of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn, Protocol

from ckpt_tools.core.values import GlobalRef, Size, Value
from ckpt_tools.errors import MalformedError

PersistentLoad = Callable[[Value], Value]
"""What a persistent id stands for."""

MAX_NAME_CHARS = 1 << 12
"""Length of the name of a class or function with its module."""

SPARE_CONTAINERS = 1 << 16
"""Containers that need no justification by size, at about 100 bytes each; half a container a byte comes on top."""


class Stop(Exception):  # noqa: N818
    """The opcode STOP was met."""


class Unset:
    """What a memo index holds that was never put, or that a macro left out: part of a record, never referred to."""


UNSET = Unset()


class Macro(Protocol):
    """Reads what would take many opcodes at once."""

    def run(self, at: int) -> int:
        """The position after what starts at ``at``, or 0 where it is to be read opcode by opcode."""


@dataclass(frozen=True, slots=True)
class Language:
    """What a machine understands: a step for each opcode, the functions that a pickle may call, and macros for the
    classes whose objects it may read at once."""

    steps: Sequence[Step]
    calls: Mapping[tuple[str, str], Call]
    macros: Mapping[tuple[str, str], Callable[[Machine], Macro]]


class Machine:
    """The state of the pickle machine, as Lib/pickle.py documents it: a stack cut by marks, and a memo."""

    __slots__ = (
        "budget",
        "bytes_to_copy",
        "calls",
        "data",
        "has_gaps",
        "key_hashes",
        "language",
        "macros",
        "marks",
        "memo",
        "names",
        "position",
        "resolve",
        "sizes",
        "stack",
    )

    def __init__(self, data: bytes, language: Language, persistent_load: PersistentLoad | None) -> None:
        self.data = data
        self.language = language
        self.position = 0
        self.stack: list[Value] = []
        self.marks: list[list[Value]] = []
        self.memo: list[Value] = []
        self.has_gaps = False
        self.resolve = persistent_load
        self.names: dict[tuple[str, str], GlobalRef] = {}
        # By the id of the one GlobalRef of a name, whose hash would be slow to take.
        self.calls: dict[int, Call] = {}
        self.macros: dict[int, Macro] = {}
        self.sizes: dict[bytes, Size] = {}
        self.key_hashes: dict[int, tuple[Value, list[int], set[int]]] = {}
        self.budget = SPARE_CONTAINERS + len(data) // 2
        self.bytes_to_copy = 4096 + 4 * len(data)

    def run(self) -> Value:
        """Interpret up to STOP, which must be the last byte."""
        data, position = self.data, 0
        steps = self.language.steps
        try:
            while True:
                self.position = position
                position = steps[data[position]](self, position + 1)
        except Stop:
            pass
        if self.position != len(data) - 1:
            raise MalformedError(f"more data follows the end of the pickle at byte {self.position:,}")
        return self.stack.pop()

    def fail(self, reason: str) -> NoReturn:
        raise MalformedError(f"the pickle is malformed at byte {self.position:,}: {reason}")

    def pop_mark(self) -> list[Value]:
        """The values since the last mark, whose place is given up."""
        items = self.stack
        self.stack = self.marks.pop()
        return items

    def spend(self, containers: int) -> None:
        self.budget -= containers
        if self.budget < 0:
            self.fail(f"{len(self.data):,} bytes make too many objects")

    def copied(self, values: Sequence[Value]) -> None:
        """Account for a walk over ``values`` and copies of them: a call on one long string, again and again, would fill
        the memory, and one with a million arguments would never end.

        The budget is four times the data, where each byte of a string and each item of a list took one at least.
        """
        self.bytes_to_copy -= len(values)
        if self.bytes_to_copy < 0:
            self.fail("the same data is copied too many times over")
        for value in values:
            if isinstance(value, str | bytes | list | tuple):
                self.bytes_to_copy -= len(value) * (1 if isinstance(value, str | bytes) else 4)
        if self.bytes_to_copy < 0:
            self.fail("the same data is copied too many times over")

    def name(self, module: str, name: str) -> GlobalRef:
        """The one ``GlobalRef`` of a name, and what calling it builds."""
        if len(module) + len(name) > MAX_NAME_CHARS:
            self.fail("a name of absurd length")
        key = (_PY3_MODULES.get(module, module), name)
        ref = self.names.get(key)
        if ref is None:
            ref = self.names[key] = GlobalRef(*key)
            self.spend(2)
            if key in self.language.calls:
                self.calls[id(ref)] = self.language.calls[key]
            if key in self.language.macros:
                self.macros[id(ref)] = self.language.macros[key](self)
        return ref


Step = Callable[[Machine, int], int]
"""One opcode: the machine and the position after the opcode, to the position of the next."""

Call = Callable[[Machine, tuple[Value, ...]], Value]
"""What calling a function with these arguments makes."""


_PY3_MODULES = {"__builtin__": "builtins", "copy_reg": "copyreg"}
"""Names of Python 2, which protocols 0 to 2 use to this day."""

"""What a pickle would have a loader run: the same machine, which records instead of refusing.

``pickles.loads`` may refuse whatever no genuine checkpoint holds; here every pickle that CPython's unpickler takes has
to be followed to where it does its harm, and what it does there is written down as the call that it is. Values are kept
only as far as calls need them to be shown: what was made of a name is a ``Made``, dicts and sets are lists that nothing
is ever looked up in, so that no key is hashed. What cannot be followed ends the recording with its reason; the caller
takes that for a finding too.

A call of a name of the closed list is not noted, unless its arguments make it one. Any other name is a
finding as soon as it stands there: a loader imports its module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ckpt_tools.core.values import GlobalRef, Value
from ckpt_tools.errors import MalformedError
from ckpt_tools.serialization.pickle.closed_list import is_listed
from ckpt_tools.serialization.pickle.machine import Language, Machine, Stop
from ckpt_tools.serialization.pickle.trace.call_text import on_one_line

MAX_USES = 100
"""Calls of one pickle that are written out; more are counted."""

_FROM_BYTES = ("torch.storage", "_load_from_bytes")
"""A name that is harmless but for what it unpickles, and may be called by others than the pickle itself."""


@dataclass(frozen=True, slots=True)
class Use:
    """What a loader would run or import at byte ``at`` of the data: ``os.system('id')``, or a bare name."""

    at: int
    shown: str


@dataclass(frozen=True, slots=True)
class Recording:
    """What one pickle would do.

    ``uses`` are the first ``MAX_USES`` of ``num_uses``; ``stop`` is where its last opcode ended; ``failure`` says why
    it could not be followed further, ``is_cut`` that the data ended too early; ``nested`` are byte strings it gives to
    something that may unpickle them (all that it has, where it names ``_load_from_bytes``), ``persistent_ids`` what it
    asks its loader for, ``value`` what it holds.
    """

    uses: tuple[Use, ...]
    num_uses: int
    stop: int
    failure: str | None
    is_cut: bool
    nested: tuple[bytes, ...]
    persistent_ids: tuple[Value, ...]
    value: Value


_FOLLOWED = frozenset(
    {GlobalRef("copyreg", "__newobj__"), GlobalRef("copyreg", "__newobj_ex__"),
     GlobalRef("torch.storage", "_load_from_bytes"), GlobalRef("torch._tensor", "_rebuild_from_type")}
)  # fmt: skip
"""Names that are not listed, and that are followed to what they call: that is noted, not they."""


class Recorder(Machine):
    """A machine that notes what is not harmless, with the position at which it happens."""

    __slots__ = ("called", "far", "imported", "nested", "num_uses", "persistent_ids", "strings", "uses")

    def __init__(self, data: bytes, language: Language) -> None:
        super().__init__(data, language, None)
        self.uses: list[Use] = []
        self.num_uses = 0
        self.imported: dict[GlobalRef, Use] = {}
        self.called: set[GlobalRef] = set()
        # The memo beyond what the data justifies as a list.
        self.far: dict[int, Value] = {}
        self.nested: list[bytes] = []
        self.strings: list[bytes] = []
        self.persistent_ids: list[Value] = []

    def record(self) -> Recording:
        """Follow the pickle up to STOP. Raises MemoryError only."""
        steps, data, position, failure = self.language.steps, self.data, 0, None
        try:
            while True:
                self.position = position
                position = steps[data[position]](self, position + 1)
        except Stop:
            failure = None if self.stack else f"the pickle is malformed at byte {position:,}: it ends without a value"
        except MalformedError as error:
            failure = error.message
        except MemoryError:
            raise
        except Exception as error:
            # An opcode without its operands meets an empty stack, a short slice or a wrong type.
            reason = (str(error).splitlines() or [""])[0][:200] or type(error).__name__
            failure = f"the pickle is malformed at byte {self.position:,}: {reason}"
        return self._recording(failure)

    def _recording(self, failure: str | None) -> Recording:
        imports = [use for ref, use in self.imported.items() if ref not in self.called]
        uses = sorted(self.uses + imports, key=lambda use: use.at)
        return Recording(
            uses=tuple(uses[:MAX_USES]),
            num_uses=self.num_uses + len(imports),
            stop=self.position + 1,
            failure=failure,
            is_cut=failure is not None and _is_cut(self.data, self.position),
            nested=tuple(self.strings if _FROM_BYTES in self.names else self.nested),
            persistent_ids=tuple(self.persistent_ids),
            value=self.stack[-1] if failure is None and self.stack else None,
        )

    def name(self, module: str, name: str) -> GlobalRef:
        """As the machine's; one that is not listed is noted where it is first met."""
        ref = super().name(module, name)
        if not is_listed(ref.module, ref.name) and ref not in _FOLLOWED and ref not in self.imported:
            self.imported[ref] = Use(self.position, on_one_line(str(ref)))
        return ref

    def use(self, of: Value, show: Callable[[], str]) -> None:
        """Note a call of ``of``, shown only where there is room; a name need not be noted by itself then."""
        self.num_uses += 1
        if type(of) is GlobalRef:
            self.called.add(of)
        if len(self.uses) < MAX_USES:
            self.uses.append(Use(self.position, on_one_line(show())))

    def bury(self, values: Sequence[Value]) -> None:
        """Keep the byte strings among ``values``, which may be pickles that what gets them reads."""
        self.copied(values)
        found = [bytes(value) for value in values if type(value) in (bytes, bytearray)]
        self.nested.extend(found[: MAX_USES - len(self.nested)])


# Data that ends within an opcode

_LENGTHS = {b"U": 1, b"C": 1, b"\x8c": 1, b"\x8a": 1, b"T": 4, b"B": 4, b"X": 4, b"\x8b": 4, b"\x8d": 8, b"\x8e": 8,
            b"\x96": 8, b"\x95": 8}  # fmt: skip
_LINES = {b"I": 1, b"L": 1, b"F": 1, b"V": 1, b"S": 1, b"P": 1, b"p": 1, b"g": 1, b"c": 2, b"i": 2}
_LONGEST_FIXED_BYTES = 9


def _is_cut(data: bytes, position: int) -> bool:
    """Whether the opcode at ``position`` needs more than there is of ``data``."""
    opcode = data[position : position + 1]
    if opcode in _LENGTHS:
        start = position + 1 + _LENGTHS[opcode]
        return start > len(data) or start + int.from_bytes(data[position + 1 : start], "little") > len(data)
    if opcode in _LINES:
        return data.count(b"\n", position) < _LINES[opcode]
    return not opcode or (position + _LONGEST_FIXED_BYTES > len(data) and opcode in b"JKMGhjqr\x80\x82\x83\x84")

"""Proof that loading a pickle runs no code: the reader accepts it, and everything in it is on the closed list.

The reader refuses what no pickler writes, so that no two unpicklers read two things. It keeps every name that it met
and every object that it recorded, whatever became of them: dropped, overwritten, or handed to a call that ignores it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from ckpt_tools.core.values import GlobalRef, Opaque, StorageRef, Value
from ckpt_tools.core.wording import listed
from ckpt_tools.errors import FormatError, MalformedError
from ckpt_tools.serialization.pickle.allowed_calls import CALLS
from ckpt_tools.serialization.pickle.closed_list import FACTORIES, is_listed, refusal
from ckpt_tools.serialization.pickle.dcp_macros import MACROS
from ckpt_tools.serialization.pickle.load import interpreting, run_checked
from ckpt_tools.serialization.pickle.machine import (
    ArrayReader,
    Call,
    EndsEarlyError,
    JoblibArrayError,
    Language,
    Machine,
    PersistentLoad,
    SetState,
)
from ckpt_tools.serialization.pickle.opcodes import STEPS
from ckpt_tools.serialization.pickle.shapes import ATTRIBUTES, BOOL, fields, looking_at_most, walked

MAX_REFUSALS = 100
"""Refusals of one pickle that are kept; more are counted."""

_SPARE_ITEMS, _ITEMS_PER_BYTE = 1 << 20, 4
"""Items of collections that are looked at; a byte of a pickle makes at most one."""

_FROM_BYTES = ("torch.storage", "_load_from_bytes")


@dataclass(frozen=True, slots=True)
class Refusal:
    """An entry that is not on the closed list, at byte ``at``; ``name`` if the user could allow it by name."""

    at: int
    what: str
    name: str | None


@dataclass(frozen=True, slots=True)
class Proof:
    """The value of a pickle that ends at ``stop``. It is proven if there are no ``refusals``.

    ``uses_allowed`` are the names that only the user vouched for.
    """

    value: Value
    stop: int
    refusals: tuple[Refusal, ...]
    num_refusals: int
    uses_allowed: frozenset[str]


def prove(
    data: bytes,
    *,
    path: str,
    persistent_load: PersistentLoad | None = None,
    allowed: Collection[str] = (),
    is_prefix: bool = False,
    inner: Callable[[bytes], StorageRef] | None = None,
    arrays: ArrayReader | None = None,
) -> Proof:
    """Read ``data``, one pickle or with ``is_prefix`` the first of several, and judge it by the closed list.

    ``inner`` reads the bytes that hold a storage outside of torch's files; ``arrays`` reads past the elements of arrays
    in a file of joblib; ``data`` is the first part of it.

    Raises:
        FormatError: no pickler wrote it, or it breaks a bound. UnlistedNameError: so, and it names code before that.
        JoblibArrayError: it is a file of joblib, and ``arrays`` is None.
        MemoryBudgetError: there is not enough memory for it.
    """
    calls = _CALLS
    if inner is not None:
        calls = {**calls, _FROM_BYTES: lambda machine, args: _stored(machine, args, inner)}
    machine = Machine(data, Language(STEPS, calls, {} if arrays else MACROS), persistent_load)
    machine.arrays = arrays
    try:
        with interpreting(machine, path):
            stop = run_checked(machine, is_prefix=is_prefix)
            judge = _Judge(machine, frozenset(allowed))
            with looking_at_most(_SPARE_ITEMS + _ITEMS_PER_BYTE * len(data)):
                judge.judge()
            found, used = tuple(judge.refusals), frozenset(judge.uses_allowed)
            return Proof(machine.stack[-1], stop + machine.shift, found, judge.num_refusals, used)
    except JoblibArrayError:
        raise
    except FormatError as error:
        names = [str(ref) for key, ref in machine.names.items() if not is_listed(*key) and str(ref) not in allowed]
        if not names or (is_prefix and isinstance(error, EndsEarlyError)):
            raise
        raise UnlistedNameError(f"{error.message}; it names {listed(names)}", path=error.path) from error


class UnlistedNameError(MalformedError):
    """A pickle that no pickler wrote, and that names code before the place where reading it fails."""


def _flagged(key: tuple[str, str], num_args: int) -> Call:
    """A tensor whose values are conjugated or negated: ``loads`` refuses it, because it could not say so."""
    build = CALLS[key]

    def call(machine: Machine, args: tuple[Value, ...]) -> Value:
        is_flagged = len(args) == num_args and _FLAGS.accepts(args[-1])
        return build(machine, args[:-1] if is_flagged else args)

    return call


_FLAGS = fields(conj=BOOL, neg=BOOL)
_TENSOR_V2, _TENSOR_V3 = ("torch._utils", "_rebuild_tensor_v2"), ("torch._utils", "_rebuild_tensor_v3")
_CALLS = {**CALLS, _TENSOR_V2: _flagged(_TENSOR_V2, 7), _TENSOR_V3: _flagged(_TENSOR_V3, 8)}


def _stored(machine: Machine, args: tuple[Value, ...], inner: Callable[[bytes], StorageRef]) -> StorageRef:
    """A storage as pickle writes it without torch.save: the bytes of a file of torch before 1.6."""
    if len(args) != 1 or type(args[0]) is not bytes:
        machine.fail("a storage that is not made of bytes")
    machine.copied(args)
    return inner(args[0])


class _Judge:
    def __init__(self, machine: Machine, allowed: frozenset[str]) -> None:
        self.machine = machine
        self.allowed = allowed
        self.refusals: list[Refusal] = []
        self.num_refusals = 0
        self.uses_allowed: set[str] = set()

    def judge(self) -> None:
        called = self._objects()
        for key, ref in self.machine.names.items():
            if key == _FROM_BYTES and key in self.machine.language.calls:
                continue
            if not is_listed(*key) and not self._is_allowed(str(ref)) and str(ref) not in called:
                self._refuse(0, f"it names {ref}", str(ref))
        for at, factory in self.machine.factories:
            if (factory.module, factory.name) not in FACTORIES and not self._is_allowed(str(factory)):
                self._refuse(at, f"a defaultdict makes what is missing with {factory}", None)

    def _objects(self) -> set[str]:
        """Judge every object; the names that were refused with one."""
        called: set[str] = set()
        known: dict[tuple[Value, ...], str | None] = {}
        for at, made in self.machine.objects:
            what = _remembered(made, known)
            if what is not None and not self._is_vouched_for(made):
                name = str(made.ref) if type(made.ref) is GlobalRef else ""
                called.add(name)
                is_known = not name or is_listed(made.ref.module, made.ref.name)
                self._refuse(at, what, None if is_known else name)
        return called

    def _is_vouched_for(self, made: Opaque | SetState) -> bool:
        """True for a class that the user allowed, with any arguments, but without a state that is a hook."""
        if type(made.ref) is not GlobalRef or str(made.ref) not in self.allowed:
            return False
        has_hooks = type(made.state) is dict and not ATTRIBUTES.accepts(made.state)
        return not has_hooks and self._is_allowed(str(made.ref))

    def _is_allowed(self, name: str) -> bool:
        if name in self.allowed:
            self.uses_allowed.add(name)
        return name in self.allowed

    def _refuse(self, at: int, what: str, name: str | None) -> None:
        self.num_refusals += 1
        if len(self.refusals) < MAX_REFUSALS:
            self.refusals.append(Refusal(at, what, name))


def _remembered(made: Opaque | SetState, known: dict[tuple[Value, ...], str | None]) -> str | None:
    """The judgement of an object; objects of a few scalars without a state, of which a DCP has millions, are judged
    once."""
    if type(made) is not Opaque or made.state is not None or made.items or made.pairs or made.kwargs:
        return refusal(made)
    if type(made.ref) is not GlobalRef or not _SCALARS.issuperset(map(type, walked(made.args))):
        return refusal(made)
    key = (made.ref, made.form, *((type(arg), arg) for arg in made.args))
    if key not in known:
        known[key] = refusal(made)
    return known[key]


_SCALARS = frozenset({str, int, bool, type(None), GlobalRef})

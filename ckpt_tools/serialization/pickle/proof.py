"""Proof that loading a pickle runs no code: the reader accepts it, and everything in it is on the closed list.

The reader refuses what no pickler writes, so that no two unpicklers read two things. It keeps every name that it met
and every object that it recorded, whatever became of them: dropped, overwritten, or handed to a call that ignores it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from ckpt_tools.core.values import GlobalRef, Opaque, StorageRef, Value
from ckpt_tools.errors import FormatError, MalformedError
from ckpt_tools.messages.wording import join_names
from ckpt_tools.serialization.pickle.allowed_calls import ALLOWED_CALLS
from ckpt_tools.serialization.pickle.closed_list import ALLOWED_FACTORIES, explain_refusal, is_listed
from ckpt_tools.serialization.pickle.dcp_macros import MACROS
from ckpt_tools.serialization.pickle.load import LoadedPickle, interpret_checked, name_pickle_errors
from ckpt_tools.serialization.pickle.machine import (
    ArrayReader,
    CallBuilder,
    EndsEarlyError,
    InstructionSet,
    JoblibArrayError,
    Machine,
    PersistentLoad,
    TensorAttributes,
)
from ckpt_tools.serialization.pickle.opcodes import OPCODE_STEPS, build_or_record
from ckpt_tools.serialization.pickle.shapes import (
    ATTRIBUTES,
    BOOL,
    charge_items,
    fields,
    limit_walked_items,
)

MAX_REFUSALS = 100
"""Refusals of one pickle that are kept; more are counted."""

_SPARE_ITEMS, _ITEMS_PER_BYTE = 1 << 20, 4
"""Items of collections that are looked at; a byte of a pickle makes at most one."""

_LOAD_FROM_BYTES = ("torch.storage", "_load_from_bytes")


@dataclass(frozen=True, slots=True)
class Refusal:
    """An entry that is not on the closed list, at byte ``at``; ``name`` if the user could allow it by name."""

    at: int
    reason: str
    name: str | None


@dataclass(frozen=True, slots=True)
class Proof(LoadedPickle):
    """A pickle that is proven if there are no ``refusals``. ``uses_allowed`` are the names that only the user vouched
    for."""

    refusals: tuple[Refusal, ...]
    num_refusals: int
    uses_allowed: frozenset[str]


def prove_pickle(
    data: bytes,
    *,
    path: str,
    persistent_load: PersistentLoad | None = None,
    allowed: Collection[str] = (),
    is_prefix: bool = False,
    read_inner_storage: Callable[[bytes], StorageRef] | None = None,
    arrays: ArrayReader | None = None,
) -> Proof:
    """Read ``data``, one pickle or with ``is_prefix`` the first of several, and judge it by the closed list.

    ``read_inner_storage`` reads the bytes that hold a storage outside of torch's files; ``arrays`` reads past the
    elements of arrays in a file of joblib; ``data`` is the first part of it.

    Raises:
        FormatError: no pickler wrote it, or it breaks a bound. UnlistedNameError: so, and it names code before that.
        JoblibArrayError: it is a file of joblib, and ``arrays`` is None.
        MemoryBudgetError: there is not enough memory for it.
    """
    calls = _PROOF_CALLS
    if read_inner_storage is not None:

        def build_inner_storage(machine: Machine, args: tuple[Value, ...]) -> StorageRef:
            """A storage as pickle writes it without torch.save: the bytes of a file of torch before 1.6."""
            if len(args) != 1 or type(args[0]) is not bytes:
                machine.fail("a storage that is not made of bytes")
            machine.charge_copies(args)
            return read_inner_storage(args[0])

        calls = {**calls, _LOAD_FROM_BYTES: build_inner_storage}
    machine = Machine(data, InstructionSet(OPCODE_STEPS, calls, {} if arrays else MACROS), persistent_load)
    machine.arrays = arrays
    try:
        with name_pickle_errors(machine, path):
            stop = interpret_checked(machine, is_prefix=is_prefix)
            judge = _ClosedListJudge(machine, frozenset(allowed))
            with limit_walked_items(_SPARE_ITEMS + _ITEMS_PER_BYTE * len(data)):
                judge.judge_pickle()
            refusals, used_names = tuple(judge.refusals), frozenset(judge.uses_allowed)
            return Proof(machine.stack[-1], stop + machine.shift, refusals, judge.num_refusals, used_names)
    except JoblibArrayError:
        raise
    except FormatError as error:
        names = [str(ref) for key, ref in machine.names.items() if not is_listed(*key) and str(ref) not in allowed]
        if not names or (is_prefix and isinstance(error, EndsEarlyError)):
            raise
        raise UnlistedNameError(f"{error.message}; it names {join_names(names)}", path=error.path) from error


class UnlistedNameError(MalformedError):
    """A pickle that no pickler wrote, and that names code before the place where reading it fails."""


def _make_flag_ignoring_builder(key: tuple[str, str], num_args: int) -> CallBuilder:
    """The builder of a tensor that may have flags for conjugated or negated values, which ``loads`` refuses because its
    tensors have no such flags."""
    ref, rebuild = GlobalRef(*key), ALLOWED_CALLS[key]

    def build_tensor(machine: Machine, args: tuple[Value, ...]) -> Value:
        is_flagged = len(args) == num_args and _CONJ_NEG_FLAGS.accepts(args[-1])
        return build_or_record(machine, rebuild, ref, args[:-1] if is_flagged else args)

    return build_tensor


_CONJ_NEG_FLAGS = fields(conj=BOOL, neg=BOOL)
_TENSOR_V2, _TENSOR_V3 = ("torch._utils", "_rebuild_tensor_v2"), ("torch._utils", "_rebuild_tensor_v3")
_PROOF_CALLS = {
    **ALLOWED_CALLS,
    _TENSOR_V2: _make_flag_ignoring_builder(_TENSOR_V2, 7),
    _TENSOR_V3: _make_flag_ignoring_builder(_TENSOR_V3, 8),
}


class _ClosedListJudge:
    def __init__(self, machine: Machine, allowed: frozenset[str]) -> None:
        self.machine = machine
        self.allowed = allowed
        self.refusals: list[Refusal] = []
        self.num_refusals = 0
        self.uses_allowed: set[str] = set()

    def judge_pickle(self) -> None:
        refused_names = self._judge_objects()
        for key, ref in self.machine.names.items():
            if key == _LOAD_FROM_BYTES and key in self.machine.language.calls:
                continue
            if not is_listed(*key) and not self._is_allowed(str(ref)) and str(ref) not in refused_names:
                self._add_refusal(0, f"it names {ref}", str(ref))
        for at, factory in self.machine.factories:
            if (factory.module, factory.name) not in ALLOWED_FACTORIES and not self._is_allowed(str(factory)):
                self._add_refusal(at, f"a defaultdict makes what is missing with {factory}", None)

    def _judge_objects(self) -> set[str]:
        """Judge every object. Returns the names of those that are refused."""
        refused_names: set[str] = set()
        judgements: dict[tuple[Value, ...], str | None] = {}
        for at, recorded_object in self.machine.objects:
            what = _judge_once(recorded_object, judgements)
            if what is not None and not self._is_vouched_for(recorded_object):
                name = str(recorded_object.ref) if type(recorded_object.ref) is GlobalRef else ""
                refused_names.add(name)
                is_known = not name or is_listed(recorded_object.ref.module, recorded_object.ref.name)
                self._add_refusal(at, what, None if is_known else name)
        return refused_names

    def _is_vouched_for(self, made: Opaque | TensorAttributes) -> bool:
        """True for a class that the user allowed, with any arguments, but without a state that is a hook."""
        if type(made.ref) is not GlobalRef or str(made.ref) not in self.allowed:
            return False
        has_hooks = type(made.state) is dict and not ATTRIBUTES.accepts(made.state)
        return not has_hooks and self._is_allowed(str(made.ref))

    def _is_allowed(self, name: str) -> bool:
        if name in self.allowed:
            self.uses_allowed.add(name)
        return name in self.allowed

    def _add_refusal(self, at: int, what: str, name: str | None) -> None:
        self.num_refusals += 1
        if len(self.refusals) < MAX_REFUSALS:
            self.refusals.append(Refusal(at, what, name))


def _judge_once(
    recorded_object: Opaque | TensorAttributes, judgements: dict[tuple[Value, ...], str | None]
) -> str | None:
    """The judgement of an object. Objects of a few scalars without a state are judged once: a DCP has millions."""
    made = recorded_object
    if type(made) is not Opaque or made.state is not None or made.items or made.pairs or made.kwargs:
        return explain_refusal(made)
    if type(made.ref) is not GlobalRef or not _SCALAR_TYPES.issuperset(map(type, charge_items(made.args))):
        return explain_refusal(made)
    key = (made.ref, made.form, *((type(arg), arg) for arg in made.args))
    if key not in judgements:
        judgements[key] = explain_refusal(recorded_object)
    return judgements[key]


_SCALAR_TYPES = frozenset({str, int, bool, type(None), GlobalRef})

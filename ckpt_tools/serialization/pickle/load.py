"""Pickles as data: an interpreter of their opcodes that makes values and can do nothing else.

Every opcode is a small function on the machine's own stack (``opcodes``). A name becomes a ``GlobalRef``; calling one
builds a value if the name is on the allow-list (``allowed_calls``), and otherwise records the call as a
``values.Opaque``. Nothing is imported, nothing foreign is called, no attribute is set. Every cost is bounded where it
arises: lengths by the data, integers, nesting and the hashing of keys by constants, copies, containers and memo indices
by the size of the data.

The C unpickler with a ``find_class`` of our own would not do: it hashes, out of reach, tuples that it made itself.
Forty nested tuples ``(x, x)`` as a key take 2 ** 40 steps, and a deep one overflows the C stack; both fit in 100 bytes.
It also resolves the extension registry past ``find_class``, allocates any memo index that it meets, and sets attributes
on any object.

A Python loop over 60 million opcodes takes a minute, so the records that a DCP repeats a million times are read by
macros (``dcp_macros``): where one of its four frequent classes starts, one regular expression takes the whole record
and leaves the stack as its opcodes would. Tensors of the same properties, size and chunks share one record, and the
memo keeps only names and sizes of them. A pickle that refers to anything else of a record is read again without macros.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import NoReturn

from ckpt_tools.core.values import (
    DefaultDict,
    GlobalRef,
    Opaque,
    OrderedDict,
    Size,
    StorageRef,
    StoredTensor,
    Value,
)
from ckpt_tools.errors import CkptError, MalformedError, MemoryBudgetError, UnsafeError
from ckpt_tools.process.collector import pause_collector
from ckpt_tools.serialization.pickle.allowed_calls import ALLOWED_CALLS
from ckpt_tools.serialization.pickle.dcp_macros import MACROS
from ckpt_tools.serialization.pickle.dcp_metadata import DcpRecord
from ckpt_tools.serialization.pickle.machine import EndsEarlyError, InstructionSet, Machine, PersistentLoad
from ckpt_tools.serialization.pickle.opcodes import OPCODE_STEPS

GC_PAUSE_BYTES = 1 << 20
"""Size from which the cyclic garbage collector pauses: it would scan millions of live objects again and again."""

SHORT_OPERAND_BYTES = 300
"""Upper limit for an opcode whose length is not checked before it is read: one byte of length, and as many bytes."""


def loads(data: bytes, *, path: str, persistent_load: PersistentLoad | None = None) -> Value:
    """The value that the pickle ``data`` describes, of builtin data and the types of ``values``; nothing is run.

    ``persistent_load`` gives the values of persistent ids.

    Raises:
        MalformedError: not exactly one pickle, or one that breaks a bound of this module.
        UnsupportedError: a tensor of a kind that is not handled.
        MemoryBudgetError: there is not enough memory for it.
    """
    return _load_pickle(data, path, persistent_load, is_prefix=False).value


@dataclass(frozen=True, slots=True)
class LoadedPickle:
    """The value of the first of several pickles, which ends at ``stop``."""

    value: Value
    stop: int


def load_first_pickle(data: bytes, *, path: str, persistent_load: PersistentLoad | None = None) -> LoadedPickle:
    """Like ``loads``, for the pickle that ``data`` begins with. Raises EndsEarlyError if it may be cut off."""
    return _load_pickle(data, path, persistent_load, is_prefix=True)


FIRST_READ_SIZES = (1 << 22, 1 << 25)
"""Sizes of the first two reads of a pickle, before all of it is read."""

MIN_SIZE_RATIO = 8
"""Minimum ratio of a pickle's size to its first read, so that the first read costs little."""


def check_pickle_start(
    read: Callable[[int, int], bytes], size: int, *, path: str, persistent_load: PersistentLoad | None = None
) -> None:
    """Refuse data by its first bytes if it is not a pickle, or ends early: a file may be a hole of gigabytes behind a
    short pickle, or within a string of it.

    Raises:
        FormatError: as ``loads`` would, or PickleTooLongError.
    """
    for num_bytes in FIRST_READ_SIZES:
        if size < num_bytes * MIN_SIZE_RATIO:
            return
        with suppress(EndsEarlyError):
            first_pickle = load_first_pickle(read(0, num_bytes), path=path, persistent_load=persistent_load)
            last = first_pickle.stop - 1
            raise MalformedError(f"more data follows the end of the pickle at byte {last:,}", path=path)


def _load_pickle(data: bytes, path: str, persistent_load: PersistentLoad | None, *, is_prefix: bool) -> LoadedPickle:
    machine = Machine(data, InstructionSet(OPCODE_STEPS, ALLOWED_CALLS, MACROS), persistent_load)
    with name_pickle_errors(machine, path):
        stop = interpret_checked(machine, is_prefix=is_prefix)
        return LoadedPickle(machine.stack[-1], stop)


def interpret_checked(machine: Machine, *, is_prefix: bool) -> int:
    """Interpret one pickle, or with ``is_prefix`` the first of several, and check the value, which stays on the stack.
    Returns the position after the pickle."""
    stop = machine.run_first_pickle()
    if stop != len(machine.data) and not is_prefix:
        raise MalformedError(f"more data follows the end of the pickle at byte {machine.file_position:,}")
    machine.free_working_state()
    ValueChecker(stop + machine.shift - machine.num_skipped).check_value(machine.stack[-1])
    return stop


MAX_DEPTH = 100
"""Containers inside containers. Training states nest less than 20 deep; walking 100 stays far below Python's recursion
limit of 1,000 frames."""

SPARE_NODES = 1 << 16
"""Values that need no justification by size, twice the bytes come on top."""

_SCALAR_TYPES = frozenset({type(None), bool, int, float, complex, str, bytes, bytearray, Size, StorageRef, GlobalRef})
_CONTAINER_TYPES = frozenset({list, tuple, dict, OrderedDict, DefaultDict, set, frozenset})
_IN_PROGRESS = -1
_SMALL_TUPLE_ITEMS = 8


class ValueChecker:
    """Walks a loaded value once: bounds nesting and sharing, refuses containers inside themselves, checks records.

    An ``Opaque`` may contain itself, as objects do. Containers of scalars alone are not walked. Lists that share their
    items double with every level, and every comparison, print or write walks them all: unfolded, a value may have
    ``SPARE_NODES`` parts and two a byte of the pickle, where each takes a byte at least.
    """

    def __init__(self, num_bytes: int) -> None:
        # By id: how deep a value nests, _IN_PROGRESS while it is walked (met again then, it contains itself); and how
        # many parts it has if shared ones are counted each time. All values live as long as the walk.
        self._heights: dict[int, int] = {}
        self._sizes: dict[int, int] = {}
        self._max_size = SPARE_NODES + 2 * num_bytes

    def check_value(self, value: Value, depth: int = 0) -> int:
        """Nesting depth of ``value``, which is ``depth`` deep itself. Raises MalformedError."""
        if type(value) in _SCALAR_TYPES:
            return 0
        if type(value) is tuple and len(value) <= _SMALL_TUPLE_ITEMS and _SCALAR_TYPES.issuperset(map(type, value)):
            # A DCP has a path for each tensor: what is known of each would take more room than the path.
            if depth >= MAX_DEPTH:
                self._refuse_depth()
            return 1
        height = self._heights.get(id(value))
        if height is None:
            height = self._walk_value(value, depth)
        elif height == _IN_PROGRESS:
            if not isinstance(value, Opaque):
                raise MalformedError("a container contains itself")
            return 0
        if depth + height > MAX_DEPTH:
            self._refuse_depth()
        return height

    def _walk_value(self, value: Value, depth: int) -> int:
        if depth >= MAX_DEPTH:
            self._refuse_depth()
        self._heights[id(value)] = _IN_PROGRESS
        inner_height, size = 0, 1
        for group in _group_parts(value):
            size += len(group)
            if not set(map(type, group)) <= _SCALAR_TYPES:
                inner_height = max(inner_height, *(self.check_value(part, depth + 1) for part in group))
                size += sum(map(self._get_unfolded_size, group))
        if size > self._max_size:
            raise MalformedError("values that share their parts many times over")
        self._heights[id(value)] = inner_height + 1
        if inner_height:
            self._sizes[id(value)] = size
        return inner_height + 1

    def _refuse_depth(self) -> NoReturn:
        raise MalformedError(f"values are nested more than {MAX_DEPTH} levels deep")

    def _get_unfolded_size(self, value: Value) -> int:
        """Parts that a checked value unfolds to; those of one that holds only scalars are not kept, but counted."""
        return self._sizes.get(id(value), 0) or (len(value) + 1 if type(value) in _CONTAINER_TYPES else 1)


def _group_parts(value: Value) -> Iterable[Collection[Value]]:
    """The parts of a value, in groups."""
    if isinstance(value, OrderedDict):
        return (value.keys(), value.values(), (value.attributes,))
    if isinstance(value, dict):
        return (value.keys(), value.values())
    if isinstance(value, DcpRecord):
        return (value.check_fields(),)
    if isinstance(value, Opaque):
        return ((value.ref, value.args, value.kwargs, value.state, value.items, value.pairs),)
    if isinstance(value, StoredTensor):
        return ((value.state,),)
    return (value,)


@contextmanager
def name_pickle_errors(machine: Machine, path: str) -> Iterator[None]:
    """Turn every exception within into an error that names ``path``."""
    try:
        with pause_collector(is_needed=len(machine.data) >= GC_PAUSE_BYTES):
            yield
    except CkptError as error:
        error.path = error.path or path
        raise
    except MemoryError as error:
        raise MemoryBudgetError("there is not enough memory to read this pickle", path=path) from error
    except Exception as error:
        # An opcode without its operands meets an empty stack, a short slice or a wrong type: the pickle is malformed.
        known_reason = next((words for kind, words in _REASON_BY_ERROR if isinstance(error, kind)), None)
        reason = known_reason or (str(error).splitlines() or [""])[0][:200] or type(error).__name__
        may_be_cut = len(machine.data) - machine.position < SHORT_OPERAND_BYTES
        error_class = EndsEarlyError if may_be_cut else MalformedError
        raise error_class(f"the pickle is malformed at byte {machine.file_position:,}: {reason}", path=path) from error


_REASON_BY_ERROR: tuple[tuple[type[Exception], str], ...] = (
    (TypeError, "a value or the arguments of a call are not of the form that a pickler writes"),
    (AttributeError, "a value is not of the form that a pickler writes"),
    (LookupError, "it takes a value that is not there"),
    (struct.error, "an operand is cut off"),
    (UnicodeError, "text that is not valid"),
)
"""Messages that replace those of Python's own exceptions."""


def refuse_call(value: Value, path: str) -> None:
    """Raises UnsafeError if ``value`` is a call that a loader would execute instead of data."""
    if not isinstance(value, Opaque):
        return
    from ckpt_tools.serialization.pickle.closed_list import explain_refusal

    if explain_refusal(value) is not None:
        raise UnsafeError(
            f"the pickle is a call of {value.ref}, which a loader would execute; `ckpt-tools scan` tells more",
            path=path,
        )

"""The state of the pickle machine: its stack, its memo and its budgets."""

from __future__ import annotations

from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from array import array
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from sys import maxsize
from typing import NoReturn, Protocol

from ckpt_tools.core.values import GlobalRef, Opaque, Size, Value
from ckpt_tools.errors import MalformedError, UnsupportedError

PersistentLoad = Callable[[Value], Value]
"""Maps a persistent id to its value."""

MAX_NAME_CHARS = 1 << 12
"""Length of the name of a class or function with its module."""

SPARE_CONTAINERS = 1 << 16
"""Containers that need no justification by size, at about 100 bytes each; half a container a byte comes on top."""


class PickleStop(Exception):  # noqa: N818
    """The opcode STOP was met."""


class FrameStarts(Exception):  # noqa: N818
    """The opcode FRAME was met: ``start`` and ``stop`` of the bytes of the frame."""

    def __init__(self, start: int, stop: int) -> None:
        self.start = start
        self.stop = stop


JOBLIB_ARRAY = GlobalRef("joblib.numpy_pickle", "NumpyArrayWrapper")
GETATTR = GlobalRef("builtins", "getattr")


class ArrayFollows(Exception):  # noqa: N818
    """The opcode that completes an array of joblib was met: its elements stand from byte ``at`` of the data on."""

    def __init__(self, at: int, description: Opaque) -> None:
        self.at = at
        self.description = description


class UninterpretedCallError(Exception):
    """A call of an allowed function makes no value: it is recorded. Of a tensor, the message says why."""


class EndsEarlyError(MalformedError):
    """The data ends within the pickle, or may do so."""


class JoblibArrayError(MalformedError):
    """A file of joblib where a pickle should be."""


class PickleTooLongError(UnsupportedError):
    """A string, or a number of bytes, is longer than any that is read."""


class Unset:
    """Value at a memo index that was never put, or that a macro skipped because it is part of a record."""


UNSET = Unset()


class ArrayReader(Protocol):
    """Reads past the elements of arrays that stand within a pickle."""

    def skip_array(self, machine: Machine, array: ArrayFollows) -> int:
        """Read past the elements. Returns the position after them in the data of the machine, which may then be another
        part of the file."""


class Macro(Protocol):
    """Reads many opcodes at once."""

    def try_read(self, at: int) -> int:
        """Read the record that starts at ``at``. Returns the position after it, or 0 where it must be read opcode by
        opcode."""


@dataclass(frozen=True, slots=True)
class InstructionSet:
    """The abilities of a machine: a step for each opcode, the functions that a pickle may call, and macros for classes
    whose objects are read at once.

    Macros give no place in the memo to what no pickler refers to again; ``run_first_pickle`` starts again without them
    where one does.
    """

    steps: Sequence[OpcodeStep]
    calls: Mapping[tuple[str, str], CallBuilder]
    macros: Mapping[tuple[str, str], Callable[[Machine], Macro]]


class SkippedPlaceError(Exception):
    """A place of the memo is fetched whose value a macro left out."""


_EMPTY_NUMBERS = array("Q")
"""Copied, because making an array is an audit event, and reading a pickle must raise none."""


class Memo(list[Value]):
    """The values that were put, in order. Places that were left out take no room: ten million of them are 80 MB.

    The first ``dense`` places are those of the list; behind them ``fetch`` knows where a value is. If places 3, 4 and 5
    were left out:

        place      0 1 2 3 4 5 6 7
        position   0 1 2 - - - 3 4      dense = 3, _firsts = [3], _resumes = [6]
    """

    __slots__ = ("_firsts", "_num_left_out", "_resumes", "dense")

    def __init__(self) -> None:
        self.dense = maxsize
        self._num_left_out = 0
        # After each gap: the first place that has a value again, and its position in the list.
        self._resumes = _EMPTY_NUMBERS[:]
        self._firsts = _EMPTY_NUMBERS[:]

    @property
    def next_place(self) -> int:
        return len(self) + self._num_left_out

    def skip_places(self, num_places: int) -> None:
        """Skip the next ``num_places``, which are never fetched."""
        if not num_places:
            return
        self._num_left_out += num_places
        if self._firsts and self._firsts[-1] == len(self):
            self._resumes[-1] += num_places
            return
        self.dense = min(self.dense, len(self))
        self._firsts.append(len(self))
        self._resumes.append(self.next_place)

    def fetch(self, place: int) -> Value:
        """The value at ``place``. Raises SkippedPlaceError, and IndexError where nothing was put."""
        gap = bisect_right(self._resumes, place)
        position = place if gap == 0 else self._firsts[gap - 1] + place - self._resumes[gap - 1]
        if gap < len(self._firsts) and position >= self._firsts[gap]:
            raise SkippedPlaceError
        return self[position]

    def get_place(self, position: int) -> int:
        """The place of the value at ``position`` of the list."""
        gap = bisect_right(self._firsts, position)
        return position if gap == 0 else self._resumes[gap - 1] + position - self._firsts[gap - 1]


class Machine:
    """The state of the pickle machine, as Lib/pickle.py documents it: a stack cut by marks, and a memo."""

    __slots__ = (
        *("arrays", "budget", "bytes_to_copy", "calls", "data", "factories", "is_framed", "key_hashes", "language"),
        *("macros", "marks", "memo", "names", "num_skipped", "objects", "position", "protocol", "resolve", "shift"),
        *("sizes", "stack"),
    )

    def __init__(self, data: bytes, language: InstructionSet, persistent_load: PersistentLoad | None) -> None:
        self.data = data
        self.language = language
        self.resolve = persistent_load
        self.arrays: ArrayReader | None = None
        # Position of the data in the file.
        self.shift = 0
        self.num_skipped = 0
        self._reset()

    def _reset(self) -> None:
        self.position = 0
        self.stack: list[Value] = []
        self.marks: list[list[Value]] = []
        self.memo = Memo()
        self.factories: list[tuple[int, GlobalRef]] = []
        self.is_framed = False
        self.protocol = 0
        # Every object that was recorded instead of being interpreted, with the position at which it was made.
        self.objects: list[tuple[int, Opaque | TensorAttributes]] = []
        self.names: dict[tuple[str, str], GlobalRef] = {}
        # By the id of the one GlobalRef of a name, whose hash would be slow to take.
        self.calls: dict[int, CallBuilder] = {}
        self.macros: dict[int, Macro] = {}
        self.sizes: dict[bytes, Size] = {}
        self.key_hashes: dict[int, tuple[Value, list[int], set[int]]] = {}
        self.budget = SPARE_CONTAINERS + len(self.data) // 2
        self.bytes_to_copy = 4096 + 4 * len(self.data)

    def run_first_pickle(self) -> int:
        """Interpret up to the first STOP, and leave the value on the stack. Returns the position after the STOP.

        A frame ends where an opcode does, and no frame starts within another: CPython's C unpickler takes frames for
        hints only, and the Python one reads other bytes where a frame cuts an opcode.
        """
        try:
            return self._run_to_stop()
        except SkippedPlaceError:
            self.language = replace(self.language, macros={})
            self._reset()
            return self._run_to_stop()

    def free_working_state(self) -> None:
        """Free everything that only reading needs; the value is complete."""
        self.memo = Memo()
        self.sizes.clear()
        self.macros.clear()
        self.key_hashes.clear()

    def _run_to_stop(self) -> int:
        # Steps run up to `limit`: the end of the frame if there is one, else of the data. What happens rarely leaves
        # the inner loop by an exception, as a look for it after each opcode would cost more than most opcodes:
        #   FrameStarts   -> limit = end of the frame
        #   ArrayFollows  -> position = behind the elements of the array
        #   PickleStop    -> done
        data, position, limit = self.data, 0, len(self.data)
        steps = self.language.steps
        while True:
            try:
                while position < limit:
                    self.position = position
                    position = steps[data[position]](self, position + 1)
            except FrameStarts as frame:
                position, limit, self.is_framed = frame.start, frame.stop, True
                continue
            except ArrayFollows as array:
                if self.is_framed and array.at != limit:
                    self.fail("a frame continues behind an array of joblib")
                if self.arrays is None:
                    raise JoblibArrayError(
                        f"the pickle is malformed at byte {self.file_position:,}: the elements of an array of joblib "
                        "follow, which only joblib.load reads"
                    ) from None
                position = self.arrays.skip_array(self, array)
                data, self.is_framed = self.data, False
                limit = len(data)
                continue
            except PickleStop:
                break
            if not self.is_framed:
                self.fail_early("it ends early")
            if position != limit:
                self.fail("a frame ends within an opcode")
            limit, self.is_framed = len(data), False
        if self.is_framed and limit != self.position + 1:
            self.fail("it stops before its frame ends")
        if len(self.stack) != 1 or self.marks:
            self.fail("it leaves more behind than a value")
        return self.position + 1

    def continue_with(self, data: bytes, start: int) -> None:
        """Read ``data`` next, the part of the file from byte ``start``."""
        self.data, self.shift = data, start
        self.budget += len(data) // 2
        self.bytes_to_copy += 4 * len(data)

    @property
    def file_position(self) -> int:
        """Position in the file of the opcode that is read."""
        return self.position + self.shift

    def fail(self, reason: str) -> NoReturn:
        raise MalformedError(f"the pickle is malformed at byte {self.file_position:,}: {reason}")

    def fail_early(self, reason: str) -> NoReturn:
        raise EndsEarlyError(f"the pickle is malformed at byte {self.file_position:,}: {reason}")

    def pop_mark(self) -> list[Value]:
        """The values since the last mark, which is removed."""
        items = self.stack
        self.stack = self.marks.pop()
        return items

    def charge_containers(self, containers: int) -> None:
        self.budget -= containers
        if self.budget < 0:
            self.fail(f"{len(self.data):,} bytes make too many objects")

    def charge_copies(self, values: Sequence[Value]) -> None:
        """Account for a walk over ``values`` and copies of them: a call on one long string, again and again, would fill
        the memory, and one with a million arguments would never end.

        The budget is four times the data, where each byte of a string and each item of a list took one at least.
        """
        if len(values) <= self.bytes_to_copy:
            self.bytes_to_copy -= len(values)
            text_bytes = sum(len(value) for value in values if isinstance(value, str | bytes))
            num_items = sum(len(value) for value in values if isinstance(value, list | tuple | dict))
            self.bytes_to_copy -= text_bytes + 4 * num_items
        if len(values) > self.bytes_to_copy or self.bytes_to_copy < 0:
            self.fail("the same data is copied too many times over")

    def resolve_global(self, module: str, name: str) -> GlobalRef:
        """The one ``GlobalRef`` of a name, which is registered with its builder or macro if it has one."""
        if len(module) + len(name) > MAX_NAME_CHARS:
            self.fail("a name of absurd length")
        if not module or not name:
            self.fail("an empty name")
        key = (module, name) if self.protocol > 2 else map_python2_name(module, name)
        ref = self.names.get(key)
        if ref is None:
            ref = self.names[key] = GlobalRef(*key)
            self.charge_containers(2)
            if key in self.language.calls:
                self.calls[id(ref)] = self.language.calls[key]
            if key in self.language.macros:
                self.macros[id(ref)] = self.language.macros[key](self)
        return ref


OpcodeStep = Callable[[Machine, int], int]
"""One opcode: the machine and the position after the opcode, to the position of the next."""

CallBuilder = Callable[[Machine, tuple[Value, ...]], Value]
"""Builds the value of a call with these arguments. Raises UninterpretedCallError where they make none."""


@dataclass(frozen=True, slots=True)
class TensorAttributes:
    """Attributes given to a tensor: its class, and their values."""

    ref: Value
    state: Value


def map_python2_name(module: str, name: str) -> tuple[str, str]:
    """A name of Python 2, which protocols 0 to 2 use to this day, as CPython maps it."""
    new_name = NAME_MAPPING.get((module, name))
    return new_name or (IMPORT_MAPPING.get(module, module), name)


def resolve_name(ref: Value) -> GlobalRef | None:
    """``ref`` if it is a name, or the name of an inner class, for which protocols below 4 call ``getattr``; else
    None."""
    if type(ref) is not Opaque:
        return ref if type(ref) is GlobalRef else None
    is_inner = ref.ref == GETATTR and ref.form == "call" and tuple(map(type, ref.args)) == (GlobalRef, str)
    return GlobalRef(ref.args[0].module, f"{ref.args[0].name}.{ref.args[1]}") if is_inner else None

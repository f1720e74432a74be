"""Pickles as data: read by the C unpickler, yet never run.

``loads`` is safe in three steps, none of which executes Python per opcode.

1. *Scan* (``_scan``). One possessive regular expression walks the opcodes of fixed length in C; Python sees only
   strings and names. It finds every opcode boundary exactly where the C unpickler will, so it can refuse what no
   callback could stop: the extension registry (EXT1, EXT2, EXT4 bypass ``find_class``), out-of-band buffers, a PUT with
   a huge index (the C unpickler would allocate that many memo entries), a length beyond the data, huge integers,
   trailing bytes, and more containers than the bytes justify.
2. *Load*. The C ``Unpickler`` with a ``find_class`` that imports nothing. A name on the allow-list becomes a builder
   of ours, any other a placeholder class whose instances record their arguments (``values.Opaque``). No builder calls
   an argument, copies without a bound, or can be altered by the pickle.
3. *Settle* (``_Settler``). One walk over the containers bounds their nesting, refuses containers inside themselves,
   turns classes used as values into ``GlobalRef`` and re-checks what was changed after it was built. It skips lists and
   dicts that hold only scalars without looking at each.

Measured on the 2-core reference machine, a DCP ``.metadata`` of one million chunks, 146 MB, protocol 4: scan 1.2 s of
{total} in all; an opcode loop in Python takes 60 s.

Two traps are not obvious. CPython's hash of a tuple recurses in C without a check, so deep tuples as keys overflow the
stack: a pickle with many tuples is loaded in a thread whose stack holds the deepest nesting it could express. And a
BUILD opcode sets attributes on whatever it finds, classes and enum members too: what ``find_class`` returns is sealed.
"""

from __future__ import annotations

import gc
import pickle
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NoReturn

from ckpt_tools.containers.dcp_classes import CLASSES, GLOBALS, Record, SealedType
from ckpt_tools.containers.pickle_writer import dumps
from ckpt_tools.dtypes import DType
from ckpt_tools.errors import CkptError, MalformedError, MemoryBudgetError, UnsupportedError
from ckpt_tools.values import (
    MAX_DIMS,
    PARAMETER,
    DefaultDict,
    GlobalRef,
    Opaque,
    OrderedDict,
    Size,
    StorageRef,
    StoredTensor,
    Value,
)

__all__ = ["PersistentLoad", "dumps", "loads"]

MAX_DEPTH = 100
"""Containers inside containers. Training states nest less than 20 deep; walking 100 stays far below Python's recursion
limit of 1,000 frames."""

MAX_GLOBALS = 10_000
"""Different names in one pickle; a placeholder class takes 1 KiB and 20 us. A large checkpoint has a few hundred."""

MAX_INT_BYTES = 1024
"""Bytes of an integer, and characters of a number in text form. Longer ones are slow to print."""

MAX_BIG_INTS = 10_000
"""Integers of more than 8 bytes. Their hashes can be made to collide, so that as keys n of them cost n * n steps."""

SPARE_CONTAINERS = 1 << 18
"""Containers that need no justification by size, at about 200 bytes each."""

STACK_BYTES_PER_TUPLE = 160
"""C stack that hashing one more level of tuple takes: 50-64 bytes measured (gcc -O3), with room for other builds."""

TUPLES_ON_ANY_STACK = 10_000
"""Tuples that may nest on the caller's stack: 1.6 MB of the usual 8."""

MAX_STACK_BYTES = 16 << 30
"""Address space for the stack of a load; only what is used takes memory."""

GC_PAUSE_BYTES = 1 << 20
"""From this size on the cyclic garbage collector pauses: it would scan millions of live objects again and again."""

# -- 1. scan ---------------------------------------------------------------------------------------------------------

# Opcodes without arguments: MARK POP POP_MARK DUP BINPERSID REDUCE APPEND BUILD DICT EMPTY_DICT APPENDS LIST OBJ
# EMPTY_LIST EMPTY_TUPLE SETITEM TUPLE SETITEMS NONE, NEWOBJ TUPLE1-3 NEWTRUE NEWFALSE, EMPTY_SET ADDITEMS FROZENSET
# NEWOBJ_EX STACK_GLOBAL MEMOIZE.
_PLAIN = rb"[(012QRabd}elo\])stuN\x81\x85-\x89\x8f-\x94]"

# With arguments of fixed length: BININT1 BINGET BINPUT, BININT2, BININT LONG_BINGET, BINFLOAT, FRAME, PROTO, and LONG1
# of at most 8 bytes. LONG_BINPUT is added with its bound.
_FIXED = rb"[Khq].|M..|[Jj]....|\x8a(?:\x05.{5}|\x04.{4}|\x06.{6}|\x07.{7}|\x08.{8}|\x00)|G.{8}|\x95.{8}|\x80."

_TUPLES = b"t\x85\x86\x87"
_CONTAINERS = b"]}dloi\x81\x92R"
_SETS = b"\x8f\x91"

_PAYLOAD_BYTES = 4096
"""Strings from this length on are left out when opcodes are counted; shorter ones only make the bound stricter."""


@dataclass(slots=True)
class _Scan:
    data: bytes
    path: str
    max_memo: int = field(init=False)
    strings: list[tuple[int, int]] = field(default_factory=list)
    num_big_ints: int = 0

    def __post_init__(self) -> None:
        # The nth object a pickler memoises is preceded by n others of at least six bytes (object, PUT, index).
        self.max_memo = len(self.data) // 6 + 256

    def fail(self, reason: str, position: int) -> NoReturn:
        raise MalformedError(f"the pickle is malformed: {reason} at byte {position:,}", path=self.path)

    def run(self) -> None:
        """Walk every opcode up to STOP, which must be the last byte. Raises MalformedError."""
        data, match = self.data, _fixed_opcodes(self.max_memo).match
        position, end = 0, len(self.data)
        while True:
            found = match(data, position)
            assert found is not None, "the pattern matches nothing at least"
            position = found.end()
            if position >= end:
                self.fail("it ends early", end)
            opcode = data[position]
            if opcode == _STOP:
                break
            step = _STEPS.get(opcode, _refuse)
            position = step(self, position)
            if position > end:
                self.fail("a value is longer than the data", end)
        if position != end - 1:
            self.fail("more data follows its end", position)

    def string(self, start: int, length: int) -> int:
        if length >= _PAYLOAD_BYTES:
            self.strings.append((start, start + length))
        return start + length

    def line(self, start: int) -> int:
        """The position after the newline that ends the line at ``start``."""
        newline = self.data.find(b"\n", start)
        if newline < 0:
            self.fail("a line does not end", start)
        return newline + 1

    def integer(self, start: int, length: int) -> int:
        self.num_big_ints += length > 8
        if length > MAX_INT_BYTES or self.num_big_ints > MAX_BIG_INTS:
            self.fail("integers of absurd size", start)
        return start + length

    def count(self, opcodes: bytes) -> int:
        """At most how many of ``opcodes`` there are: bytes of these values outside of long strings."""
        total = 0
        for opcode in opcodes:
            total += self.data.count(opcode) - sum(self.data.count(opcode, *span) for span in self.strings)
        return total


def _scan(data: bytes, path: str) -> int:
    """Refuse what the C unpickler must not see; returns at most how deep tuples nest."""
    scan = _Scan(data, path)
    scan.run()
    num_tuples = scan.count(_TUPLES)
    num_containers = num_tuples + scan.count(_CONTAINERS) + 4 * scan.count(_SETS)
    if num_containers > SPARE_CONTAINERS + len(data) // 2:
        scan.fail(f"{len(data):,} bytes make {num_containers:,} objects", len(data))
    return num_tuples


def _fixed_opcodes(max_memo: int) -> re.Pattern[bytes]:
    # Rounded up to a power of two, so that few patterns are ever compiled.
    return _pattern((max_memo >> 16).bit_length())


@cache
def _pattern(memo_bits: int) -> re.Pattern[bytes]:
    """All fixed opcodes in a row, LONG_BINPUT with an index below ``2 ** (16 + memo_bits)``.

    A flat alternative in one loop is a third slower: runs of plain opcodes are the common case.
    """
    low, high = (1 << min(memo_bits, 8)) - 1, (1 << max(memo_bits - 8, 0)) - 1
    put = rb"r..[\x00-\x%02x][\x00-\x%02x]" % (low, min(high, 255))
    return re.compile(rb"(?s:" + _PLAIN + rb"*+(?:(?:" + _FIXED + rb"|" + put + rb")" + _PLAIN + rb"*+)*+)")


def _refuse(scan: _Scan, position: int) -> NoReturn:
    opcode = scan.data[position]
    reasons = {0x82: "extension registry", 0x83: "extension registry", 0x84: "extension registry"}
    reasons |= {0x97: "out-of-band buffers", 0x98: "out-of-band buffers", ord("r"): "huge memo"}
    if opcode in reasons:
        scan.fail(f"it uses a {reasons[opcode]}" if opcode == ord("r") else f"it uses the {reasons[opcode]}", position)
    scan.fail(f"{opcode:#04x} is no opcode, or ends early", position)


def _sized(width: int) -> Callable[[_Scan, int], int]:
    def step(scan: _Scan, position: int) -> int:
        start = position + 1 + width
        return scan.string(start, int.from_bytes(scan.data[position + 1 : start], "little"))

    return step


def _long(width: int) -> Callable[[_Scan, int], int]:
    def step(scan: _Scan, position: int) -> int:
        start = position + 1 + width
        return scan.integer(start, int.from_bytes(scan.data[position + 1 : start], "little"))

    return step


def _text(scan: _Scan, position: int) -> int:
    stop = scan.line(position + 1)
    return scan.string(position + 1, stop - position - 1)


def _number(scan: _Scan, position: int) -> int:
    stop = scan.line(position + 1)
    return scan.integer(position + 1, stop - position - 1)


def _put(scan: _Scan, position: int) -> int:
    stop = scan.line(position + 1)
    index = scan.data[position + 1 : stop - 1]
    if not (index.isdigit() and len(index) < 11 and int(index) <= scan.max_memo):
        scan.fail("a huge memo index", position)
    return stop


def _two_lines(scan: _Scan, position: int) -> int:
    return scan.line(scan.line(position + 1))


_STOP = ord(".")
_STEPS: dict[int, Callable[[_Scan, int], int]] = {
    ord("X"): _sized(4),  # BINUNICODE
    0x8C: _sized(1),  # SHORT_BINUNICODE
    0x8D: _sized(8),  # BINUNICODE8
    ord("B"): _sized(4),  # BINBYTES
    ord("C"): _sized(1),  # SHORT_BINBYTES
    0x8E: _sized(8),  # BINBYTES8
    0x96: _sized(8),  # BYTEARRAY8
    ord("T"): _sized(4),  # BINSTRING
    ord("U"): _sized(1),  # SHORT_BINSTRING
    0x8A: _long(1),  # LONG1
    0x8B: _long(4),  # LONG4
    ord("I"): _number,  # INT
    ord("L"): _number,  # LONG
    ord("F"): _number,  # FLOAT
    ord("S"): _text,  # STRING
    ord("V"): _text,  # UNICODE
    ord("P"): _text,  # PERSID
    ord("g"): _number,  # GET
    ord("p"): _put,  # PUT
    ord("c"): _two_lines,  # GLOBAL
    ord("i"): _two_lines,  # INST
}

# -- 2. load ---------------------------------------------------------------------------------------------------------


class _Builder:
    """What ``find_class`` returns for a function: calling it builds a value, and nothing can be set on it."""

    __slots__ = ("_build", "ref")
    _build: Callable[..., Value]
    ref: GlobalRef

    def __init__(self, ref: GlobalRef, build: Callable[..., Value]) -> None:
        object.__setattr__(self, "ref", ref)
        object.__setattr__(self, "_build", build)

    def __call__(self, *args: Value) -> Value:
        return self._build(*args)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise MalformedError("a pickle changes a function")

    def __setstate__(self, state: object) -> NoReturn:
        raise MalformedError("a pickle changes a function")


class _SizeBuilder(_Builder):
    """``torch.Size``, three for each chunk of a DCP: one frame, and its content is checked when all is read."""

    __slots__ = ()

    def __call__(self, dims: Value = ()) -> Size:
        if len(dims) > MAX_DIMS:
            raise MalformedError(f"a tensor of {len(dims)} dims")
        return tuple.__new__(Size, dims)


class _PlaceholderType(SealedType):
    """A class of which nothing is known but its name; ``cls(*args)`` and ``cls.__new__`` both record."""

    ref: GlobalRef

    def __call__(cls, *args: Value) -> Value:  # noqa: N805
        return Opaque(cls.ref, args)


def _new(cls: _PlaceholderType, *args: Value, **kwargs: Value) -> Opaque:
    return Opaque(cls.ref, args, form="new", kwargs=kwargs or None)


def _placeholder(ref: GlobalRef) -> _PlaceholderType:
    # The opcode NEWOBJ accepts only true classes, so each name gets one.
    return _PlaceholderType("Placeholder", (), {"__slots__": (), "__new__": _new, "ref": ref})


class _Source:
    """``data`` as the file that the C unpickler wants: it peeks once at everything and then reads from memory."""

    __slots__ = ("_data", "_position")

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._position = 0

    def peek(self, size: int) -> bytes:
        return self._data if not self._position else b""

    def read(self, size: int) -> bytes:
        start = self._position
        self._position = min(start + size, len(self._data))
        return b"" if start else self._data[: self._position]

    def readline(self) -> bytes:
        return b""


PersistentLoad = Callable[[Value], Value]


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, persistent_load: PersistentLoad | None) -> None:
        # What torch.load assumes of the byte strings of Python 2.
        super().__init__(_Source(data), encoding="utf-8")
        self._globals: dict[tuple[str, str], Any] = {}
        self._resolve = persistent_load
        self._spendable = 4 * len(data) + 4096

    def find_class(self, module: str, name: str) -> Any:
        key = (module, name)
        if key not in self._globals:
            if len(self._globals) >= MAX_GLOBALS:
                raise MalformedError(f"more than {MAX_GLOBALS:,} different classes and functions")
            self._globals[key] = self._global(_PY3_MODULES.get(module, module), name)
        return self._globals[key]

    def _global(self, module: str, name: str) -> Any:
        ref = GlobalRef(module, name)
        if (module, name) in CLASSES:
            return CLASSES[module, name]
        if (module, name) == ("torch", "Size"):
            return _SizeBuilder(ref, Size)
        if (module, name) in _BUILDERS:
            return _Builder(ref, _BUILDERS[module, name])
        if (module, name) in _COPIERS:
            copier = _COPIERS[module, name]
            return _Builder(ref, lambda *args: copier(self._paid(args)))
        return ref if ref.dtype else _placeholder(ref)

    def _paid(self, args: tuple[Value, ...]) -> tuple[Value, ...]:
        """``args``, of which a copy will be made: calling on one long string again and again would fill memory."""
        self._spendable -= sum(len(arg) for arg in args if hasattr(arg, "__len__")) + 1
        if self._spendable < 0:
            raise MalformedError("it copies the same data too many times over")
        return args

    def persistent_load(self, pid: Value) -> Value:
        if self._resolve is None:
            raise MalformedError("it refers to data outside of it")
        named = tuple(map(_named, pid)) if type(pid) is tuple else pid
        return self._resolve(named)


def _named(value: Value) -> Value:
    """``value``, or its name if it is a class or function."""
    if isinstance(value, _Builder | _PlaceholderType):
        return value.ref
    return GLOBALS.get(value, value) if isinstance(value, SealedType) else value


_PY3_MODULES = {"__builtin__": "builtins", "copy_reg": "copyreg"}
"""Names of Python 2, which protocols 0 to 2 use to this day."""


def loads(data: bytes, *, path: str, persistent_load: PersistentLoad | None = None) -> Value:
    """The value that the pickle ``data`` describes, of builtin data and the types of ``values``; nothing is run.

    ``persistent_load`` gives the values of persistent ids; in a tuple it gets, classes are ``GlobalRef``.

    Raises:
        MalformedError: not exactly one pickle, or one that breaks a bound of this module.
        UnsupportedError: a tensor of a kind that is not handled.
        MemoryBudgetError: there is not enough memory for it.
    """
    try:
        num_tuples = _scan(data, path)
        with _gc_paused(len(data) >= GC_PAUSE_BYTES):
            return _on_stack(num_tuples, lambda: _load(data, persistent_load))
    except CkptError as error:
        error.path = error.path or path
        raise
    except (MemoryError, threading.ThreadError) as error:
        raise MemoryBudgetError("there is not enough memory to read this pickle", path=path) from error
    except Exception as error:
        # The C unpickler meets malformed input with whatever exception is at hand.
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise MalformedError(f"the pickle is malformed: {reason}", path=path) from error


def _load(data: bytes, persistent_load: PersistentLoad | None) -> Value:
    return _Settler().settle(_Unpickler(data, persistent_load).load())


@contextmanager
def _gc_paused(pause: bool) -> Iterator[None]:
    enabled = pause and gc.isenabled()
    if enabled:
        gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


_stack_size_lock = threading.Lock()


def _on_stack(num_tuples: int, work: Callable[[], Value]) -> Value:
    """What ``work`` returns or raises, run where the C stack holds ``num_tuples`` tuples inside each other."""
    if num_tuples <= TUPLES_ON_ANY_STACK:
        return work()
    needed = num_tuples * STACK_BYTES_PER_TUPLE + (1 << 20)
    if needed > MAX_STACK_BYTES:
        raise UnsupportedError(f"a pickle of {num_tuples:,} tuples is too large")
    outcome = _Outcome()
    with _stack_size_lock:
        before = threading.stack_size(-(-needed // 4096) * 4096)
        try:
            thread = threading.Thread(target=outcome.run, args=(work,), name="unpickle", daemon=True)
            thread.start()
        except RuntimeError as error:
            raise MemoryError from error
        finally:
            threading.stack_size(before)
    thread.join()
    return outcome.result()


class _Outcome:
    __slots__ = ("_error", "_value")

    def __init__(self) -> None:
        self._error: BaseException | None = None
        self._value: Value = None

    def run(self, work: Callable[[], Value]) -> None:
        try:
            self._value = work()
        except BaseException as error:
            self._error = error

    def result(self) -> Value:
        if self._error is not None:
            raise self._error
        return self._value


# Builders: the functions that a pickle of torch may call, as values. Positional arguments as torch passes them.


def _tensor(
    storage: Value,
    storage_offset: Value,
    size: Value,
    strides: Value,
    requires_grad: Value = False,
    backward_hooks: Value = None,
    metadata: Value = None,
    *,
    dtype: DType | None = None,
) -> StoredTensor:
    """``torch._utils._rebuild_tensor`` and ``_v2``. Hooks are not saved by torch (always an empty OrderedDict)."""
    if type(storage) is not StorageRef:
        raise MalformedError("a tensor views something that is no storage")
    if metadata:
        raise UnsupportedError(f"a tensor is stored with the flags {_flags(metadata)}, which change its values")
    dtype = dtype or storage.dtype
    if dtype is None:
        raise MalformedError("a tensor views an untyped storage without saying of what type", key=storage.key)
    return StoredTensor(storage, dtype, storage_offset, _ints(size), _ints(strides), requires_grad is True)


def _flags(metadata: Value) -> str:
    return ", ".join(sorted(map(str, metadata))) if isinstance(metadata, dict) else type(metadata).__name__


def _ints(values: Value) -> tuple[int, ...]:
    if not isinstance(values, tuple | list) or len(values) > MAX_DIMS:
        raise MalformedError("the shape of a tensor is no tuple")
    return tuple(values)


def _tensor_v3(
    storage: Value,
    storage_offset: Value,
    size: Value,
    strides: Value,
    requires_grad: Value,
    backward_hooks: Value,
    dtype: Value,
    metadata: Value = None,
) -> StoredTensor:
    return _tensor(storage, storage_offset, size, strides, requires_grad, backward_hooks, metadata, dtype=_dtype(dtype))


def _dtype(value: Value) -> DType:
    found = value.dtype if type(value) is GlobalRef else None
    if found is None:
        raise UnsupportedError(f"a tensor has the element type {_named(value)}, which is not handled")
    return found


def _meta_tensor(dtype: Value, size: Value, strides: Value, requires_grad: Value) -> StoredTensor:
    return StoredTensor(None, _dtype(dtype), 0, _ints(size), _ints(strides), requires_grad is True)


def _device_tensor(data: Value, dtype: Value, device: Value, requires_grad: Value) -> StoredTensor:
    """``_rebuild_device_tensor_from_cpu_tensor``: where the tensor lived does not matter, a cast would."""
    if type(data) is not StoredTensor or data.dtype is not _dtype(dtype):
        raise UnsupportedError("a tensor of another device is stored as another type")
    return _rewrapped(data, data.wrapper, requires_grad, data.state)


def _rewrapped(data: StoredTensor, wrapper: GlobalRef | None, requires_grad: Value, state: Value) -> StoredTensor:
    return StoredTensor(
        data.storage, data.dtype, data.storage_offset, data.shape, data.strides, requires_grad is True, wrapper, state
    )


def _parameter(data: Value, requires_grad: Value, backward_hooks: Value, state: Value = None) -> Value:
    """``torch._utils._rebuild_parameter`` and ``_rebuild_parameter_with_state``."""
    if type(data) is not StoredTensor:
        return Opaque(PARAMETER, (data, requires_grad))
    return _rewrapped(data, PARAMETER, requires_grad, state)


def _from_type(function: Value, kind: Value, args: Value, state: Value) -> Value:
    """``torch._tensor._rebuild_from_type_v2``: ``function(*args)`` as a ``kind`` with the attributes ``state``."""
    data = function(*args) if isinstance(function, _Builder) and type(args) is tuple else None
    wrapper = _named(kind)
    if type(data) is not StoredTensor or type(wrapper) is not GlobalRef:
        return Opaque(GlobalRef("torch._tensor", "_rebuild_from_type_v2"), (function, kind, args, state))
    return _rewrapped(data, wrapper, data.requires_grad, state)


def _encode(args: tuple[Value, ...]) -> Value:
    """``_codecs.encode(text, "latin1")``: how protocol 2 writes bytes."""
    if len(args) != 2 or type(args[0]) is not str or args[1] not in ("latin1", "latin-1"):
        return Opaque(GlobalRef("_codecs", "encode"), args)
    return args[0].encode("latin-1")


def _bytearray(args: tuple[Value, ...]) -> Value:
    if not args:
        return bytearray()
    if len(args) == 1 and type(args[0]) in (bytes, list):
        return bytearray(args[0])
    encoded = _encode(args)
    return bytearray(encoded) if type(encoded) is bytes else Opaque(GlobalRef("builtins", "bytearray"), args)


def _collection(kind: type) -> Callable[[tuple[Value, ...]], Value]:
    def build(args: tuple[Value, ...]) -> Value:
        if len(args) > 1 or (args and type(args[0]) not in (list, tuple)):
            return Opaque(GlobalRef("builtins", kind.__name__), args)
        return kind(*args)

    return build


def _ordered_dict(args: tuple[Value, ...]) -> Value:
    """Python 2 passed the items as one list of pairs; Python 3 sets them one by one."""
    return OrderedDict([(key, value) for key, value in args[0]] if args else ())


def _default_dict(args: tuple[Value, ...]) -> Value:
    return DefaultDict(_named(args[0]) if args else None, dict(*args[1:]))


def _complex(*args: Value) -> Value:
    if all(type(arg) in (int, float) for arg in args):
        return complex(*args)
    return Opaque(GlobalRef("builtins", "complex"), args)


def _reconstructor(kind: Value, base: Value, state: Value) -> Value:
    """``copyreg._reconstructor``: how protocols 0 and 1 make an object of a class without ``__reduce__``."""
    plain = state is None and _named(base) == GlobalRef("builtins", "object")
    if plain and isinstance(kind, _PlaceholderType):
        return Opaque(kind.ref, form="new")
    if plain and isinstance(kind, SealedType):
        blank: Value = object.__new__(kind)  # type: ignore[arg-type]
        return blank
    return Opaque(GlobalRef("copyreg", "_reconstructor"), (kind, base, state))


_BUILDERS: dict[tuple[str, str], Callable[..., Value]] = {
    ("torch._utils", "_rebuild_tensor"): _tensor,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_tensor_v3"): _tensor_v3,
    ("torch._utils", "_rebuild_parameter"): _parameter,
    ("torch._utils", "_rebuild_parameter_with_state"): _parameter,
    ("torch._utils", "_rebuild_meta_tensor_no_storage"): _meta_tensor,
    ("torch._utils", "_rebuild_device_tensor_from_cpu_tensor"): _device_tensor,
    ("torch._tensor", "_rebuild_from_type_v2"): _from_type,
    ("builtins", "complex"): _complex,
    ("copyreg", "_reconstructor"): _reconstructor,
}
"""The allow-list of functions. All others, and all classes but those of a DCP, are recorded."""

_COPIERS: dict[tuple[str, str], Callable[[tuple[Value, ...]], Value]] = {
    ("_codecs", "encode"): _encode,
    ("builtins", "bytearray"): _bytearray,
    ("builtins", "set"): _collection(set),
    ("builtins", "frozenset"): _collection(frozenset),
    ("collections", "OrderedDict"): _ordered_dict,
    ("collections", "defaultdict"): _default_dict,
}
"""Builders that copy what they are given, which is counted against the size of the pickle."""

# -- 3. settle -------------------------------------------------------------------------------------------------------

_SCALARS = frozenset({type(None), bool, int, float, complex, str, bytes, bytearray, StorageRef, GlobalRef})
_IN_PROGRESS = -1


class _Settler:
    """Walks a loaded value once: bounds nesting, names stray classes, re-checks records."""

    def __init__(self) -> None:
        # id -> (the object, kept alive so that its id stays its own; what replaces it; how deep it nests)
        self._done: dict[int, tuple[Value, Value, int]] = {}

    def settle(self, value: Value) -> Value:
        return self._visit(value, 0)[0]

    def _visit(self, value: Value, depth: int) -> tuple[Value, int]:
        kind = type(value)
        if kind in _SCALARS:
            return value, 0
        if kind is Size:
            return value.check(), 0
        if isinstance(value, _Builder | SealedType):
            return _named(value), 0
        known = self._done.get(id(value))
        if known is None:
            if depth >= MAX_DEPTH:
                raise MalformedError(f"values lie more than {MAX_DEPTH} deep inside each other")
            self._done[id(value)] = (value, value, _IN_PROGRESS)
            replaced, height = self._descend(value, depth + 1)
            self._done[id(value)] = (value, replaced, height + 1)
            return replaced, height + 1
        _, replaced, height = known
        if height == _IN_PROGRESS and not isinstance(value, Opaque):
            raise MalformedError("a container lies inside itself")
        if depth + height > MAX_DEPTH:
            raise MalformedError(f"values lie more than {MAX_DEPTH} deep inside each other")
        return replaced, max(height, 0)

    def _descend(self, value: Value, depth: int) -> tuple[Value, int]:
        if isinstance(value, list):
            return value, self._in_place(value, depth)
        if isinstance(value, dict):
            return value, self._dict(value, depth)
        if isinstance(value, tuple | set | frozenset):
            return self._rebuilt(value, depth)
        if isinstance(value, Opaque):
            return value, self._opaque(value, depth)
        if isinstance(value, StoredTensor):
            return self._tensor(value, depth)
        if isinstance(value, Record):
            return value, self._all(value.check(), depth)[1]
        raise MalformedError(f"a {type(value).__name__} where a value belongs")

    def _all(self, values: Iterable[Value], depth: int) -> tuple[list[Value], int]:
        visited = [self._visit(value, depth) for value in values]
        return [value for value, _ in visited], max((height for _, height in visited), default=0)

    def _in_place(self, value: list[Value], depth: int) -> int:
        if set(map(type, value)) <= _SCALARS:
            return 0
        settled, height = self._all(value, depth)
        if any(new is not old for new, old in zip(settled, value, strict=True)):
            value[:] = settled
        return height

    def _dict(self, value: dict[Value, Value], depth: int) -> int:
        more = value.attributes if isinstance(value, OrderedDict) else None
        extra_height = self._visit(more, depth)[1]
        if isinstance(value, DefaultDict):
            value.factory, extra_height = self._visit(value.factory, depth)
        keys_height = 0
        if not set(map(type, value)) <= _SCALARS:
            keys, keys_height = self._all(list(value), depth)
            if any(new is not old for new, old in zip(keys, list(value), strict=True)):
                items = list(zip(keys, list(value.values()), strict=True))
                value.clear()
                value.update(items)
        if set(map(type, value.values())) <= _SCALARS:
            return max(extra_height, keys_height)
        return max(extra_height, keys_height, self._dict_values(value, depth))

    def _dict_values(self, value: dict[Value, Value], depth: int) -> int:
        settled, height = self._all(list(value.values()), depth)
        for (key, old), new in zip(list(value.items()), settled, strict=True):
            if new is not old:
                value[key] = new
        return height

    def _rebuilt(self, value: Any, depth: int) -> tuple[Value, int]:
        if set(map(type, value)) <= _SCALARS:
            return value, 0
        before = list(value)
        settled, height = self._all(before, depth)
        unchanged = all(new is old for new, old in zip(settled, before, strict=True))
        return (value if unchanged else type(value)(settled)), height

    def _opaque(self, value: Opaque, depth: int) -> int:
        parts = (value.ref, value.args, value.kwargs, value.state, value.items, value.pairs)
        settled, height = self._all(parts, depth)
        value.ref, value.args, value.kwargs, value.state, value.items, value.pairs = settled
        return height

    def _tensor(self, value: StoredTensor, depth: int) -> tuple[Value, int]:
        state, height = self._visit(value.state, depth)
        if state is value.state:
            return value, height
        return _rewrapped(value, value.wrapper, value.requires_grad, state), height

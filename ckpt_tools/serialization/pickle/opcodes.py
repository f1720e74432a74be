"""Opcodes as functions of the machine and the position after the opcode, which return the position of the next.

CPython's Lib/pickletools.py documents each. Only what picklers write is read: those of CPython, in C and in Python, in
protocols 0 to 5, Python 2's, and torch's. CPython's two unpicklers read more, and not always alike: numbers in octal,
with signs and with underscores, frames that cut an opcode, places of the memo out of order. What two unpicklers could
read in two ways is refused.
"""

from __future__ import annotations

import codecs
import re
import struct
from collections.abc import Callable
from typing import NoReturn

from ckpt_tools.core.values import GlobalRef, Opaque, OrderedDict, Value, kind_of
from ckpt_tools.serialization.pickle.dcp_metadata import CLASSES, Record
from ckpt_tools.serialization.pickle.limits import checked_keys, insert
from ckpt_tools.serialization.pickle.machine import UNSET, ArrayFollows, FrameStarts, Machine, Step, Stop, TooLongError
from ckpt_tools.serialization.pickle.numpy_rules import JOBLIB_ARRAY
from ckpt_tools.serialization.pickle.shapes import named

MAX_VALUE_BYTES = 1 << 28
"""Bytes of one string: an array that numpy pickles is one. Longer ones would be held in memory several times over."""

MAX_INT_BYTES = 1024
"""Bytes of an integer, and characters of a number in text form. Longer ones are slow to print."""

# Opcodes. Each function gets the machine and the position after its opcode, and returns that of the next.


def _unknown(machine: Machine, at: int) -> int:
    opcode = machine.data[at - 1]
    if opcode in b"\x82\x83\x84":
        machine.fail("it uses the extension registry, which names code in the reader's process")
    if opcode in b"\x97\x98":
        machine.fail("it refers to buffers outside of it")
    machine.fail(f"{opcode:#04x} is not an opcode")


def _proto(machine: Machine, at: int) -> int:
    protocol = machine.data[at]
    if machine.at or not 2 <= protocol <= 5:
        machine.fail("its protocol is stated where no pickler states it" if machine.at else _UNKNOWN % protocol)
    machine.protocol = protocol
    return at + 1


_UNKNOWN = "protocol %d is unknown"

MIN_FRAME_BYTES = 4
"""Picklers write less than this without a frame."""


def _frame(machine: Machine, at: int) -> NoReturn:
    start = at + 8
    num_bytes = _U64.unpack_from(machine.data, at)[0]
    if num_bytes > len(machine.data) - start:
        machine.fail_early("it ends early")
    if machine.is_framed or machine.protocol < 4 or num_bytes < MIN_FRAME_BYTES:
        machine.fail("a frame is where no pickler starts one")
    raise FrameStarts(start, start + num_bytes)


def _stop(machine: Machine, at: int) -> NoReturn:
    raise Stop


U32, _U64, _I32, _F64 = struct.Struct("<I"), struct.Struct("<Q"), struct.Struct("<i"), struct.Struct(">d")


def _constant(value: Value) -> Step:
    def step(machine: Machine, at: int) -> int:
        machine.stack.append(value)
        return at

    return step


def _unsigned(width: int) -> Step:
    def step(machine: Machine, at: int) -> int:
        machine.stack.append(int.from_bytes(machine.data[at : at + width], "little"))
        return at + width

    return step


def _byte(machine: Machine, at: int) -> int:
    machine.stack.append(machine.data[at])
    return at + 1


def _number(form: struct.Struct) -> Step:
    def step(machine: Machine, at: int) -> int:
        machine.stack.append(form.unpack_from(machine.data, at)[0])
        return at + form.size

    return step


def read_span(machine: Machine, at: int, width: int) -> tuple[int, int]:
    """The payload that a length of ``width`` bytes announces; it must be there."""
    start = at + width
    stop = start + int.from_bytes(machine.data[at:start], "little")
    _check_length(machine, stop - start)
    if stop > len(machine.data):
        machine.fail_early("a value is longer than the data")
    return start, stop


def _sized(width: int, made: Callable[[bytes], Value]) -> Step:
    """A value that ``made`` makes of the bytes after a length of ``width`` bytes."""

    def step(machine: Machine, at: int) -> int:
        start, stop = read_span(machine, at, width)
        machine.stack.append(made(machine.data[start:stop]))
        return stop

    return step


def _text(data: bytes) -> str:
    return str(data, "utf-8", "surrogatepass")


def _py2_text(data: bytes) -> str:
    """A byte string of Python 2: only of ASCII, which all loaders read alike. Others depend on the loader."""
    return str(data, "ascii")


def _short_text(machine: Machine, at: int) -> int:
    start = at + 1
    stop = start + machine.data[at]
    machine.stack.append(str(machine.data[start:stop], "utf-8", "surrogatepass"))
    return stop


def _long(width: int) -> Step:
    def step(machine: Machine, at: int) -> int:
        start, stop = read_span(machine, at, width)
        if stop - start > MAX_INT_BYTES:
            machine.fail("an integer of absurd size")
        machine.stack.append(int.from_bytes(machine.data[start:stop], "little", signed=True))
        return stop

    return step


def _check_length(machine: Machine, num_bytes: int) -> None:
    """Refuses a long value before the rest of it is read."""
    if num_bytes > MAX_VALUE_BYTES:
        raise TooLongError(
            f"the pickle holds a string of {num_bytes:,} bytes at byte {machine.at:,}, and at most "
            f"{MAX_VALUE_BYTES:,} are read; save large arrays as tensors, with torch.save or safetensors"
        )


def read_line(machine: Machine, at: int) -> tuple[bytes, int]:
    newline = machine.data.find(b"\n", at)
    _check_length(machine, (newline if newline >= 0 else len(machine.data)) - at)
    if newline < 0:
        machine.fail_early("a line does not end")
    return machine.data[at:newline], newline + 1


def _number_line(machine: Machine, at: int) -> tuple[bytes, int]:
    line, after = read_line(machine, at)
    if len(line) > MAX_INT_BYTES:
        machine.fail("a number of absurd size")
    return line, after


_PLAIN = re.compile(rb"0|-?[1-9][0-9]*")
"""A whole number as picklers write it: no sign but a minus, no zeros in front, no underscores."""

_UNUSUAL = "a number is written as no pickler writes it"


def _whole(machine: Machine, line: bytes) -> int:
    if not _PLAIN.fullmatch(line):
        machine.fail(_UNUSUAL)
    return int(line)


def _int_line(machine: Machine, at: int) -> int:
    line, after = _number_line(machine, at)
    machine.stack.append(line == b"01" if line in (b"00", b"01") else _whole(machine, line))
    return after


def _long_line(machine: Machine, at: int) -> int:
    line, after = _number_line(machine, at)
    machine.stack.append(_whole(machine, line[:-1] if line.endswith(b"L") else b""))
    return after


def _float_line(machine: Machine, at: int) -> int:
    line, after = _number_line(machine, at)
    value = float(line)
    if repr(value).encode() != line:
        machine.fail(_UNUSUAL)
    machine.stack.append(value)
    return after


def _quoted_line(machine: Machine, at: int) -> int:
    line, after = read_line(machine, at)
    text = str(codecs.escape_decode(line[1:-1])[0], "ascii") if line else ""
    if repr(text).encode() != line:
        machine.fail("a string is written as no pickler writes it")
    machine.stack.append(text)
    return after


def _unicode_line(machine: Machine, at: int) -> int:
    line, after = read_line(machine, at)
    value = _RAW_UNICODE.decode(line)[0]
    if _RAW_UNICODE.encode(value.translate(_ESCAPED))[0] != line:
        machine.fail("a string is written as no pickler writes it")
    machine.stack.append(value)
    return after


_ESCAPED = {ord(character): f"\\u{ord(character):04x}" for character in "\\\0\n\r\x1a"}
"""Escapes of Python 3 picklers, which keep a string on one line."""

# Looked up here, since Python imports a codec where it is first used: reading a pickle imports nothing at all.
_RAW_UNICODE = codecs.lookup("raw-unicode-escape")

# Names and calls


def _global(machine: Machine, at: int) -> int:
    module, at = read_line(machine, at)
    name, at = read_line(machine, at)
    machine.stack.append(machine.name(module.decode(), name.decode()))
    return at


def _stack_global(machine: Machine, at: int) -> int:
    name, module = machine.stack.pop(), machine.stack.pop()
    if type(name) is not str or type(module) is not str:
        machine.fail("a name that is not a string")
    machine.stack.append(machine.name(module, name))
    return at


def _reduce(machine: Machine, at: int) -> int:
    args, function = machine.stack.pop(), machine.stack.pop()
    machine.stack.append(called(machine, function, args))
    return at


def called(machine: Machine, function: Value, args: Value) -> Value:
    build = machine.calls.get(id(function))
    machine.spend(1)
    if type(args) is not tuple:
        machine.fail("arguments that are not a tuple")
    if build is not None:
        return build(machine, args)
    if type(function) is not GlobalRef and type(function) is not Opaque:
        machine.fail(f"a {kind_of(function)} is called")
    machine.spend(3)
    return recorded(machine, Opaque(function, args))


def _newobj(machine: Machine, at: int) -> int:
    args, kind = machine.stack.pop(), machine.stack.pop()
    machine.stack.append(made(machine, kind, args, None))
    return at


def _newobj_ex(machine: Machine, at: int) -> int:
    kwargs, args, kind = machine.stack.pop(), machine.stack.pop(), machine.stack.pop()
    if type(kwargs) is not dict or set(map(type, kwargs)) - {str}:
        machine.fail("keyword arguments that are not a dict by name")
    machine.stack.append(made(machine, kind, args, kwargs or None))
    return at


def made(machine: Machine, kind: Value, args: Value, kwargs: dict[str, Value] | None) -> Value:
    # A class inside another is ``getattr(Outer, "Inner")`` in protocol 2, which is not run.
    is_class = named(kind) is not None and (type(kind) is not Opaque or kind.state is None)
    if not is_class or type(args) is not tuple:
        machine.fail(f"an object of a {kind_of(kind)}, which is not a class")
    machine.spend(4)
    record = CLASSES.get((kind.module, kind.name)) if type(kind) is GlobalRef else None
    if record is not None and not args and not kwargs:
        return object.__new__(record)
    return recorded(machine, Opaque(kind, args, form="new", kwargs=kwargs))


def recorded(machine: Machine, made: Opaque) -> Opaque:
    """Record an object with its position; ``closed_list`` judges every recorded one."""
    machine.objects.append((machine.at, made))
    return made


def _build(machine: Machine, at: int) -> int:
    state, target = machine.stack.pop(), machine.stack[-1]
    if not isinstance(target, Record | Opaque | OrderedDict):
        machine.fail(f"it sets the state of a {kind_of(target)}, which has none")
    if state is None:
        machine.fail("it sets a state of nothing")
    if isinstance(target, Record) and target.is_filled:
        machine.fail(f"it sets the state of one {kind_of(target)} twice, which no pickler does")
    # A copy: an unpickler copies the items, and keeps no hold of the dict.
    machine.copied((state,))
    target.build(dict(state) if type(state) is dict else state)
    if type(target) is Opaque and target.ref == JOBLIB_ARRAY:
        raise ArrayFollows(at, target)
    return at


def _persistent_line(machine: Machine, at: int) -> int:
    line, at = read_line(machine, at)
    machine.stack.append(_resolved(machine, line.decode("ascii")))
    return at


def _persistent(machine: Machine, at: int) -> int:
    machine.stack.append(_resolved(machine, machine.stack.pop()))
    return at


def _resolved(machine: Machine, pid: Value) -> Value:
    if machine.resolve is None:
        machine.fail("it refers to data outside of it")
    return machine.resolve(pid)


# Stack and memo


def _mark(machine: Machine, at: int) -> int:
    machine.marks.append(machine.stack)
    machine.stack = []
    machine.budget -= 1
    if machine.budget < 0:
        machine.spend(0)
    return at


def _pop(machine: Machine, at: int) -> int:
    if machine.stack:
        machine.stack.pop()
        return at
    return _pop_mark(machine, at)


def _pop_mark(machine: Machine, at: int) -> int:
    machine.pop_mark()
    return at


def _refused(reason: str) -> Step:
    def step(machine: Machine, at: int) -> NoReturn:
        machine.fail(reason)

    return step


def _memoize(machine: Machine, at: int) -> int:
    machine.memo.append(machine.stack[-1])
    return at


def _put(machine: Machine, index: int) -> None:
    memo = machine.memo
    if index == 1 and not memo:
        # Python 2 counted from one.
        memo.append(UNSET)
    if index != memo.next_place:
        machine.fail("a place of the memo is out of order")
    memo.append(machine.stack[-1])


def _binput(machine: Machine, at: int) -> int:
    _put(machine, machine.data[at])
    return at + 1


def _long_binput(machine: Machine, at: int) -> int:
    _put(machine, U32.unpack_from(machine.data, at)[0])
    return at + 4


def _put_line(machine: Machine, at: int) -> int:
    line, at = _number_line(machine, at)
    _put(machine, _whole(machine, line))
    return at


def _fetched(machine: Machine, value: Value, at: int) -> int:
    """Push ``value`` out of the memo, or read a whole record where it is the class of one."""
    macro = machine.macros.get(id(value))
    if macro is not None:
        after = macro.run(at)
        if after:
            return after
    elif value is UNSET:
        machine.fail("a memo index that was never put")
    machine.stack.append(value)
    return at


def _binget(machine: Machine, at: int) -> int:
    place, memo = machine.data[at], machine.memo
    return _fetched(machine, memo[place] if place < memo.dense else memo.fetch(place), at + 1)


def _long_binget(machine: Machine, at: int) -> int:
    place, memo = U32.unpack_from(machine.data, at)[0], machine.memo
    return _fetched(machine, memo[place] if place < memo.dense else memo.fetch(place), at + 4)


def _get_line(machine: Machine, at: int) -> int:
    line, at = _number_line(machine, at)
    index = _whole(machine, line)
    if index < 0:
        machine.fail("a memo index that is not a number")
    return _fetched(machine, machine.memo.fetch(index), at)


# Containers


def _empty(kind: Callable[[], Value], cost: int) -> Step:
    def step(machine: Machine, at: int) -> int:
        machine.spend(cost)
        machine.stack.append(kind())
        return at

    return step


def _of_mark(made: Callable[[Machine, list[Value]], Value]) -> Step:
    """The value that ``made`` makes of the items since the last mark."""

    def step(machine: Machine, at: int) -> int:
        items = machine.pop_mark()
        machine.stack.append(made(machine, items))
        return at

    return step


def _tuple_of(num: int) -> Step:
    def step(machine: Machine, at: int) -> int:
        stack = machine.stack
        if len(stack) < num:
            machine.fail("a tuple of more items than there are")
        machine.budget -= 1
        if machine.budget < 0:
            machine.spend(0)
        stack[-num:] = [tuple(stack[-num:])]
        return at

    return step


def _dict(machine: Machine, items: list[Value]) -> dict[Value, Value]:
    made: dict[Value, Value] = {}
    insert(machine, made, items)
    return made


def _frozenset(machine: Machine, items: list[Value]) -> frozenset[Value]:
    machine.spend(3)
    return frozenset(checked_keys(machine, None, items))


def _append(machine: Machine, at: int) -> int:
    item = machine.stack.pop()
    _items_of(machine).append(item)
    return at


def _appends(machine: Machine, at: int) -> int:
    items = machine.pop_mark()
    _items_of(machine).extend(items)
    return at


def _items_of(machine: Machine) -> list[Value]:
    target = machine.stack[-1]
    if type(target) is list:
        return target
    if type(target) is not Opaque:
        machine.fail(f"it appends to a {kind_of(target)}")
    if target.state is not None:
        machine.fail(f"it appends to a {kind_of(target)} that has its state already")
    return target.items


def _additems(machine: Machine, at: int) -> int:
    items, target = machine.pop_mark(), machine.stack[-1]
    if type(target) is not set:
        machine.fail(f"it adds to a {kind_of(target)}")
    target.update(checked_keys(machine, target, items))
    return at


def _setitem(machine: Machine, at: int) -> int:
    value, key = machine.stack.pop(), machine.stack.pop()
    insert(machine, machine.stack[-1], [key, value])
    return at


def _setitems(machine: Machine, at: int) -> int:
    items = machine.pop_mark()
    insert(machine, machine.stack[-1], items)
    return at


STEPS: list[Step] = [_unknown] * 256
for _opcode, _step in {
    b"\x80": _proto,
    b"\x95": _frame,
    b".": _stop,
    b"N": _constant(None),
    b"\x88": _constant(True),
    b"\x89": _constant(False),
    b")": _constant(()),
    b"K": _byte,
    b"M": _unsigned(2),
    b"J": _number(_I32),
    b"\x8a": _long(1),
    b"\x8b": _long(4),
    b"I": _int_line,
    b"L": _long_line,
    b"F": _float_line,
    b"G": _number(_F64),
    b"X": _sized(4, _text),
    b"\x8c": _short_text,
    b"\x8d": _sized(8, _text),
    b"V": _unicode_line,
    b"S": _quoted_line,
    b"T": _sized(4, _py2_text),
    b"U": _sized(1, _py2_text),
    b"B": _sized(4, bytes),
    b"C": _sized(1, bytes),
    b"\x8e": _sized(8, bytes),
    b"\x96": _sized(8, bytearray),
    b"c": _global,
    b"\x93": _stack_global,
    b"R": _reduce,
    b"\x81": _newobj,
    b"\x92": _newobj_ex,
    b"i": _refused("it makes an object of an old-style class of Python 2"),
    b"o": _refused("it makes an object of an old-style class of Python 2"),
    b"b": _build,
    b"P": _persistent_line,
    b"Q": _persistent,
    b"(": _mark,
    b"0": _pop,
    b"1": _pop_mark,
    b"2": _refused("it copies the top of the stack, which no pickler does"),
    b"\x94": _memoize,
    b"q": _binput,
    b"r": _long_binput,
    b"p": _put_line,
    b"h": _binget,
    b"j": _long_binget,
    b"g": _get_line,
    b"]": _empty(list, 1),
    b"}": _empty(dict, 1),
    b"\x8f": _empty(set, 4),
    b"t": _of_mark(lambda machine, items: tuple(items)),
    b"\x85": _tuple_of(1),
    b"\x86": _tuple_of(2),
    b"\x87": _tuple_of(3),
    b"l": _of_mark(lambda machine, items: items),
    b"d": _of_mark(_dict),
    b"\x91": _of_mark(_frozenset),
    b"a": _append,
    b"e": _appends,
    b"\x90": _additems,
    b"s": _setitem,
    b"u": _setitems,
}.items():
    STEPS[_opcode[0]] = _step

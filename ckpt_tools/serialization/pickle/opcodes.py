"""Opcodes as functions of the machine and the position after the opcode, which return the position of the next.

CPython's Lib/pickletools.py documents each. Only what picklers write is read: those of CPython, in C and in Python, in
protocols 0 to 5, Python 2's, and torch's. CPython's two unpicklers read more, and not always alike: numbers in octal,
with signs and with underscores, frames that cut an opcode, places of the memo out of order. What two unpicklers could
read in two ways is refused.
"""

from __future__ import annotations

import codecs
import pickle
import re
import struct
from collections.abc import Callable
from typing import NoReturn, TypeVar

from ckpt_tools.core.values import GlobalRef, Opaque, OrderedDict, Value, describe_kind
from ckpt_tools.serialization.pickle.dcp_metadata import RECORD_CLASSES, DcpRecord
from ckpt_tools.serialization.pickle.keys import check_keys, insert_items
from ckpt_tools.serialization.pickle.machine import (
    JOBLIB_ARRAY,
    UNSET,
    ArrayFollows,
    CallBuilder,
    FrameStarts,
    Machine,
    OpcodeStep,
    PickleStop,
    PickleTooLongError,
    UninterpretedCallError,
    resolve_name,
)

MAX_VALUE_BYTES = 1 << 28
"""Bytes of one string: an array that numpy pickles is one. Longer ones would be held in memory several times over."""

MAX_INT_BYTES = 1024
"""Bytes of an integer, and characters of a number in text form. Longer ones are slow to print."""

# Opcodes. Each function gets the machine and the position after its opcode, and returns that of the next.


def _refuse_unknown(machine: Machine, position: int) -> int:
    opcode = machine.data[position - 1]
    if opcode in b"\x82\x83\x84":
        machine.fail("it uses the extension registry, which names code in the reader's process")
    if opcode in b"\x97\x98":
        machine.fail("it refers to buffers outside of it")
    machine.fail(f"{opcode:#04x} is not an opcode")


OPCODE_STEPS: list[OpcodeStep] = [_refuse_unknown] * 256
"""The function of each opcode, by its byte."""

Step = TypeVar("Step", bound=OpcodeStep)


def _interprets(opcode: bytes) -> Callable[[Step], Step]:
    def enter(step: Step) -> Step:
        OPCODE_STEPS[opcode[0]] = step
        return step

    return enter


@_interprets(pickle.PROTO)
def _read_protocol(machine: Machine, position: int) -> int:
    protocol = machine.data[position]
    if machine.file_position:
        machine.fail("its protocol is stated where no pickler states it")
    if not 2 <= protocol <= 5:
        machine.fail(f"protocol {protocol} is unknown")
    machine.protocol = protocol
    return position + 1


MIN_FRAME_BYTES = 4
"""Picklers write less than this without a frame."""


@_interprets(pickle.FRAME)
def _start_frame(machine: Machine, position: int) -> NoReturn:
    start = position + 8
    num_bytes = _U64.unpack_from(machine.data, position)[0]
    if num_bytes > len(machine.data) - start:
        machine.fail_early("it ends early")
    if machine.is_framed or machine.protocol < 4 or num_bytes < MIN_FRAME_BYTES:
        machine.fail("a frame is where no pickler starts one")
    raise FrameStarts(start, start + num_bytes)


@_interprets(pickle.STOP)
def _raise_stop(machine: Machine, position: int) -> NoReturn:
    raise PickleStop


U32, _U64, _I32, _F64 = struct.Struct("<I"), struct.Struct("<Q"), struct.Struct("<i"), struct.Struct(">d")


def _make_constant_step(value: Value) -> OpcodeStep:
    def step(machine: Machine, position: int) -> int:
        machine.stack.append(value)
        return position

    return step


def _make_unsigned_step(width: int) -> OpcodeStep:
    def step(machine: Machine, position: int) -> int:
        machine.stack.append(int.from_bytes(machine.data[position : position + width], "little"))
        return position + width

    return step


@_interprets(pickle.BININT1)
def _push_byte(machine: Machine, position: int) -> int:
    machine.stack.append(machine.data[position])
    return position + 1


def _make_number_step(form: struct.Struct) -> OpcodeStep:
    def step(machine: Machine, position: int) -> int:
        machine.stack.append(form.unpack_from(machine.data, position)[0])
        return position + form.size

    return step


def read_span(machine: Machine, position: int, width: int) -> tuple[int, int]:
    """The payload that a length of ``width`` bytes announces; it must be there."""
    start = position + width
    stop = start + int.from_bytes(machine.data[position:start], "little")
    _check_value_length(machine, stop - start)
    if stop > len(machine.data):
        machine.fail_early("a value is longer than the data")
    return start, stop


def _make_sized_step(width: int, decode: Callable[[bytes], Value]) -> OpcodeStep:
    """A step that pushes what ``decode`` makes of the bytes after a length of ``width`` bytes."""

    def step(machine: Machine, position: int) -> int:
        start, stop = read_span(machine, position, width)
        machine.stack.append(decode(machine.data[start:stop]))
        return stop

    return step


def _decode_text(data: bytes) -> str:
    return str(data, "utf-8", "surrogatepass")


def _decode_py2_text(data: bytes) -> str:
    """A byte string of Python 2: only of ASCII, which all loaders read alike. Others depend on the loader."""
    return str(data, "ascii")


@_interprets(pickle.SHORT_BINUNICODE)
def _push_short_text(machine: Machine, position: int) -> int:
    start = position + 1
    stop = start + machine.data[position]
    machine.stack.append(str(machine.data[start:stop], "utf-8", "surrogatepass"))
    return stop


def _make_long_step(width: int) -> OpcodeStep:
    def step(machine: Machine, position: int) -> int:
        start, stop = read_span(machine, position, width)
        if stop - start > MAX_INT_BYTES:
            machine.fail("an integer of absurd size")
        machine.stack.append(int.from_bytes(machine.data[start:stop], "little", signed=True))
        return stop

    return step


def _check_value_length(machine: Machine, num_bytes: int) -> None:
    """Refuses a long value before the rest of it is read."""
    if num_bytes > MAX_VALUE_BYTES:
        raise PickleTooLongError(
            f"the pickle holds a string of {num_bytes:,} bytes at byte {machine.file_position:,}, and at most "
            f"{MAX_VALUE_BYTES:,} are read; save large arrays as tensors, with torch.save or safetensors"
        )


def read_line(machine: Machine, position: int) -> tuple[bytes, int]:
    newline = machine.data.find(b"\n", position)
    _check_value_length(machine, (newline if newline >= 0 else len(machine.data)) - position)
    if newline < 0:
        machine.fail_early("a line does not end")
    return machine.data[position:newline], newline + 1


def _read_number_line(machine: Machine, position: int) -> tuple[bytes, int]:
    line, after = read_line(machine, position)
    if len(line) > MAX_INT_BYTES:
        machine.fail("a number of absurd size")
    return line, after


_WHOLE_NUMBER = re.compile(rb"0|-?[1-9][0-9]*")
"""A whole number as picklers write it: no sign but a minus, no zeros in front, no underscores."""

_UNUSUAL_NUMBER = "a number is written as no pickler writes it"


def _parse_whole_number(machine: Machine, line: bytes) -> int:
    if not _WHOLE_NUMBER.fullmatch(line):
        machine.fail(_UNUSUAL_NUMBER)
    return int(line)


@_interprets(pickle.INT)
def _push_int_line(machine: Machine, position: int) -> int:
    line, after = _read_number_line(machine, position)
    machine.stack.append(line == b"01" if line in (b"00", b"01") else _parse_whole_number(machine, line))
    return after


@_interprets(pickle.LONG)
def _push_long_line(machine: Machine, position: int) -> int:
    line, after = _read_number_line(machine, position)
    machine.stack.append(_parse_whole_number(machine, line[:-1] if line.endswith(b"L") else b""))
    return after


@_interprets(pickle.FLOAT)
def _push_float_line(machine: Machine, position: int) -> int:
    line, after = _read_number_line(machine, position)
    value = float(line)
    if repr(value).encode() != line:
        machine.fail(_UNUSUAL_NUMBER)
    machine.stack.append(value)
    return after


@_interprets(pickle.STRING)
def _push_quoted_line(machine: Machine, position: int) -> int:
    line, after = read_line(machine, position)
    text = str(codecs.escape_decode(line[1:-1])[0], "ascii") if line else ""
    if repr(text).encode() != line:
        machine.fail("a string is written as no pickler writes it")
    machine.stack.append(text)
    return after


@_interprets(pickle.UNICODE)
def _push_unicode_line(machine: Machine, position: int) -> int:
    line, after = read_line(machine, position)
    value = _RAW_UNICODE.decode(line)[0]
    if _RAW_UNICODE.encode(value.translate(_UNICODE_ESCAPES))[0] != line:
        machine.fail("a string is written as no pickler writes it")
    machine.stack.append(value)
    return after


_UNICODE_ESCAPES = {ord(character): f"\\u{ord(character):04x}" for character in "\\\0\n\r\x1a"}
"""Escapes of Python 3 picklers, which keep a string on one line."""

# Looked up here, since Python imports a codec where it is first used: reading a pickle imports nothing at all.
_RAW_UNICODE = codecs.lookup("raw-unicode-escape")

# Names and calls


@_interprets(pickle.GLOBAL)
def _push_global(machine: Machine, position: int) -> int:
    module, position = read_line(machine, position)
    name, position = read_line(machine, position)
    machine.stack.append(machine.resolve_global(module.decode(), name.decode()))
    return position


@_interprets(pickle.STACK_GLOBAL)
def _push_stack_global(machine: Machine, position: int) -> int:
    name, module = machine.stack.pop(), machine.stack.pop()
    if type(name) is not str or type(module) is not str:
        machine.fail("a name that is not a string")
    machine.stack.append(machine.resolve_global(module, name))
    return position


@_interprets(pickle.REDUCE)
def _call_top(machine: Machine, position: int) -> int:
    args, function = machine.stack.pop(), machine.stack.pop()
    machine.stack.append(call_function(machine, function, args))
    return position


def call_function(machine: Machine, function: Value, args: Value) -> Value:
    build_call = machine.calls.get(id(function))
    machine.charge_containers(1)
    if type(args) is not tuple:
        machine.fail("arguments that are not a tuple")
    if build_call is not None:
        return build_or_record(machine, build_call, function, args)
    if type(function) is not GlobalRef and type(function) is not Opaque:
        machine.fail(f"a {describe_kind(function)} is called")
    machine.charge_containers(3)
    return record_object(machine, Opaque(function, args))


def build_or_record(machine: Machine, build_call: CallBuilder, function: Value, args: tuple[Value, ...]) -> Value:
    try:
        return build_call(machine, args)
    except UninterpretedCallError:
        return record_object(machine, Opaque(function, args))


@_interprets(pickle.NEWOBJ)
def _push_new_object(machine: Machine, position: int) -> int:
    args, kind = machine.stack.pop(), machine.stack.pop()
    machine.stack.append(make_object(machine, kind, args, None))
    return position


@_interprets(pickle.NEWOBJ_EX)
def _push_new_object_with_keywords(machine: Machine, position: int) -> int:
    kwargs, args, kind = machine.stack.pop(), machine.stack.pop(), machine.stack.pop()
    if type(kwargs) is not dict or set(map(type, kwargs)) - {str}:
        machine.fail("keyword arguments that are not a dict by name")
    machine.stack.append(make_object(machine, kind, args, kwargs or None))
    return position


def make_object(machine: Machine, kind: Value, args: Value, kwargs: dict[str, Value] | None) -> Value:
    # A class inside another is ``getattr(Outer, "Inner")`` in protocol 2, which is not run.
    is_class = resolve_name(kind) is not None and (type(kind) is not Opaque or kind.state is None)
    if not is_class or type(args) is not tuple:
        machine.fail(f"an object of a {describe_kind(kind)}, which is not a class")
    machine.charge_containers(4)
    record = RECORD_CLASSES.get((kind.module, kind.name)) if type(kind) is GlobalRef else None
    if record is not None and not args and not kwargs:
        return object.__new__(record)
    return record_object(machine, Opaque(kind, args, form="new", kwargs=kwargs))


def record_object(machine: Machine, opaque: Opaque) -> Opaque:
    """Record an object with its position; ``closed_list`` judges every recorded one."""
    machine.objects.append((machine.file_position, opaque))
    return opaque


@_interprets(pickle.BUILD)
def _set_state(machine: Machine, position: int) -> int:
    state, target = machine.stack.pop(), machine.stack[-1]
    if not isinstance(target, DcpRecord | Opaque | OrderedDict):
        machine.fail(f"it sets the state of a {describe_kind(target)}, which has none")
    if state is None:
        machine.fail("it sets a state of nothing")
    if isinstance(target, DcpRecord) and target.is_filled:
        machine.fail(f"it sets the state of one {describe_kind(target)} twice, which no pickler does")
    # A copy: an unpickler copies the items, and keeps no hold of the dict.
    machine.charge_copies((state,))
    target.set_state(dict(state) if type(state) is dict else state)
    if type(target) is Opaque and target.ref == JOBLIB_ARRAY:
        raise ArrayFollows(position, target)
    return position


@_interprets(pickle.PERSID)
def _push_persistent_line(machine: Machine, position: int) -> int:
    line, position = read_line(machine, position)
    machine.stack.append(_resolve_persistent_id(machine, line.decode("ascii")))
    return position


@_interprets(pickle.BINPERSID)
def _push_persistent(machine: Machine, position: int) -> int:
    machine.stack.append(_resolve_persistent_id(machine, machine.stack.pop()))
    return position


def _resolve_persistent_id(machine: Machine, pid: Value) -> Value:
    if machine.resolve is None:
        machine.fail("it refers to data outside of it")
    return machine.resolve(pid)


# Stack and memo


@_interprets(pickle.MARK)
def _push_mark(machine: Machine, position: int) -> int:
    machine.marks.append(machine.stack)
    machine.stack = []
    machine.budget -= 1
    if machine.budget < 0:
        machine.charge_containers(0)
    return position


@_interprets(pickle.POP)
def _pop_value(machine: Machine, position: int) -> int:
    if machine.stack:
        machine.stack.pop()
        return position
    return _pop_mark(machine, position)


@_interprets(pickle.POP_MARK)
def _pop_mark(machine: Machine, position: int) -> int:
    machine.pop_mark()
    return position


def _make_refusing_step(reason: str) -> OpcodeStep:
    def step(machine: Machine, position: int) -> NoReturn:
        machine.fail(reason)

    return step


@_interprets(pickle.MEMOIZE)
def _memoize_top(machine: Machine, position: int) -> int:
    machine.memo.append(machine.stack[-1])
    return position


def _memoize_at(machine: Machine, index: int) -> None:
    memo = machine.memo
    if index == 1 and not memo:
        # Python 2 counted from one.
        memo.append(UNSET)
    if index != memo.next_place:
        machine.fail("a place of the memo is out of order")
    memo.append(machine.stack[-1])


@_interprets(pickle.BINPUT)
def _memoize_at_byte(machine: Machine, position: int) -> int:
    _memoize_at(machine, machine.data[position])
    return position + 1


@_interprets(pickle.LONG_BINPUT)
def _memoize_at_long(machine: Machine, position: int) -> int:
    _memoize_at(machine, U32.unpack_from(machine.data, position)[0])
    return position + 4


@_interprets(pickle.PUT)
def _memoize_at_line(machine: Machine, position: int) -> int:
    line, position = _read_number_line(machine, position)
    _memoize_at(machine, _parse_whole_number(machine, line))
    return position


def _push_fetched(machine: Machine, value: Value, position: int) -> int:
    """Push ``value`` out of the memo, or read a whole record where it is the class of one."""
    macro = machine.macros.get(id(value))
    if macro is not None:
        after = macro.try_read(position)
        if after:
            return after
    elif value is UNSET:
        machine.fail("a memo index that was never put")
    machine.stack.append(value)
    return position


@_interprets(pickle.BINGET)
def _push_from_byte(machine: Machine, position: int) -> int:
    place, memo = machine.data[position], machine.memo
    return _push_fetched(machine, memo[place] if place < memo.dense else memo.fetch(place), position + 1)


@_interprets(pickle.LONG_BINGET)
def _push_from_long(machine: Machine, position: int) -> int:
    place, memo = U32.unpack_from(machine.data, position)[0], machine.memo
    return _push_fetched(machine, memo[place] if place < memo.dense else memo.fetch(place), position + 4)


@_interprets(pickle.GET)
def _push_from_line(machine: Machine, position: int) -> int:
    line, position = _read_number_line(machine, position)
    index = _parse_whole_number(machine, line)
    if index < 0:
        machine.fail("a memo index that is not a number")
    return _push_fetched(machine, machine.memo.fetch(index), position)


# Containers


def _make_empty_step(kind: Callable[[], Value], cost: int) -> OpcodeStep:
    def step(machine: Machine, position: int) -> int:
        machine.charge_containers(cost)
        machine.stack.append(kind())
        return position

    return step


def _make_mark_step(make_value: Callable[[Machine, list[Value]], Value]) -> OpcodeStep:
    """A step that pushes what ``make_value`` makes of the items since the last mark."""

    def step(machine: Machine, position: int) -> int:
        items = machine.pop_mark()
        machine.stack.append(make_value(machine, items))
        return position

    return step


def _make_tuple_step(num: int) -> OpcodeStep:
    def step(machine: Machine, position: int) -> int:
        stack = machine.stack
        if len(stack) < num:
            machine.fail("a tuple of more items than there are")
        machine.budget -= 1
        if machine.budget < 0:
            machine.charge_containers(0)
        stack[-num:] = [tuple(stack[-num:])]
        return position

    return step


def _make_dict(machine: Machine, items: list[Value]) -> dict[Value, Value]:
    filled_dict: dict[Value, Value] = {}
    insert_items(machine, filled_dict, items)
    return filled_dict


def _make_frozenset(machine: Machine, items: list[Value]) -> frozenset[Value]:
    machine.charge_containers(3)
    return frozenset(check_keys(machine, None, items))


@_interprets(pickle.APPEND)
def _append_item(machine: Machine, position: int) -> int:
    item = machine.stack.pop()
    _get_appendable_items(machine).append(item)
    return position


@_interprets(pickle.APPENDS)
def _append_items(machine: Machine, position: int) -> int:
    items = machine.pop_mark()
    _get_appendable_items(machine).extend(items)
    return position


def _get_appendable_items(machine: Machine) -> list[Value]:
    target = machine.stack[-1]
    if type(target) is list:
        return target
    if type(target) is not Opaque:
        machine.fail(f"it appends to a {describe_kind(target)}")
    if target.state is not None:
        machine.fail(f"it appends to a {describe_kind(target)} that has its state already")
    return target.items


@_interprets(pickle.ADDITEMS)
def _add_items(machine: Machine, position: int) -> int:
    items, target = machine.pop_mark(), machine.stack[-1]
    if type(target) is not set:
        machine.fail(f"it adds to a {describe_kind(target)}")
    target.update(check_keys(machine, target, items))
    return position


@_interprets(pickle.SETITEM)
def _set_item(machine: Machine, position: int) -> int:
    value, key = machine.stack.pop(), machine.stack.pop()
    insert_items(machine, machine.stack[-1], [key, value])
    return position


@_interprets(pickle.SETITEMS)
def _set_items(machine: Machine, position: int) -> int:
    items = machine.pop_mark()
    insert_items(machine, machine.stack[-1], items)
    return position


for _opcode, _step in {
    pickle.NONE: _make_constant_step(None),
    pickle.NEWTRUE: _make_constant_step(True),
    pickle.NEWFALSE: _make_constant_step(False),
    pickle.EMPTY_TUPLE: _make_constant_step(()),
    pickle.BININT2: _make_unsigned_step(2),
    pickle.BININT: _make_number_step(_I32),
    pickle.LONG1: _make_long_step(1),
    pickle.LONG4: _make_long_step(4),
    pickle.BINFLOAT: _make_number_step(_F64),
    pickle.BINUNICODE: _make_sized_step(4, _decode_text),
    pickle.BINUNICODE8: _make_sized_step(8, _decode_text),
    pickle.BINSTRING: _make_sized_step(4, _decode_py2_text),
    pickle.SHORT_BINSTRING: _make_sized_step(1, _decode_py2_text),
    pickle.BINBYTES: _make_sized_step(4, bytes),
    pickle.SHORT_BINBYTES: _make_sized_step(1, bytes),
    pickle.BINBYTES8: _make_sized_step(8, bytes),
    pickle.BYTEARRAY8: _make_sized_step(8, bytearray),
    pickle.INST: _make_refusing_step("it makes an object of an old-style class of Python 2"),
    pickle.OBJ: _make_refusing_step("it makes an object of an old-style class of Python 2"),
    pickle.DUP: _make_refusing_step("it copies the top of the stack, which no pickler does"),
    pickle.EMPTY_LIST: _make_empty_step(list, 1),
    pickle.EMPTY_DICT: _make_empty_step(dict, 1),
    pickle.EMPTY_SET: _make_empty_step(set, 4),
    pickle.TUPLE: _make_mark_step(lambda machine, items: tuple(items)),
    pickle.TUPLE1: _make_tuple_step(1),
    pickle.TUPLE2: _make_tuple_step(2),
    pickle.TUPLE3: _make_tuple_step(3),
    pickle.LIST: _make_mark_step(lambda machine, items: items),
    pickle.DICT: _make_mark_step(_make_dict),
    pickle.FROZENSET: _make_mark_step(_make_frozenset),
}.items():
    OPCODE_STEPS[_opcode[0]] = _step

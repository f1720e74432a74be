"""Opcodes that CPython's unpicklers take in more forms than picklers write: a recording follows them all."""

from __future__ import annotations

import codecs

from ckpt_tools.core.values import Value
from ckpt_tools.serialization.pickle.machine import UNSET, Machine
from ckpt_tools.serialization.pickle.opcodes import MAX_INT_BYTES, U32, read_line
from ckpt_tools.serialization.pickle.trace.recorder import Recorder

_HIGHEST_PROTOCOL = 5


def proto(machine: Machine, at: int) -> int:
    if machine.data[at] > _HIGHEST_PROTOCOL:
        machine.fail(f"protocol {machine.data[at]} is unknown")
    machine.protocol = machine.data[at]
    return at + 1


def frame(machine: Machine, at: int) -> int:
    """The C unpickler takes it for a hint."""
    if int.from_bytes(machine.data[at : at + 8], "little") > len(machine.data) - at - 8:
        machine.fail("it ends early")
    return at + 8


def _number(machine: Machine, at: int) -> tuple[bytes, int]:
    line, after = read_line(machine, at)
    if len(line) > MAX_INT_BYTES:
        machine.fail("a number of absurd size")
    return line, after


def _whole(line: bytes) -> int:
    """As C's ``strtol`` with base 0: a zero in front means octal."""
    try:
        return int(line, 0)
    except ValueError:
        return int(line, 8)


def int_line(machine: Machine, at: int) -> int:
    line, after = _number(machine, at)
    machine.stack.append({b"00": False, b"01": True}[line] if line in (b"00", b"01") else _whole(line))
    return after


def long_line(machine: Machine, at: int) -> int:
    line, after = _number(machine, at)
    machine.stack.append(_whole(line.removesuffix(b"L")))
    return after


def float_line(machine: Machine, at: int) -> int:
    line, after = _number(machine, at)
    machine.stack.append(float(line))
    return after


def quoted_line(machine: Machine, at: int) -> int:
    line, after = read_line(machine, at)
    line = line.strip()
    if len(line) < 2 or line[0] != line[-1] or line[0] not in b"\"'":
        machine.fail("a string without quotes")
    machine.stack.append(codecs.escape_decode(line[1:-1])[0].decode("utf-8", "surrogateescape"))
    return after


def unicode_line(machine: Machine, at: int) -> int:
    line, after = read_line(machine, at)
    machine.stack.append(_RAW_UNICODE.decode(line)[0])
    return after


_RAW_UNICODE = codecs.lookup("raw-unicode-escape")


def dup(machine: Machine, at: int) -> int:
    machine.stack.append(machine.stack[-1])
    return at


def _put(machine: Machine, index: int) -> None:
    memo = machine.memo
    if index < 0:
        machine.fail("a memo index that is not a number")
    if index >= len(machine.data):
        _far(machine)[index] = machine.stack[-1]
        return
    memo.extend([UNSET] * (index + 1 - len(memo)))
    memo[index] = machine.stack[-1]


def memoize(machine: Machine, at: int) -> int:
    machine.memo.append(machine.stack[-1])
    return at


def binput(machine: Machine, at: int) -> int:
    _put(machine, machine.data[at])
    return at + 1


def long_binput(machine: Machine, at: int) -> int:
    _put(machine, U32.unpack_from(machine.data, at)[0])
    return at + 4


def put_line(machine: Machine, at: int) -> int:
    line, at = _number(machine, at)
    _put(machine, int(line))
    return at


def get_line(machine: Machine, at: int) -> int:
    line, at = _number(machine, at)
    return _fetched(machine, int(line), at)


def long_binget(machine: Machine, at: int) -> int:
    return _fetched(machine, U32.unpack_from(machine.data, at)[0], at + 4)


def _fetched(machine: Machine, index: int, at: int) -> int:
    far = _far(machine)
    value = far[index] if index in far else machine.memo[index]
    if value is UNSET:
        machine.fail("a memo index that was never put")
    machine.stack.append(value)
    return at


def _far(machine: Machine) -> dict[int, Value]:
    assert isinstance(machine, Recorder), "these steps are in the language of a recorder alone"
    return machine.far

"""Whole records of a DCP, read at once where they are written as torch and ``dumps`` write them."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod

from ckpt_tools.core.values import Size, Value
from ckpt_tools.serialization.pickle.dcp_metadata import (
    CLASSES,
    ChunkStorageMetadata,
    MetadataIndex,
    Record,
    StorageInfo,
)
from ckpt_tools.serialization.pickle.machine import UNSET, Machine, Unset
from ckpt_tools.serialization.pickle.opcodes import U32

_INTEGER = rb"K.|M..|J....|\x8a\x05.{5}|\x8a\x06.{6}|\x8a\x07.{7}|\x8a\x08.{8}"

NAMES_ARE_NEAR = 64
"""Where in the memo, from its end, the field names are right after the first record of a class: it puts about 20."""

NAMES_ARE_EARLY = 4096
"""Where in the memo, from its start, ``torch.Size`` is: the first tensor of a DCP needs it."""

MAX_ATTEMPTS = 100
"""Records after which a class whose names are not found in the memo is read opcode by opcode."""

MAX_KEPT_SIZES = 1 << 16
"""Sizes kept by their opcodes: the chunks of a tensor have few sizes, but each its own offsets."""


class RecordMacro(ABC):
    """Reads whole records of one class where they are written as torch and ``dumps`` write them.

    After the class was fetched from the memo that is a new object without arguments, a dict of its fields, BUILD. Field
    names and ``torch.Size`` are fetched from the memo too, so the pattern is made once the first record was read opcode
    by opcode. Either every value is memoised in order (MEMOIZE, protocol 4) or none is (``dumps``); the tuples and
    dicts that only ever serve to build a record get a place in the memo, but cannot be fetched from it.
    """

    __slots__ = ("attempts", "machine", "put", "start", "tail")

    fields: tuple[str, ...]

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.attempts = 0
        self.put = b""
        # No record starts so, until it is known how they start here.
        self.start = b"."
        self.tail: re.Pattern[bytes] | None = None

    def run(self, at: int) -> int:
        """Read the record whose opcodes start at ``at``; the position after it, or 0 where it is written otherwise."""
        if self.machine.data.startswith(self.start, at):
            return self.read(at + len(self.start))
        if self.tail is None and self._prepare(at):
            return self.run(at)
        return 0

    @abstractmethod
    def read(self, at: int) -> int:
        """Read what follows ``start``."""

    @abstractmethod
    def patterns(self, size: bytes, fetches: list[bytes]) -> tuple[bytes, bytes]:
        """Opcodes from the first field's name on: those that are always the same, and a pattern of the rest."""

    def _prepare(self, at: int) -> bool:
        self.attempts += 1
        size = self._fetch(self.machine.names.get(("torch", "Size")))
        fetches = [fetch for fetch in map(self._fetch, self.fields) if fetch]
        if self.attempts > MAX_ATTEMPTS or not size or len(fetches) < len(self.fields):
            return False
        self.put = b"\x94" if self.machine.data[at + 2 : at + 3] == b"\x94" else b""
        start, tail = self.patterns(size, fetches)
        self.start = b")\x81" + self.put + b"}" + self.put + b"(" + fetches[0] + start
        self.tail = re.compile(rb"(?s:" + tail + rb"ub)")
        return True

    def _fetch(self, wanted: Value) -> bytes:
        """The opcode that fetches ``wanted`` from the memo; empty where it is in none of the likely places."""
        memo = self.machine.memo
        last = len(memo) - 1
        for index in (*range(last, max(-1, last - NAMES_ARE_NEAR), -1), *range(min(last, NAMES_ARE_EARLY))):
            if type(memo[index]) is type(wanted) and memo[index] == wanted:
                return b"h%c" % index if index < 256 else b"j" + U32.pack(index)
        return b""

    def extents(self) -> bytes:
        """A group that matches a tuple of integers."""
        put = re.escape(self.put)
        return rb"(\)|\(?(?:" + _INTEGER + rb")*+[\x85-\x87t]" + put + rb")"

    def call(self) -> bytes:
        """What makes a ``Size`` of the tuple on the stack."""
        return re.escape(b"\x85" + self.put + b"R" + self.put)

    def size(self, written: bytes) -> Size | None:
        """The ``Size`` of a tuple by its opcodes; None where these make no tuple."""
        kept = self.machine.sizes
        found = kept.get(written)
        if found is None:
            found = _decoded_size(written)
            if found is not None:
                if len(kept) >= MAX_KEPT_SIZES:
                    kept.clear()
                kept[written] = found
        return found

    def remember(self, *values: Value) -> None:
        if self.put:
            self.machine.memo.extend(values)

    def text(self, at: int) -> tuple[str | None, int, bool]:
        """The string written or fetched at ``at``, the position after it, and whether it takes a place in the memo."""
        data = self.machine.data
        if data[at] == _BINGET:
            value, after = self.machine.memo[data[at + 1]], at + 2
        elif data[at] == _LONG_BINGET:
            value, after = self.machine.memo[U32.unpack_from(data, at + 1)[0]], at + 5
        elif data[at] == _SHORT_TEXT:
            after = at + 2 + data[at + 1]
            value = str(data[at + 2 : after], "utf-8", "surrogatepass")
            if not data.startswith(self.put, after):
                return None, 0, False
            return value, after + len(self.put), bool(self.put)
        else:
            return None, 0, False
        return (value if type(value) is str else None), after, False


_BINGET, _LONG_BINGET, _SHORT_TEXT = ord("h"), ord("j"), 0x8C


class _ChunkMacro(RecordMacro):
    __slots__ = ()

    fields = ("offsets", "sizes")

    def patterns(self, size: bytes, fetches: list[bytes]) -> tuple[bytes, bytes]:
        made = self.extents() + self.call()
        return size, made + re.escape(fetches[1] + size) + made

    def read(self, at: int) -> int:
        assert self.tail is not None
        found = self.tail.match(self.machine.data, at)
        if found is None:
            return 0
        offsets, sizes = self.size(found[1]), self.size(found[2])
        if offsets is None or sizes is None:
            return 0
        chunk = object.__new__(ChunkStorageMetadata)
        chunk.set(offsets, sizes)
        self.machine.stack.append(chunk)
        if len(offsets) and len(sizes):
            self.remember(chunk, UNSET, UNSET, UNSET, offsets, UNSET, UNSET, sizes)
        else:
            self.remember(chunk, UNSET, *_places(offsets), UNSET, offsets, *_places(sizes), UNSET, sizes)
        return found.end()


def _places(size: Size) -> tuple[Unset, ...]:
    """The memo entries of the tuple behind a size: an empty tuple has none."""
    return (UNSET,) if size else ()


class _IndexMacro(RecordMacro):
    __slots__ = ()

    fields = ("fqn", "index", "offset")

    def patterns(self, size: bytes, fetches: list[bytes]) -> tuple[bytes, bytes]:
        made = re.escape(size) + self.extents() + self.call()
        hint = rb"(" + _INTEGER + rb"|N)"
        return b"", re.escape(fetches[1]) + hint + re.escape(fetches[2]) + rb"(?:" + made + rb"|(h.|j....|N))"

    def read(self, at: int) -> int:
        assert self.tail is not None
        fqn, after, is_new = self.text(at)
        found = self.tail.match(self.machine.data, after) if fqn is not None else None
        if fqn is None or found is None:
            return 0
        hint, extents, fetched = found.groups()
        offset = self.size(extents) if extents is not None else self._fetched(fetched)
        if offset is None and fetched != b"N":
            return 0
        index = object.__new__(MetadataIndex)
        index.set(fqn, offset, None if hint == b"N" else _decoded(hint))
        self.machine.stack.append(index)
        made = () if extents is None or offset is None else (*_places(offset), UNSET, offset)
        self.remember(index, UNSET, *((fqn,) if is_new else ()), *made)
        return found.end()

    def _fetched(self, opcode: bytes) -> Size | None:
        memo = self.machine.memo
        value = None if opcode == b"N" else memo[opcode[1] if len(opcode) == 2 else U32.unpack_from(opcode, 1)[0]]
        return value if type(value) is Size else None


class _InfoMacro(RecordMacro):
    __slots__ = ()

    fields = ("relative_path", "offset", "length")

    def patterns(self, size: bytes, fetches: list[bytes]) -> tuple[bytes, bytes]:
        number = rb"(" + _INTEGER + rb")"
        return b"", re.escape(fetches[1]) + number + re.escape(fetches[2]) + number

    def read(self, at: int) -> int:
        assert self.tail is not None
        path, after, is_new = self.text(at)
        found = self.tail.match(self.machine.data, after) if path is not None else None
        if path is None or found is None:
            return 0
        info = object.__new__(StorageInfo)
        info.set(path, _decoded(found[1]), _decoded(found[2]), None)
        self.machine.stack.append(info)
        self.remember(info, UNSET, *((path,) if is_new else ()))
        return found.end()


def _decoded(written: bytes) -> int:
    """The integer that one opcode pushes."""
    start = 2 if written[0] == 0x8A else 1
    return int.from_bytes(written[start:], "little", signed=written[0] not in b"KM")


def _decoded_size(written: bytes) -> Size | None:
    marked, written = written.startswith(b"("), written.removesuffix(b"\x94")
    dims = tuple(map(_decoded, _INTEGERS.findall(written, 1 if marked else 0, len(written) - 1)))
    wanted = {b")": 0, b"\x85": 1, b"\x86": 2, b"\x87": 3}.get(written[-1:], -1)
    return Size(dims) if (marked if wanted < 0 else wanted == len(dims) and not marked) else None


_INTEGERS = re.compile(rb"(?s:" + _INTEGER + rb")")


_KINDS: dict[type[Record], type[RecordMacro]] = {
    ChunkStorageMetadata: _ChunkMacro,
    MetadataIndex: _IndexMacro,
    StorageInfo: _InfoMacro,
}

MACROS: dict[tuple[str, str], type[RecordMacro]] = {
    name: _KINDS[kind] for name, kind in CLASSES.items() if kind in _KINDS
}
"""The macros by the classes that call for them."""

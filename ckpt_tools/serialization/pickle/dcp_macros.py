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
    TensorProperties,
    TensorStorageMetadata,
)
from ckpt_tools.serialization.pickle.machine import UNSET, Machine
from ckpt_tools.serialization.pickle.opcodes import U32

_INTEGER = rb"K.|M..|J....|\x8a\x05.{5}|\x8a\x06.{6}|\x8a\x07.{7}|\x8a\x08.{8}"

NAMES_ARE_NEAR = 64
"""Last memo entries that are searched for the field names after the first record of a class: it puts about 20."""

NAMES_ARE_EARLY = 4096
"""First memo entries that are searched for ``torch.Size``: the first tensor of a DCP needs it."""

MAX_ATTEMPTS = 100
"""Records after which a class whose names are not found in the memo is read opcode by opcode."""

MAX_KEPT_SIZES = 1 << 16
"""Sizes kept by their opcodes: the chunks of a tensor have few sizes, but each its own offsets."""

MAX_KEPT_ENTRIES, MAX_KEPT_ENTRY_BYTES, MAX_KEPT_ENTRY_SIZES = 1 << 12, 1 << 12, 1 << 6
"""Tensors kept by their opcodes and by what these mean: those of a model have few shapes."""


class RecordMacro(ABC):
    """Reads whole records of one class in the form in which torch and ``dumps`` write them.

    After the class was fetched from the memo that is a new object without arguments, a dict of its fields, BUILD. Field
    names and ``torch.Size`` are fetched from the memo too, so the pattern is made once the first record was read opcode
    by opcode. Either every value is memoised in order (MEMOIZE, protocol 4) or none is (``dumps``). Of the memoised
    values only names and sizes are kept: a pickle that fetches a record, or the tuples and dicts in it, is read again
    without macros.
    """

    __slots__ = ("attempts", "lengths", "machine", "put", "start", "tail")

    fields: tuple[str, ...]

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.attempts = 0
        self.lengths: dict[bytes, int] = {}
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

    def read(self, at: int) -> int:
        """Read what follows ``start``; the position after it, or 0."""
        assert self.tail is not None
        found = self.tail.match(self.machine.data, at)
        return found.end() if found is not None and self.made(found) else 0

    def made(self, found: re.Match[bytes]) -> bool:
        """Push the record whose opcodes ``tail`` matched; False where they do not make one."""
        raise NotImplementedError

    @abstractmethod
    def patterns(self, size: bytes, fetches: list[bytes]) -> tuple[bytes, bytes] | None:
        """Opcodes from the first field's name on: those that are always the same, and a pattern of the rest; None
        where it is not known yet how the rest starts."""

    def _prepare(self, at: int) -> bool:
        self.attempts += 1
        size = self._fetch(self.machine.names.get(("torch", "Size")))
        fetches = [fetch for fetch in map(self._fetch, self.fields) if fetch]
        if self.attempts > MAX_ATTEMPTS or not size or len(fetches) < len(self.fields):
            return False
        self.put = b"\x94" if self.machine.data[at + 2 : at + 3] == b"\x94" else b""
        patterns = self.patterns(size, fetches)
        if patterns is None:
            return False
        start, tail = patterns
        self.start = b")\x81" + self.put + b"}" + self.put + b"(" + fetches[0] + start
        self.tail = re.compile(rb"(?s:" + tail + rb"ub)")
        return True

    def _fetch(self, wanted: Value) -> bytes:
        """The opcode that fetches ``wanted`` from the memo; empty where it is in none of the likely places."""
        memo = self.machine.memo
        last = len(memo) - 1
        if wanted is None:
            return b""
        for position in (*range(last, max(-1, last - NAMES_ARE_NEAR), -1), *range(min(last, NAMES_ARE_EARLY))):
            if type(memo[position]) is type(wanted) and memo[position] == wanted:
                place = memo.place_of(position)
                return b"h%c" % place if place < 256 else b"j" + U32.pack(place)
        return b""

    def fetched(self, opcode: bytes) -> Value:
        """Value that an opcode fetches from the memo."""
        return self.machine.memo.fetch(opcode[1] if len(opcode) == 2 else U32.unpack_from(opcode, 1)[0])

    def extents(self) -> bytes:
        """A group that matches a tuple of integers."""
        return rb"(" + self.integers() + rb")"

    def integers(self) -> bytes:
        """``extents`` without the group."""
        return rb"(?:\)|\(?(?:" + _INTEGER + rb")*+[\x85-\x87t]" + re.escape(self.put) + rb")"

    def call(self) -> bytes:
        """Opcodes that make a ``Size`` of the tuple on the stack."""
        return re.escape(b"\x85" + self.put + b"R" + self.put)

    def size(self, written: bytes) -> Size | None:
        """The ``Size`` of a tuple by its opcodes; None where these make no tuple."""
        kept = self.machine.sizes
        found = kept.get(written)
        if found is None and (dims := _decoded_tuple(written)) is not None:
            if len(kept) >= MAX_KEPT_SIZES:
                kept.clear()
            found = kept[written] = Size(dims)
        return found

    def length(self, written: bytes) -> int:
        """The integer that an opcode pushes; equal ones are one."""
        if len(self.lengths) >= MAX_KEPT_ENTRIES:
            self.lengths.clear()
        return self.lengths.setdefault(written, _decoded(written))

    def remember(self, *values: Value) -> None:
        """Memoise ``values``, of which only names and sizes are kept."""
        memo = self.machine.memo
        if not self.put:
            return
        left_out = 0
        for value in values:
            if type(value) is Size or type(value) is str:
                memo.leave_out(left_out)
                memo.append(value)
                left_out = 0
            else:
                left_out += 1
        memo.leave_out(left_out)

    def text(self, at: int) -> tuple[str | None, int, bool]:
        """The string written or fetched at ``at``, the position after it, and whether it takes a place in the memo."""
        data = self.machine.data
        if data[at] == _BINGET:
            value, after = self.machine.memo.fetch(data[at + 1]), at + 2
        elif data[at] == _LONG_BINGET:
            value, after = self.machine.memo.fetch(U32.unpack_from(data, at + 1)[0]), at + 5
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

    def made(self, found: re.Match[bytes]) -> bool:
        offsets, sizes = self.size(found[1]), self.size(found[2])
        if offsets is None or sizes is None:
            return False
        chunk = object.__new__(ChunkStorageMetadata)
        chunk.set(offsets, sizes)
        self.machine.stack.append(chunk)
        self.remember(chunk, UNSET, *_places_of_size(offsets), *_places_of_size(sizes))
        return True


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
        offset = self.size(extents) if extents is not None else None if fetched == b"N" else self.fetched(fetched)
        if type(offset) is not Size and fetched != b"N":
            return 0
        index = object.__new__(MetadataIndex)
        index.set(fqn, offset, None if hint == b"N" else _decoded(hint))
        self.machine.stack.append(index)
        made = () if extents is None or offset is None else _places_of_size(offset)
        self.remember(index, UNSET, *((fqn,) if is_new else ()), *made)
        return found.end()


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
        info.set(path, _decoded(found[1]), self.length(found[2]), None)
        self.machine.stack.append(info)
        self.remember(info, UNSET, *((path,) if is_new else ()))
        return found.end()


class _TensorMacro(RecordMacro):
    """Reads a tensor with its properties and chunks. Those with the same opcodes share one record: nothing in the
    pickle refers to its parts, so nothing can change them."""

    __slots__ = ("chunk", "kept", "spelled")

    fields = ("properties", "size", "chunks", "offsets", "sizes")
    chunk: re.Pattern[bytes]
    kept: dict[Value, TensorStorageMetadata]
    spelled: dict[bytes, tuple[TensorStorageMetadata, tuple[Value, ...]]]

    def patterns(self, size: bytes, fetches: list[bytes]) -> tuple[bytes, bytes] | None:
        kinds = [self._fetch(self._class(kind)) for kind in (TensorProperties, ChunkStorageMetadata)]
        if not all(kinds):
            return None
        self.kept, self.spelled = {}, {}
        names = [re.escape(fetch) for fetch in fetches]
        new_chunk = re.escape(kinds[1] + b")\x81" + self.put + b"}" + self.put + b"(")
        groups, one = (
            new_chunk + names[3] + self._size(size, *marks) + names[4] + self._size(size, *marks) + rb"ub"
            for marks in ((rb"(", rb")"), (rb"(?:", rb")"))
        )
        self.chunk = re.compile(rb"(?s:" + groups + rb")")
        fetch, flag = rb"(?:h.|j....)", rb"[\x88\x89]"
        facts = rb"(" + fetch + fetch + flag + fetch + flag + rb")(N|" + self.integers() + rb")?"
        state = facts + rb"t" + re.escape(self.put) + rb"b"
        chunks = rb"((?:" + one + rb"a|\((?:" + one + rb")++e)*+)"
        start = kinds[0] + b")\x81" + self.put + b"("
        made = state + names[1] + self._size(size, rb"(", rb")") + names[2] + re.escape(b"]" + self.put)
        return start, made + chunks

    def _size(self, size: bytes, start: bytes, stop: bytes) -> bytes:
        """A size that is made here, or one that was made before."""
        made = re.escape(size) + start + self.integers() + stop + self.call()
        return rb"(?:" + made + rb"|" + start + rb"h.|j...." + stop + rb")"

    def _class(self, kind: type[Record]) -> Value:
        """The name of a class in the pickle."""
        return next((ref for name, ref in self.machine.names.items() if CLASSES.get(name) is kind), None)

    def made(self, found: re.Match[bytes]) -> bool:
        kept = self.spelled.get(found[0]) or self._made(found)
        if kept is None:
            return False
        entry, values = kept
        self.machine.stack.append(entry)
        self.remember(*values)
        return True

    def _made(self, found: re.Match[bytes]) -> tuple[TensorStorageMetadata, tuple[Value, ...]] | None:
        """The entry, and its values for the memo; None where the opcodes do not make one."""
        facts, strides, made, known, chunks = found.groups()
        # The record and its state, the properties, their strides if they have an item, and the state of these.
        places: list[Value] = [UNSET] * (4 if strides in (None, b"N", b")") else 5)
        sizes = [self._found_size(made, known, places)]
        places.append(UNSET)
        for offsets, known_offsets, extents, known_extents in self.chunk.findall(chunks):
            places += [UNSET, UNSET]
            sizes += [self._found_size(offsets, known_offsets, places)]
            sizes += [self._found_size(extents, known_extents, places)]
        entry = self._entry(facts, strides, sizes) if all(type(size) is Size for size in sizes) else None
        if entry is None:
            return None
        if len(found[0]) <= MAX_KEPT_ENTRY_BYTES:
            _keep(self.spelled, found[0], (entry, tuple(places)))
        return entry, tuple(places)

    def _found_size(self, made: bytes, known: bytes, places: list[Value]) -> Value:
        """A size with its ``places``, or one out of the memo, or one of the places that this record has before it."""
        if made:
            size = self.size(made)
            places += () if size is None else _places_of_size(size)
            return size
        place = known[1] if len(known) == 2 else U32.unpack_from(known, 1)[0]
        own = place - self.machine.memo.next_place if self.put else -1
        return self.machine.memo.fetch(place) if own < 0 else places[own]

    def _entry(self, facts: bytes, strides: bytes | None, sizes: list[Value]) -> TensorStorageMetadata | None:
        """The one entry of these properties, of the size and of the chunks that follow it."""
        key = (facts, strides, *sizes)
        entry = self.kept.get(key)
        if entry is None:
            properties = self._properties(facts, strides)
            if properties is None:
                return None
            chunks = [ChunkStorageMetadata(*sizes[at : at + 2]) for at in range(1, len(sizes), 2)]
            entry = TensorStorageMetadata(properties, sizes[0], chunks)
            if len(sizes) <= MAX_KEPT_ENTRY_SIZES:
                _keep(self.kept, key, entry)
        return entry

    def _properties(self, facts: bytes, strides: bytes | None) -> TensorProperties | None:
        state: list[Value] = [flag == b"\x88" if flag else self.fetched(fetch) for flag, fetch in _FACTS.findall(facts)]
        if strides is not None:
            dims = _decoded_tuple(strides)
            state.append(None if strides == b"N" else UNSET if dims is None else dims)
        if any(value is UNSET for value in state):
            return None
        properties = object.__new__(TensorProperties)
        properties.build(tuple(state))
        return properties


def _keep(kept: dict[Value, Value], key: Value, value: Value) -> None:
    if len(kept) >= MAX_KEPT_ENTRIES:
        kept.clear()
    kept[key] = value


def _places_of_size(size: Size) -> tuple[Value, ...]:
    """The memo entries of a size: the tuple behind it unless that is empty, the arguments, and itself."""
    return (UNSET, UNSET, size) if size else (UNSET, size)


def _decoded(written: bytes) -> int:
    """The integer that one opcode pushes."""
    start = 2 if written[0] == 0x8A else 1
    return int.from_bytes(written[start:], "little", signed=written[0] not in b"KM")


def _decoded_tuple(written: bytes) -> tuple[int, ...] | None:
    """The tuple of integers that some opcodes make; None where these make none."""
    marked, written = written.startswith(b"("), written.removesuffix(b"\x94")
    dims = tuple(map(_decoded, _INTEGERS.findall(written, 1 if marked else 0, len(written) - 1)))
    wanted = {b")": 0, b"\x85": 1, b"\x86": 2, b"\x87": 3}.get(written[-1:], -1)
    return dims if (marked if wanted < 0 else wanted == len(dims) and not marked) else None


_INTEGERS = re.compile(rb"(?s:" + _INTEGER + rb")")
_FACTS = re.compile(rb"(?s:([\x88\x89])|(h.|j....))")


_KINDS: dict[type[Record], type[RecordMacro]] = {
    ChunkStorageMetadata: _ChunkMacro,
    MetadataIndex: _IndexMacro,
    StorageInfo: _InfoMacro,
    TensorStorageMetadata: _TensorMacro,
}

MACROS: dict[tuple[str, str], type[RecordMacro]] = {
    name: _KINDS[kind] for name, kind in CLASSES.items() if kind in _KINDS
}
"""Macros by class; records of tensors that are equal are shared."""

"""Whole records of a DCP, read at once where they are written as torch and ``dumps`` write them."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod

from ckpt_tools.core.values import Size, Value
from ckpt_tools.serialization.pickle.dcp_metadata import (
    RECORD_CLASSES,
    ChunkStorageMetadata,
    DcpRecord,
    MetadataIndex,
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

    def try_read(self, position: int) -> int:
        """Read the record whose opcodes start at ``position``; the position after it, or 0 where it is written
        otherwise."""
        if self.machine.data.startswith(self.start, position):
            return self.read_fields(position + len(self.start))
        if self.tail is None and self._prepare_patterns(position):
            return self.try_read(position)
        return 0

    def read_fields(self, position: int) -> int:
        """Read what follows ``start``; the position after it, or 0."""
        assert self.tail is not None
        found = self.tail.match(self.machine.data, position)
        return found.end() if found is not None and self.push_record(found) else 0

    def push_record(self, found: re.Match[bytes]) -> bool:
        """Push the record whose opcodes ``tail`` matched; False where they do not make one."""
        raise NotImplementedError

    @abstractmethod
    def make_patterns(self, size: bytes, fetches: list[bytes]) -> tuple[bytes, bytes] | None:
        """Opcodes from the first field's name on: those that are always the same, and a pattern of the rest; None
        where it is not known yet how the rest starts."""

    def _prepare_patterns(self, position: int) -> bool:
        # Once the first record was read opcode by opcode, the memo has the field names. From then on all bytes of a
        # record are known but for its values:  )\x81 }  (  fetch name, value  fetch name, value ...  u b
        self.attempts += 1
        size = self._find_fetch_opcode(self.machine.names.get(("torch", "Size")))
        fetches = [fetch for fetch in map(self._find_fetch_opcode, self.fields) if fetch]
        if self.attempts > MAX_ATTEMPTS or not size or len(fetches) < len(self.fields):
            return False
        self.put = b"\x94" if self.machine.data[position + 2 : position + 3] == b"\x94" else b""
        patterns = self.make_patterns(size, fetches)
        if patterns is None:
            return False
        start, tail = patterns
        self.start = b")\x81" + self.put + b"}" + self.put + b"(" + fetches[0] + start
        self.tail = re.compile(rb"(?s:" + tail + rb"ub)")
        return True

    def _find_fetch_opcode(self, memo_value: Value) -> bytes:
        """The opcode that fetches ``memo_value`` from the memo; empty where it is in none of the likely places."""
        memo = self.machine.memo
        last = len(memo) - 1
        if memo_value is None:
            return b""
        for position in (*range(last, max(-1, last - NAMES_ARE_NEAR), -1), *range(min(last, NAMES_ARE_EARLY))):
            if type(memo[position]) is type(memo_value) and memo[position] == memo_value:
                place = memo.get_place(position)
                return b"h%c" % place if place < 256 else b"j" + U32.pack(place)
        return b""

    def fetch_value(self, opcode: bytes) -> Value:
        """Value that an opcode fetches from the memo."""
        return self.machine.memo.fetch(opcode[1] if len(opcode) == 2 else U32.unpack_from(opcode, 1)[0])

    def make_extents_pattern(self) -> bytes:
        """Opcodes that make a tuple of integers."""
        return rb"(?:\)|\(?(?:" + _INTEGER + rb")*+[\x85-\x87t]" + re.escape(self.put) + rb")"

    def make_size_pattern(self, size: bytes, start: bytes = rb"(") -> bytes:
        """Opcodes that make a ``Size`` of a tuple, which is a group that begins with ``start``; ``size`` fetches the
        class."""
        call = re.escape(b"\x85" + self.put + b"R" + self.put)
        return re.escape(size) + start + self.make_extents_pattern() + rb")" + call

    def decode_size(self, opcodes: bytes) -> Size | None:
        """The ``Size`` of a tuple by its opcodes; None where these make no tuple."""
        size_by_opcodes = self.machine.sizes
        cached_size = size_by_opcodes.get(opcodes)
        if cached_size is None and (dims := _decode_int_tuple(opcodes)) is not None:
            if len(size_by_opcodes) >= MAX_KEPT_SIZES:
                size_by_opcodes.clear()
            cached_size = size_by_opcodes[opcodes] = Size(dims)
        return cached_size

    def decode_length(self, opcode: bytes) -> int:
        """The integer that an opcode pushes; equal integers are one object."""
        if len(self.lengths) >= MAX_KEPT_ENTRIES:
            self.lengths.clear()
        return self.lengths.setdefault(opcode, _decode_int(opcode))

    def memoize_values(self, *values: Value) -> None:
        """Memoise the names and sizes among ``values``."""
        memo = self.machine.memo
        if not self.put:
            return
        num_skipped = 0
        for value in values:
            if type(value) is Size or type(value) is str:
                memo.skip_places(num_skipped)
                memo.append(value)
                num_skipped = 0
            else:
                num_skipped += 1
        memo.skip_places(num_skipped)

    def read_text(self, position: int) -> tuple[str | None, int, bool]:
        """The string written or fetched at ``position``, the position after it, and whether it takes a place in the
        memo."""
        data = self.machine.data
        if data[position] == _BINGET:
            value, next_position = self.machine.memo.fetch(data[position + 1]), position + 2
        elif data[position] == _LONG_BINGET:
            value, next_position = self.machine.memo.fetch(U32.unpack_from(data, position + 1)[0]), position + 5
        elif data[position] == _SHORT_TEXT:
            next_position = position + 2 + data[position + 1]
            value = str(data[position + 2 : next_position], "utf-8", "surrogatepass")
            if not data.startswith(self.put, next_position):
                return None, 0, False
            return value, next_position + len(self.put), bool(self.put)
        else:
            return None, 0, False
        return (value if type(value) is str else None), next_position, False


_BINGET, _LONG_BINGET, _SHORT_TEXT = ord("h"), ord("j"), 0x8C


class _ChunkMacro(RecordMacro):
    __slots__ = ()

    fields = ("offsets", "sizes")

    def make_patterns(self, size: bytes, fetches: list[bytes]) -> tuple[bytes, bytes]:
        made = self.make_size_pattern(size)
        return b"", made + re.escape(fetches[1]) + made

    def push_record(self, found: re.Match[bytes]) -> bool:
        offsets, sizes = self.decode_size(found[1]), self.decode_size(found[2])
        if offsets is None or sizes is None:
            return False
        chunk = ChunkStorageMetadata(offsets, sizes)
        self.machine.stack.append(chunk)
        self.memoize_values(chunk, UNSET, *_list_size_places(offsets), *_list_size_places(sizes))
        return True


class _IndexMacro(RecordMacro):
    __slots__ = ()

    fields = ("fqn", "index", "offset")

    def make_patterns(self, size: bytes, fetches: list[bytes]) -> tuple[bytes, bytes]:
        made = self.make_size_pattern(size)
        hint = rb"(" + _INTEGER + rb"|N)"
        return b"", re.escape(fetches[1]) + hint + re.escape(fetches[2]) + rb"(?:" + made + rb"|(h.|j....|N))"

    def read_fields(self, position: int) -> int:
        assert self.tail is not None
        fqn, after, is_new = self.read_text(position)
        tail_match = self.tail.match(self.machine.data, after) if fqn is not None else None
        if fqn is None or tail_match is None:
            return 0
        hint, extents, fetched = tail_match.groups()
        offset: Value = None
        if extents is not None:
            offset = self.decode_size(extents)
        elif fetched != b"N":
            offset = self.fetch_value(fetched)
        if type(offset) is not Size and fetched != b"N":
            return 0
        index = MetadataIndex(fqn, offset, None if hint == b"N" else _decode_int(hint))
        self.machine.stack.append(index)
        made = () if extents is None or offset is None else _list_size_places(offset)
        self.memoize_values(index, UNSET, *((fqn,) if is_new else ()), *made)
        return tail_match.end()


class _InfoMacro(RecordMacro):
    __slots__ = ()

    fields = ("relative_path", "offset", "length")

    def make_patterns(self, size: bytes, fetches: list[bytes]) -> tuple[bytes, bytes]:
        number = rb"(" + _INTEGER + rb")"
        return b"", re.escape(fetches[1]) + number + re.escape(fetches[2]) + number

    def read_fields(self, position: int) -> int:
        assert self.tail is not None
        path, after, is_new = self.read_text(position)
        tail_match = self.tail.match(self.machine.data, after) if path is not None else None
        if path is None or tail_match is None:
            return 0
        info = StorageInfo(path, _decode_int(tail_match[1]), self.decode_length(tail_match[2]))
        self.machine.stack.append(info)
        self.memoize_values(info, UNSET, *((path,) if is_new else ()))
        return tail_match.end()


class _TensorMacro(RecordMacro):
    """Reads a tensor with its properties and chunks. Those with the same opcodes share one record: nothing in the
    pickle refers to its parts, so nothing can change them."""

    __slots__ = ("chunk", "kept", "spelled")

    fields = ("properties", "size", "chunks", "offsets", "sizes")
    chunk: re.Pattern[bytes]
    kept: dict[Value, TensorStorageMetadata]
    spelled: dict[bytes, tuple[TensorStorageMetadata, tuple[Value, ...]]]

    def make_patterns(self, size: bytes, fetches: list[bytes]) -> tuple[bytes, bytes] | None:
        kinds = [self._find_fetch_opcode(self._find_class(kind)) for kind in (TensorProperties, ChunkStorageMetadata)]
        if not all(kinds):
            return None
        self.kept, self.spelled = {}, {}
        names = [re.escape(fetch) for fetch in fetches]
        # `tail` reads a record as a whole, and `chunk` then each of its chunks. Both have the pattern of a chunk:
        #   new chunk  "offsets" size  "sizes" size  u b
        new_chunk = re.escape(kinds[1] + b")\x81" + self.put + b"}" + self.put + b"(")
        group, no_group = (self._make_any_size_pattern(size, start) for start in (rb"(", rb"(?:"))
        self.chunk = re.compile(rb"(?s:" + new_chunk + names[3] + group + names[4] + group + rb"ub)")
        one = new_chunk + names[3] + no_group + names[4] + no_group + rb"ub"
        # The state of the properties is a tuple: dtype, layout, requires_grad, memory format, pinned, perhaps strides.
        fetch, flag = rb"(?:h.|j....)", rb"[\x88\x89]"
        facts = rb"(" + fetch + fetch + flag + fetch + flag + rb")(N|" + self.make_extents_pattern() + rb")?"
        state = facts + rb"t" + re.escape(self.put) + rb"b"
        chunks = rb"((?:" + one + rb"a|\((?:" + one + rb")++e)*+)"
        start = kinds[0] + b")\x81" + self.put + b"("
        made = state + names[1] + group + names[2] + re.escape(b"]" + self.put)
        return start, made + chunks

    def _make_any_size_pattern(self, size: bytes, start: bytes) -> bytes:
        """A size that is made here, or fetched because it was made before; ``start`` begins a group for either."""
        return rb"(?:" + self.make_size_pattern(size, start) + rb"|" + start + rb"h.|j....))"

    def _find_class(self, kind: type[DcpRecord]) -> Value:
        """The ``GlobalRef`` of a class of records in this pickle; None if it has none."""
        return next((ref for name, ref in self.machine.names.items() if RECORD_CLASSES.get(name) is kind), None)

    def push_record(self, found: re.Match[bytes]) -> bool:
        kept = self.spelled.get(found[0]) or self._decode_entry(found)
        if kept is None:
            return False
        entry, values = kept
        self.machine.stack.append(entry)
        self.memoize_values(*values)
        return True

    def _decode_entry(self, tail_match: re.Match[bytes]) -> tuple[TensorStorageMetadata, tuple[Value, ...]] | None:
        """The entry, and its values for the memo; None where the opcodes do not make one."""
        facts, strides, made_size, fetched_size, chunks = tail_match.groups()
        # The record and its state, the properties, their strides if they have an item, and the state of these.
        places: list[Value] = [UNSET] * (4 if strides in (None, b"N", b")") else 5)
        sizes = [self._resolve_size(made_size, fetched_size, places)]
        places.append(UNSET)
        for offsets, known_offsets, extents, known_extents in self.chunk.findall(chunks):
            places += [UNSET, UNSET]
            sizes += [self._resolve_size(offsets, known_offsets, places)]
            sizes += [self._resolve_size(extents, known_extents, places)]
        entry = self._make_entry(facts, strides, sizes) if all(type(size) is Size for size in sizes) else None
        if entry is None:
            return None
        if len(tail_match[0]) <= MAX_KEPT_ENTRY_BYTES:
            _cache_value(self.spelled, tail_match[0], (entry, tuple(places)))
        return entry, tuple(places)

    def _resolve_size(self, made_size: bytes, fetched_size: bytes, places: list[Value]) -> Value:
        """The size that is written out, whose ``places`` are appended; or the one fetched: from an earlier record, out
        of the memo, or from this record, whose places are not in the memo yet."""
        if made_size:
            size = self.decode_size(made_size)
            places += () if size is None else _list_size_places(size)
            return size
        place = fetched_size[1] if len(fetched_size) == 2 else U32.unpack_from(fetched_size, 1)[0]
        own = place - self.machine.memo.next_place if self.put else -1
        return self.machine.memo.fetch(place) if own < 0 else places[own]

    def _make_entry(self, facts: bytes, strides: bytes | None, sizes: list[Value]) -> TensorStorageMetadata | None:
        """The entry of these properties and ``sizes``: of the tensor, then offsets and sizes of each chunk. Equal
        entries are one object. None where the opcodes make none."""
        key = (facts, strides, *sizes)
        entry = self.kept.get(key)
        if entry is None:
            properties = self._make_properties(facts, strides)
            if properties is None:
                return None
            chunks = [ChunkStorageMetadata(*sizes[position : position + 2]) for position in range(1, len(sizes), 2)]
            entry = TensorStorageMetadata(properties, sizes[0], chunks)
            if len(sizes) <= MAX_KEPT_ENTRY_SIZES:
                _cache_value(self.kept, key, entry)
        return entry

    def _make_properties(self, facts: bytes, strides: bytes | None) -> TensorProperties | None:
        state: list[Value] = [
            flag == b"\x88" if flag else self.fetch_value(fetch) for flag, fetch in _PROPERTY_OPCODES.findall(facts)
        ]
        if strides is not None:
            dims = _decode_int_tuple(strides)
            state.append(None if strides == b"N" else UNSET if dims is None else dims)
        if any(value is UNSET for value in state):
            return None
        properties = object.__new__(TensorProperties)
        properties.set_state(tuple(state))
        return properties


def _cache_value(cache: dict[Value, Value], key: Value, value: Value) -> None:
    if len(cache) >= MAX_KEPT_ENTRIES:
        cache.clear()
    cache[key] = value


def _list_size_places(size: Size) -> tuple[Value, ...]:
    """The memo entries of a size: the tuple behind it unless that is empty, the arguments, and itself."""
    return (UNSET, UNSET, size) if size else (UNSET, size)


def _decode_int(opcode: bytes) -> int:
    """The integer that an opcode with its operand pushes."""
    start = 2 if opcode[0] == 0x8A else 1
    return int.from_bytes(opcode[start:], "little", signed=opcode[0] not in b"KM")


def _decode_int_tuple(opcodes: bytes) -> tuple[int, ...] | None:
    """The tuple of integers that some opcodes make; None where these make none."""
    has_mark, opcodes = opcodes.startswith(b"("), opcodes.removesuffix(b"\x94")
    dims = tuple(map(_decode_int, _INTEGER_OPCODE.findall(opcodes, 1 if has_mark else 0, len(opcodes) - 1)))
    expected_items = {b")": 0, b"\x85": 1, b"\x86": 2, b"\x87": 3}.get(opcodes[-1:], -1)
    return dims if (has_mark if expected_items < 0 else expected_items == len(dims) and not has_mark) else None


_INTEGER_OPCODE = re.compile(rb"(?s:" + _INTEGER + rb")")
_PROPERTY_OPCODES = re.compile(rb"(?s:([\x88\x89])|(h.|j....))")


_MACRO_BY_CLASS: dict[type[DcpRecord], type[RecordMacro]] = {
    ChunkStorageMetadata: _ChunkMacro,
    MetadataIndex: _IndexMacro,
    StorageInfo: _InfoMacro,
    TensorStorageMetadata: _TensorMacro,
}

MACROS: dict[tuple[str, str], type[RecordMacro]] = {
    name: _MACRO_BY_CLASS[kind] for name, kind in RECORD_CLASSES.items() if kind in _MACRO_BY_CLASS
}
"""Macros by class; records of tensors that are equal are shared."""

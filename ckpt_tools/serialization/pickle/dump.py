"""Pickles values in protocol 2 as ``torch.save`` does, without importing the classes that they name.

The result loads with ``pickle``, with ``torch.load(weights_only=True)`` where torch allows its globals, and with
``load.loads``. Memory entries (PUT) are made only for values that may be referred to again: names and strings by value,
mutable objects and tensors by identity. The records of a DCP have spelled-out encoders, since a million chunks are
three million of them (measured on the 2-core reference machine: 3.4 s, 119 MB).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from itertools import chain, islice
from typing import Any

from ckpt_tools.core.values import (
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
from ckpt_tools.serialization.pickle.dcp_metadata import (
    GLOBALS,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    Record,
    StorageInfo,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

BATCH = 1000
"""Items between a MARK and its SETITEMS or APPENDS, as the pickle module does it, so that readers need little stack."""

MAX_CACHED_SIZES = 1 << 16
"""Sizes whose bytes are kept: a chunk's offsets are written twice, and chunks of a tensor have few sizes."""

_PY2_MODULES = {"builtins": "__builtin__", "copyreg": "copy_reg"}

_SET, _FROZENSET = GlobalRef("builtins", "set"), GlobalRef("builtins", "frozenset")
_BYTEARRAY, _COMPLEX = GlobalRef("builtins", "bytearray"), GlobalRef("builtins", "complex")
_ENCODE = GlobalRef("_codecs", "encode")
_ORDERED_DICT, _DEFAULT_DICT = GlobalRef("collections", "OrderedDict"), GlobalRef("collections", "defaultdict")
_SIZE = GlobalRef("torch", "Size")
_UNTYPED = GlobalRef("torch.storage", "UntypedStorage")
_TENSOR, _TENSOR_V3 = GlobalRef("torch._utils", "_rebuild_tensor_v2"), GlobalRef("torch._utils", "_rebuild_tensor_v3")
_META_TENSOR = GlobalRef("torch._utils", "_rebuild_meta_tensor_no_storage")
_PARAMETER = GlobalRef("torch._utils", "_rebuild_parameter")
_PARAMETER_WITH_STATE = GlobalRef("torch._utils", "_rebuild_parameter_with_state")
_FROM_TYPE = GlobalRef("torch._tensor", "_rebuild_from_type_v2")

_TUPLE_OPCODES = {1: b"\x85", 2: b"\x86", 3: b"\x87"}


class Pairs:
    """A dict whose items are made while they are written, and not kept: the items of a million chunks take 400 MB."""

    __slots__ = ("items",)

    def __init__(self, items: Iterable[tuple[Value, Value]]) -> None:
        self.items = items


def dumps(value: Value) -> bytes:
    """``value`` as a pickle of protocol 2. Raises TypeError for a type that is not of ``values``."""
    return dumps_with_storages(value)[0]


def dumps_with_storages(value: Value) -> tuple[bytes, dict[str, StorageRef]]:
    """``value`` as a pickle, and the storages that its tensors view, by key."""
    writer = _Writer()
    writer.write(value)
    writer.out += b"."
    return bytes(writer.out), writer.storages


class _Writer:
    def __init__(self) -> None:
        self.out = bytearray(b"\x80\x02")
        self.storages: dict[str, StorageRef] = {}
        self._num_memo = 0
        self._names: dict[str | GlobalRef, bytes] = {}
        self._objects: dict[int, bytes] = {}
        # What was memoised by id must not be freed and its id reused meanwhile.
        self._alive: list[Value] = []
        self._sizes: dict[Size, bytes] = {}
        self._templates: dict[type, tuple[bytes, ...]] = {}

    def write(self, value: Value) -> None:
        encode = _ENCODERS.get(type(value))
        if encode is None:
            raise TypeError(f"a {type(value).__name__} cannot be pickled")
        encode(self, value)

    # Memory

    def _put(self) -> bytes:
        """Memoise the top of the stack; the opcode that refers to it."""
        index = self._num_memo
        self._num_memo += 1
        if index < 256:
            self.out += b"q%c" % index
            return b"h%c" % index
        self.out += b"r" + struct.pack("<I", index)
        return b"j" + struct.pack("<I", index)

    def _remember(self, value: Value) -> None:
        self._objects[id(value)] = self._put()
        self._alive.append(value)

    def _recalled(self, value: Value) -> bool:
        """True where ``value`` was written before, and a reference to it was written now."""
        known = self._objects.get(id(value))
        if known is None:
            return False
        self.out += known
        return True

    # Scalars

    def constant(self, value: bool | None) -> None:
        self.out += b"N" if value is None else b"\x88" if value else b"\x89"

    def integer(self, value: int) -> None:
        self.out += _integer(value)

    def real(self, value: float) -> None:
        self.out += b"G" + struct.pack(">d", value)

    def text(self, value: str) -> None:
        known = self._names.get(value)
        if known is not None:
            self.out += known
            return
        self._long_text(value)
        self._names[value] = self._put()

    def raw(self, value: bytes) -> None:
        """Protocol 2 has no bytes: they are the text of the same code points, encoded."""
        if not self._recalled(value):
            self.name(_ENCODE)
            self._long_text(value.decode("latin-1"))
            self.text("latin1")
            self.out += b"\x86R"
            self._remember(value)

    def mutable_raw(self, value: bytearray) -> None:
        if not self._recalled(value):
            self.name(_BYTEARRAY)
            self.raw(bytes(value))
            self.out += b"\x85R"
            self._remember(value)

    def _long_text(self, value: str) -> None:
        """A text that is not remembered."""
        data = value.encode("utf-8", "surrogatepass")
        wide = len(data) >= 1 << 32
        self.out += b"\x8d" + struct.pack("<Q", len(data)) if wide else b"X" + struct.pack("<I", len(data))
        self.out += data

    def imaginary(self, value: complex) -> None:
        self.name(_COMPLEX)
        self.real(value.real)
        self.real(value.imag)
        self.out += b"\x86R"

    def name(self, ref: GlobalRef) -> None:
        known = self._names.get(ref)
        if known is not None:
            self.out += known
            return
        module, name = _PY2_MODULES.get(ref.module, ref.module), ref.name
        if "\n" in module or "\n" in name:
            self.text(module)
            self.text(name)
            self.out += b"\x93"
        else:
            self.out += b"c%b\n%b\n" % (module.encode(), name.encode())
        self._names[ref] = self._put()

    # Containers

    def tuple_(self, value: tuple[Value, ...]) -> None:
        if not value:
            self.out += b")"
            return
        if self._recalled(value):
            return
        self.out += b"" if len(value) < 4 else b"("
        for item in value:
            self.write(item)
        if id(value) in self._objects:
            # It contains an object that contains it, and was written with that: drop the items written now.
            self.out += (b"0" * len(value) if len(value) < 4 else b"1") + self._objects[id(value)]
            return
        self.out += _TUPLE_OPCODES.get(len(value), b"t")
        self._remember(value)

    def list_(self, value: list[Value]) -> None:
        if not self._recalled(value):
            self.out += b"]"
            self._remember(value)
            self._items(value)

    def _items(self, values: Iterable[Value], opcodes: tuple[bytes, bytes] = (b"a", b"e"), width: int = 1) -> None:
        """Values in batches, each of ``width`` a step; ``opcodes`` set one step and a batch of several."""
        rest = iter(values)
        while batch := list(islice(rest, BATCH * width)):
            single = len(batch) == width
            self.out += b"" if single else b"("
            for item in batch:
                self.write(item)
            self.out += opcodes[not single]

    def dict_(self, value: dict[Value, Value]) -> None:
        if not self._recalled(value):
            self.out += b"}"
            self._remember(value)
            self._pairs(value.items())

    def _pairs(self, pairs: Iterable[tuple[Value, Value]]) -> None:
        self._items(chain.from_iterable(pairs), (b"s", b"u"), 2)

    def pairs(self, value: Pairs) -> None:
        self.out += b"}"
        self._pairs(value.items)

    def set_(self, value: set[Value] | frozenset[Value]) -> None:
        """In an order that is the same in every run, unlike that of the hashes of strings."""
        if not self._recalled(value):
            self.name(_SET if isinstance(value, set) else _FROZENSET)
            self.out += b"]"
            self._items(sorted(value, key=lambda item: (type(item).__name__, repr(item))))
            self.out += b"\x85R"
            self._remember(value)

    def ordered_dict(self, value: OrderedDict) -> None:
        if not self._recalled(value):
            self._empty_ordered_dict()
            self._remember(value)
            self._pairs(value.items())
            self._state(value.attributes)

    def _empty_ordered_dict(self) -> None:
        self.name(_ORDERED_DICT)
        self.out += b")R"

    def default_dict(self, value: DefaultDict) -> None:
        if not self._recalled(value):
            self.name(_DEFAULT_DICT)
            self._arguments((value.factory,))
            self.out += b"R"
            self._remember(value)
            self._pairs(value.items())

    # Objects

    def _arguments(self, args: Iterable[Value]) -> None:
        """A tuple that nothing refers to again."""
        items = tuple(args)
        self.out += b"" if 0 < len(items) < 4 else b"("
        for item in items:
            self.write(item)
        self.out += _TUPLE_OPCODES.get(len(items), b"t")

    def _state(self, state: Value) -> None:
        if state is not None:
            self.write(state)
            self.out += b"b"

    def opaque(self, value: Opaque) -> None:
        if self._recalled(value):
            return
        self.write(value.ref)
        self.tuple_(value.args)
        if value.kwargs is not None:
            self.dict_(value.kwargs)
        self.out += b"R" if value.form == "call" else b"\x81" if value.kwargs is None else b"\x92"
        self._remember(value)
        self._items(value.items)
        self._pairs(value.pairs)
        self._state(value.state)

    # Tensors

    def storage(self, value: StorageRef) -> None:
        known = self.storages.setdefault(value.key, value)
        assert known == value, f"storage {value.key} is two different ones"
        self.out += b"("
        self.text("storage")
        if value.dtype is None:
            self.name(_UNTYPED)
        else:
            assert value.dtype.torch_storage is not None, "StorageRef.holding makes storages of newer types untyped"
            self.name(GlobalRef("torch", value.dtype.torch_storage))
        self.text(value.key)
        self.text(value.location)
        self.integer(value.numel)
        self.out += b"tQ"

    def tensor(self, value: StoredTensor) -> None:
        if not self._recalled(value):
            if value.wrapper is None:
                self.name(_function(value))
                self._tensor_arguments(value, value.requires_grad)
                self.out += b"R"
            elif value.wrapper == PARAMETER:
                self._parameter(value)
            else:
                self._wrapped_tensor(value)
            self._remember(value)

    def _tensor_arguments(self, value: StoredTensor, requires_grad: bool) -> None:
        dtype = GlobalRef("torch", value.dtype.value)
        if value.storage is None:
            self._arguments((dtype, value.shape, value.strides, requires_grad))
            return
        self.out += b"("
        for part in (value.storage, value.storage_offset, value.shape, value.strides, requires_grad):
            self.write(part)
        self._empty_ordered_dict()
        if _function(value) == _TENSOR_V3:
            self.name(dtype)
        self.out += b"t"

    def _parameter(self, value: StoredTensor) -> None:
        """``_rebuild_parameter(data, requires_grad, hooks)``, where ``data`` itself requires none."""
        self.name(_PARAMETER if value.state is None else _PARAMETER_WITH_STATE)
        self.out += b"("
        self.name(_function(value))
        self._tensor_arguments(value, requires_grad=False)
        self.out += b"R"
        self.constant(value.requires_grad)
        self._empty_ordered_dict()
        if value.state is not None:
            self.write(value.state)
        self.out += b"tR"

    def _wrapped_tensor(self, value: StoredTensor) -> None:
        self.name(_FROM_TYPE)
        self.out += b"("
        self.name(_function(value))
        assert value.wrapper is not None
        self.name(value.wrapper)
        self._tensor_arguments(value, value.requires_grad)
        self.write({} if value.state is None else value.state)
        self.out += b"tR"

    # Records of a DCP

    def size(self, value: Size) -> None:
        self.name(_SIZE)
        self.out += _size_arguments(value)

    def _size(self, value: Size) -> bytes:
        """The bytes of a ``Size`` after the first."""
        known = self._sizes.get(value)
        if known is None:
            known = self._spelled(_SIZE) + _size_arguments(value)
            if len(self._sizes) >= MAX_CACHED_SIZES:
                self._sizes.clear()
            self._sizes[value] = known
        return known

    def _spelled(self, name: str | GlobalRef) -> bytes:
        """The reference to ``name``, which is written (and dropped again) if it was not yet."""
        if name not in self._names:
            self.write(name)
            self.out += b"0"
        return self._names[name]

    def _template(self, kind: type[Record], *names: str) -> tuple[bytes, ...]:
        """A new object of ``kind`` with its first field's name, then the names of the others."""
        found = self._templates.get(kind)
        if found is None:
            first, *others = (self._spelled(name) for name in names)
            found = self._templates[kind] = (self._spelled(GLOBALS[kind]) + b")\x81}(" + first, *others)
        return found

    def record(self, value: Record) -> None:
        """An object of a dataclass, which nothing refers to again, and its attributes."""
        self.name(GLOBALS[type(value)])
        self.out += b")\x81"
        if not isinstance(value, BytesStorageMetadata):
            self._state(value.state)

    def chunk(self, value: ChunkStorageMetadata) -> None:
        new, sizes = self._template(ChunkStorageMetadata, "offsets", "sizes")
        self.out += b"%b%b%b%bub" % (new, self._size(value.offsets), sizes, self._size(value.sizes))

    def index(self, value: MetadataIndex) -> None:
        new, index, offset = self._template(MetadataIndex, "fqn", "index", "offset")
        at = b"N" if value.offset is None else self._size(value.offset)
        hint = b"N" if value.index is None else _integer(value.index)
        self.out += b"%b%b%b%b%b%bub" % (new, self._spelled(value.fqn), index, hint, offset, at)

    def info(self, value: StorageInfo) -> None:
        new, offset, length = self._template(StorageInfo, "relative_path", "offset", "length")
        path, start, size = self._spelled(value.relative_path), _integer(value.offset), _integer(value.length)
        self.out += b"%b%b%b%b%b%b" % (new, path, offset, start, length, size)
        if value.transform_descriptors is not None:
            self.text("transform_descriptors")
            self.write(value.transform_descriptors)
        self.out += b"ub"


def _integer(value: int) -> bytes:
    if 0 <= value < 1 << 8:
        return b"K%c" % value
    if 0 <= value < 1 << 16:
        return b"M" + value.to_bytes(2, "little")
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + value.to_bytes(4, "little", signed=True)
    # Two's complement with room for the sign, as pickle.encode_long.
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a%c" % len(data) + data if len(data) < 256 else b"\x8b" + struct.pack("<i", len(data)) + data


def _size_arguments(value: Size) -> bytes:
    dims = b"".join(map(_integer, value))
    return (dims if 0 < len(value) < 4 else b"(" + dims) + _TUPLE_OPCODES.get(len(value), b"t") + b"\x85R"


def _function(value: StoredTensor) -> GlobalRef:
    """Function that rebuilds the bare tensor: a storage of another type than the tensor needs the newer one."""
    if value.storage is None:
        return _META_TENSOR
    return _TENSOR if value.storage.dtype is value.dtype else _TENSOR_V3


_ENCODERS: dict[type, Callable[[_Writer, Any], None]] = {
    type(None): _Writer.constant,
    bool: _Writer.constant,
    int: _Writer.integer,
    float: _Writer.real,
    complex: _Writer.imaginary,
    str: _Writer.text,
    bytes: _Writer.raw,
    bytearray: _Writer.mutable_raw,
    tuple: _Writer.tuple_,
    list: _Writer.list_,
    dict: _Writer.dict_,
    Pairs: _Writer.pairs,
    set: _Writer.set_,
    frozenset: _Writer.set_,
    OrderedDict: _Writer.ordered_dict,
    DefaultDict: _Writer.default_dict,
    Size: _Writer.size,
    GlobalRef: _Writer.name,
    Opaque: _Writer.opaque,
    StorageRef: _Writer.storage,
    StoredTensor: _Writer.tensor,
    ChunkStorageMetadata: _Writer.chunk,
    MetadataIndex: _Writer.index,
    StorageInfo: _Writer.info,
    TensorProperties: _Writer.record,
    TensorStorageMetadata: _Writer.record,
    BytesStorageMetadata: _Writer.record,
    StorageMeta: _Writer.record,
    Metadata: _Writer.record,
}

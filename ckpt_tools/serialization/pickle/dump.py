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
    GLOBAL_BY_CLASS,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    DcpRecord,
    Metadata,
    MetadataIndex,
    StorageInfo,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from ckpt_tools.serialization.pickle.torch_names import (
    REBUILD_FROM_TYPE,
    REBUILD_META_TENSOR,
    REBUILD_PARAMETER,
    REBUILD_PARAMETER_WITH_STATE,
    REBUILD_TENSOR_V2,
    REBUILD_TENSOR_V3,
)

BATCH_ITEMS = 1000
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

_TUPLE_OPCODES = {1: b"\x85", 2: b"\x86", 3: b"\x87"}


class StreamedDict:
    """A dict whose items are made while they are written, and not kept: the items of a million chunks take 400 MB."""

    __slots__ = ("items",)

    def __init__(self, items: Iterable[tuple[Value, Value]]) -> None:
        self.items = items


def dumps(value: Value) -> bytes:
    """``value`` as a pickle of protocol 2. Raises TypeError for a type that is not of ``values``."""
    return dumps_with_storages(value)[0]


def dumps_with_storages(value: Value) -> tuple[bytes, dict[str, StorageRef]]:
    """``value`` as a pickle, and the storages that its tensors view, by key."""
    writer = _PickleWriter()
    writer.write(value)
    writer.out += b"."
    return bytes(writer.out), writer.storages


class _PickleWriter:
    def __init__(self) -> None:
        self.out = bytearray(b"\x80\x02")
        self.storages: dict[str, StorageRef] = {}
        self._memo_size = 0
        self._reference_by_name: dict[str | GlobalRef, bytes] = {}
        self._reference_by_id: dict[int, bytes] = {}
        # What was memoised by id must not be freed and its id reused meanwhile.
        self._memoized_objects: list[Value] = []
        self._encoded_sizes: dict[Size, bytes] = {}
        self._templates: dict[type, tuple[bytes, ...]] = {}

    def write(self, value: Value) -> None:
        encode = _WRITE_METHODS.get(type(value))
        if encode is not None:
            encode(self, value)
            return
        encode = _WRITE_SHARED_METHODS.get(type(value))
        if encode is None:
            raise TypeError(f"a {type(value).__name__} cannot be pickled")
        reference = self._reference_by_id.get(id(value))
        if reference is None:
            encode(self, value)
        else:
            self.out += reference

    # Memory

    def _memoize_top(self) -> bytes:
        """Memoise the top of the stack, and give the opcode that refers to it."""
        index = self._memo_size
        self._memo_size += 1
        if index < 256:
            self.out += b"q%c" % index
            return b"h%c" % index
        self.out += b"r" + struct.pack("<I", index)
        return b"j" + struct.pack("<I", index)

    def _memoize_object(self, value: Value) -> None:
        self._reference_by_id[id(value)] = self._memoize_top()
        self._memoized_objects.append(value)

    # Scalars

    def write_constant(self, value: bool | None) -> None:
        self.out += b"N" if value is None else b"\x88" if value else b"\x89"

    def write_integer(self, value: int) -> None:
        self.out += _encode_integer(value)

    def write_float(self, value: float) -> None:
        self.out += b"G" + struct.pack(">d", value)

    def write_text(self, value: str) -> None:
        reference = self._reference_by_name.get(value)
        if reference is not None:
            self.out += reference
            return
        self._write_unmemoized_text(value)
        self._reference_by_name[value] = self._memoize_top()

    def write_bytes(self, value: bytes) -> None:
        """Protocol 2 has no bytes: they are the text of the same code points, encoded."""
        self.write_global(_ENCODE)
        self._write_unmemoized_text(value.decode("latin-1"))
        self.write_text("latin1")
        self.out += b"\x86R"
        self._memoize_object(value)

    def write_bytearray(self, value: bytearray) -> None:
        self.write_global(_BYTEARRAY)
        self.write(bytes(value))
        self.out += b"\x85R"
        self._memoize_object(value)

    def _write_unmemoized_text(self, value: str) -> None:
        """Write a text that nothing refers to again."""
        data = value.encode("utf-8", "surrogatepass")
        is_long = len(data) >= 1 << 32
        self.out += b"\x8d" + struct.pack("<Q", len(data)) if is_long else b"X" + struct.pack("<I", len(data))
        self.out += data

    def write_complex(self, value: complex) -> None:
        self.write_global(_COMPLEX)
        self.write_float(value.real)
        self.write_float(value.imag)
        self.out += b"\x86R"

    def write_global(self, ref: GlobalRef) -> None:
        reference = self._reference_by_name.get(ref)
        if reference is not None:
            self.out += reference
            return
        module, name = _PY2_MODULES.get(ref.module, ref.module), ref.name
        if "\n" in module or "\n" in name:
            self.write_text(module)
            self.write_text(name)
            self.out += b"\x93"
        else:
            self.out += b"c%b\n%b\n" % (module.encode(), name.encode())
        self._reference_by_name[ref] = self._memoize_top()

    # Containers

    def write_tuple(self, value: tuple[Value, ...]) -> None:
        if not value:
            self.out += b")"
            return
        self.out += b"" if len(value) < 4 else b"("
        for item in value:
            self.write(item)
        if id(value) in self._reference_by_id:
            # It contains an object that contains it, and was written with that object: take the items written now off
            # the stack, and fetch it from the memo, as Python's pickler does.
            self.out += (b"0" * len(value) if len(value) < 4 else b"1") + self._reference_by_id[id(value)]
            return
        self.out += _TUPLE_OPCODES.get(len(value), b"t")
        self._memoize_object(value)

    def write_list(self, value: list[Value]) -> None:
        self.out += b"]"
        self._memoize_object(value)
        self._write_items(value)

    def _write_items(
        self, values: Iterable[Value], opcodes: tuple[bytes, bytes] = (b"a", b"e"), width: int = 1
    ) -> None:
        """Write values in batches. A step is ``width`` values, an item or a pair; ``opcodes`` are those that add one
        step, and those that add several since a MARK."""
        remaining = iter(values)
        while batch := list(islice(remaining, BATCH_ITEMS * width)):
            is_single = len(batch) == width
            self.out += b"" if is_single else b"("
            for item in batch:
                self.write(item)
            self.out += opcodes[not is_single]

    def write_dict(self, value: dict[Value, Value]) -> None:
        self.out += b"}"
        self._memoize_object(value)
        self._write_pairs(value.items())

    def _write_pairs(self, pairs: Iterable[tuple[Value, Value]]) -> None:
        self._write_items(chain.from_iterable(pairs), (b"s", b"u"), 2)

    def write_streamed_dict(self, value: StreamedDict) -> None:
        self.out += b"}"
        self._write_pairs(value.items)

    def write_set(self, value: set[Value] | frozenset[Value]) -> None:
        """Write the items in an order that is the same in every run, unlike that of the hashes of strings."""
        self.write_global(_SET if isinstance(value, set) else _FROZENSET)
        self.out += b"]"
        self._write_items(sorted(value, key=lambda item: (type(item).__name__, repr(item))))
        self.out += b"\x85R"
        self._memoize_object(value)

    def write_ordered_dict(self, value: OrderedDict) -> None:
        self._write_empty_ordered_dict()
        self._memoize_object(value)
        self._write_pairs(value.items())
        self._write_state(value.attributes)

    def _write_empty_ordered_dict(self) -> None:
        self.write_global(_ORDERED_DICT)
        self.out += b")R"

    def write_default_dict(self, value: DefaultDict) -> None:
        self.write_global(_DEFAULT_DICT)
        self._write_arguments((value.factory,))
        self.out += b"R"
        self._memoize_object(value)
        self._write_pairs(value.items())

    # Objects

    def _write_arguments(self, args: Iterable[Value]) -> None:
        """Write a tuple that nothing refers to again."""
        items = tuple(args)
        self.out += b"" if 0 < len(items) < 4 else b"("
        for item in items:
            self.write(item)
        self.out += _TUPLE_OPCODES.get(len(items), b"t")

    def _write_state(self, state: Value) -> None:
        if state is not None:
            self.write(state)
            self.out += b"b"

    def write_opaque(self, value: Opaque) -> None:
        self.write(value.ref)
        self.write(value.args)
        if value.kwargs is not None:
            self.write(value.kwargs)
        self.out += b"R" if value.form == "call" else b"\x81" if value.kwargs is None else b"\x92"
        self._memoize_object(value)
        self._write_items(value.items)
        self._write_pairs(value.pairs)
        self._write_state(value.state)

    # Tensors

    def write_storage(self, value: StorageRef) -> None:
        first_storage = self.storages.setdefault(value.key, value)
        assert first_storage == value, f"storage {value.key} is two different ones"
        self.out += b"("
        self.write_text("storage")
        if value.dtype is None:
            self.write_global(_UNTYPED)
        else:
            assert value.dtype.torch_storage is not None, "StorageRef.of_elements makes storages of newer types untyped"
            self.write_global(GlobalRef("torch", value.dtype.torch_storage))
        self.write_text(value.key)
        self.write_text(value.location)
        self.write_integer(value.numel)
        self.out += b"tQ"

    def write_tensor(self, value: StoredTensor) -> None:
        if value.wrapper is None:
            self.write_global(_choose_rebuild_function(value))
            self._write_tensor_arguments(value, value.requires_grad)
            self.out += b"R"
        elif value.wrapper == PARAMETER:
            self._write_parameter(value)
        else:
            self._write_wrapped_tensor(value)
        self._memoize_object(value)

    def _write_tensor_arguments(self, value: StoredTensor, requires_grad: bool) -> None:
        dtype = GlobalRef("torch", value.dtype.value)
        if value.storage is None:
            self._write_arguments((dtype, value.shape, value.strides, requires_grad))
            return
        self.out += b"("
        for part in (value.storage, value.storage_offset, value.shape, value.strides, requires_grad):
            self.write(part)
        self._write_empty_ordered_dict()
        if _choose_rebuild_function(value) == REBUILD_TENSOR_V3:
            self.write_global(dtype)
        self.out += b"t"

    def _write_parameter(self, value: StoredTensor) -> None:
        """``_rebuild_parameter(data, requires_grad, hooks)``, where ``data`` itself requires none."""
        self.write_global(REBUILD_PARAMETER if value.state is None else REBUILD_PARAMETER_WITH_STATE)
        self.out += b"("
        self.write_global(_choose_rebuild_function(value))
        self._write_tensor_arguments(value, requires_grad=False)
        self.out += b"R"
        self.write_constant(value.requires_grad)
        self._write_empty_ordered_dict()
        if value.state is not None:
            self.write(value.state)
        self.out += b"tR"

    def _write_wrapped_tensor(self, value: StoredTensor) -> None:
        self.write_global(REBUILD_FROM_TYPE)
        self.out += b"("
        self.write_global(_choose_rebuild_function(value))
        assert value.wrapper is not None
        self.write_global(value.wrapper)
        self._write_tensor_arguments(value, value.requires_grad)
        self.write({} if value.state is None else value.state)
        self.out += b"tR"

    # Records of a DCP

    def write_size(self, value: Size) -> None:
        self.write_global(_SIZE)
        self.out += _encode_size_arguments(value)

    def _encode_size(self, value: Size) -> bytes:
        """The opcodes of a ``Size``, kept for the next equal one."""
        encoded = self._encoded_sizes.get(value)
        if encoded is None:
            encoded = self._get_reference(_SIZE) + _encode_size_arguments(value)
            if len(self._encoded_sizes) >= MAX_CACHED_SIZES:
                self._encoded_sizes.clear()
            self._encoded_sizes[value] = encoded
        return encoded

    def _get_reference(self, name: str | GlobalRef) -> bytes:
        """The reference to ``name``, which is written (and dropped again) if it was not yet."""
        if name not in self._reference_by_name:
            self.write(name)
            self.out += b"0"
        return self._reference_by_name[name]

    def _get_record_template(self, kind: type[DcpRecord], *names: str) -> tuple[bytes, ...]:
        """Opcodes of a record of ``kind``: a new object with the name of its first field, then the name of each other
        field."""
        template = self._templates.get(kind)
        if template is None:
            first, *others = (self._get_reference(name) for name in names)
            new_object = self._get_reference(GLOBAL_BY_CLASS[kind]) + b")\x81}("
            template = self._templates[kind] = (new_object + first, *others)
        return template

    def write_record(self, value: DcpRecord) -> None:
        """Write a record, which nothing refers to again, with its attributes."""
        self.write_global(GLOBAL_BY_CLASS[type(value)])
        self.out += b")\x81"
        if not isinstance(value, BytesStorageMetadata):
            self._write_state(value.state)

    def write_chunk(self, value: ChunkStorageMetadata) -> None:
        new, sizes = self._get_record_template(ChunkStorageMetadata, "offsets", "sizes")
        self.out += b"%b%b%b%bub" % (new, self._encode_size(value.offsets), sizes, self._encode_size(value.sizes))

    def write_index(self, value: MetadataIndex) -> None:
        new, index, offset = self._get_record_template(MetadataIndex, "fqn", "index", "offset")
        offset_opcodes = b"N" if value.offset is None else self._encode_size(value.offset)
        hint = b"N" if value.index is None else _encode_integer(value.index)
        self.out += b"%b%b%b%b%b%bub" % (new, self._get_reference(value.fqn), index, hint, offset, offset_opcodes)

    def write_storage_info(self, value: StorageInfo) -> None:
        new, offset, length = self._get_record_template(StorageInfo, "relative_path", "offset", "length")
        path = self._get_reference(value.relative_path)
        start, size = _encode_integer(value.offset), _encode_integer(value.length)
        self.out += b"%b%b%b%b%b%b" % (new, path, offset, start, length, size)
        if value.transform_descriptors is not None:
            self.write_text("transform_descriptors")
            self.write(value.transform_descriptors)
        self.out += b"ub"


def _encode_integer(value: int) -> bytes:
    if 0 <= value < 1 << 8:
        return b"K%c" % value
    if 0 <= value < 1 << 16:
        return b"M" + value.to_bytes(2, "little")
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + value.to_bytes(4, "little", signed=True)
    # Two's complement with room for the sign, as pickle.encode_long.
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a%c" % len(data) + data if len(data) < 256 else b"\x8b" + struct.pack("<i", len(data)) + data


def _encode_size_arguments(value: Size) -> bytes:
    dims = b"".join(map(_encode_integer, value))
    return (dims if 0 < len(value) < 4 else b"(" + dims) + _TUPLE_OPCODES.get(len(value), b"t") + b"\x85R"


def _choose_rebuild_function(value: StoredTensor) -> GlobalRef:
    """Function that rebuilds the bare tensor: a storage of another type than the tensor needs the newer one."""
    if value.storage is None:
        return REBUILD_META_TENSOR
    return REBUILD_TENSOR_V2 if value.storage.dtype is value.dtype else REBUILD_TENSOR_V3


_WRITE_METHODS: dict[type, Callable[[_PickleWriter, Any], None]] = {
    type(None): _PickleWriter.write_constant,
    bool: _PickleWriter.write_constant,
    int: _PickleWriter.write_integer,
    float: _PickleWriter.write_float,
    complex: _PickleWriter.write_complex,
    str: _PickleWriter.write_text,
    StreamedDict: _PickleWriter.write_streamed_dict,
    Size: _PickleWriter.write_size,
    GlobalRef: _PickleWriter.write_global,
    StorageRef: _PickleWriter.write_storage,
    ChunkStorageMetadata: _PickleWriter.write_chunk,
    MetadataIndex: _PickleWriter.write_index,
    StorageInfo: _PickleWriter.write_storage_info,
    TensorProperties: _PickleWriter.write_record,
    TensorStorageMetadata: _PickleWriter.write_record,
    BytesStorageMetadata: _PickleWriter.write_record,
    StorageMeta: _PickleWriter.write_record,
    Metadata: _PickleWriter.write_record,
}

_WRITE_SHARED_METHODS: dict[type, Callable[[_PickleWriter, Any], None]] = {
    bytes: _PickleWriter.write_bytes,
    bytearray: _PickleWriter.write_bytearray,
    tuple: _PickleWriter.write_tuple,
    list: _PickleWriter.write_list,
    dict: _PickleWriter.write_dict,
    set: _PickleWriter.write_set,
    frozenset: _PickleWriter.write_set,
    OrderedDict: _PickleWriter.write_ordered_dict,
    DefaultDict: _PickleWriter.write_default_dict,
    Opaque: _PickleWriter.write_opaque,
    StoredTensor: _PickleWriter.write_tensor,
}
"""Of values that are written once, and referred to where they are met again."""

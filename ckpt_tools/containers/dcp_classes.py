"""The dataclasses of a DCP ``.metadata`` pickle, inert.

Field for field those of ``torch.distributed.checkpoint.metadata`` and ``.filesystem`` (torch 2.15.0). A checkpoint of a
million chunks holds three million of these, so they are slotted and built straight by BUILD: ``__setstate__`` checks
the fields and then empties the state dict, which the unpickler's memo would keep alive until the end (measured: 250
bytes each). An object that a hostile pickle makes and never fills raises MalformedError where it is used.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import chain
from operator import attrgetter
from typing import Any, NoReturn

from ckpt_tools.dtypes import DType
from ckpt_tools.errors import MalformedError, UnsupportedError
from ckpt_tools.values import INT64_MAX, GlobalRef, Opaque, Size, Value


class SealedType(type):
    """A class whose attributes cannot be set: BUILD on the class itself must not reach it."""

    def __setattr__(cls, name: str, value: object) -> NoReturn:
        raise MalformedError("a pickle changes a class")

    def __delattr__(cls, name: str) -> NoReturn:
        raise MalformedError("a pickle changes a class")


class Record(metaclass=SealedType):
    """A slotted object; its fields are the slots of its class."""

    __slots__ = ()

    def __getattr__(self, name: str) -> NoReturn:
        # Only reached where a slot was never filled.
        if name in type(self).__slots__:
            raise MalformedError(f"a {type(self).__name__} of the pickle has no {name!r}")
        raise AttributeError(name)

    @property
    def fields(self) -> dict[str, Value]:
        names: tuple[str, ...] = type(self).__slots__
        return {name: getattr(self, name) for name in names}

    def check(self) -> tuple[Value, ...]:
        """The values inside it that could be anything, once the fields that could not are found in order.

        Run when the whole pickle was read, since a list may be changed after it became a field.
        """
        return ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Record) and type(other) is type(self) and self.fields == other.fields

    __hash__ = None  # type: ignore[assignment]  # only a MetadataIndex is ever a key

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in self.fields.items())})"


_STORAGE_INFO_FIELDS = ("relative_path", "offset", "length", "transform_descriptors")


def _refuse_rest(kind: str, state: dict[str, Value], *known: str) -> None:
    """Raises UnsupportedError where the state holds more: a field we do not know may change what the others mean."""
    unknown = [name for name in state if name not in known]
    if unknown:
        raise UnsupportedError(f"a {kind} has a field {unknown[0]!r}, which this version does not know")


def _wrong(kind: str) -> MalformedError:
    return MalformedError(f"a {kind} holds values of the wrong kind")


class ChunkStorageMetadata(Record):
    """A stored region of a tensor: ``offsets`` and ``sizes``, in elements."""

    __slots__ = ("offsets", "sizes")
    offsets: Size
    sizes: Size

    def __init__(self, offsets: Size, sizes: Size) -> None:
        self.__setstate__({"offsets": offsets, "sizes": sizes})

    def __reduce__(self) -> tuple[object, ...]:
        return ChunkStorageMetadata, (self.offsets, self.sizes)

    def __setstate__(self, state: dict[str, Value]) -> None:
        self.offsets = state["offsets"]
        self.sizes = state["sizes"]
        if len(state) != 2:
            _refuse_rest("ChunkStorageMetadata", state, "offsets", "sizes")
        state.clear()


class MetadataIndex(Record):
    """The key of an item: the name, and for a chunk its offset. ``index`` is a hint that takes no part in equality."""

    __slots__ = ("fqn", "index", "offset")
    fqn: str
    offset: Size | None
    index: int | None

    def __init__(self, fqn: str, offset: Size | None = None, index: int | None = None) -> None:
        self.__setstate__({"fqn": fqn, "offset": offset, "index": index})

    def __setstate__(self, state: dict[str, Value]) -> None:
        self.fqn = state["fqn"]
        # torch leaves the field out of the pickle where it is None.
        self.offset = state.get("offset")
        self.index = state["index"]
        if len(state) != 3:
            _refuse_rest("MetadataIndex", state, "fqn", "offset", "index")
        state.clear()

    def __reduce__(self) -> tuple[object, ...]:
        return MetadataIndex, (self.fqn, self.offset, self.index)

    def __eq__(self, other: object) -> bool:
        return type(other) is MetadataIndex and self.fqn == other.fqn and self.offset == other.offset

    def __hash__(self) -> int:  # type: ignore[override]
        return hash((self.fqn, self.offset))


class StorageInfo(Record):
    """Where an item lies: ``_StorageInfo`` of the file system storage; lengths in bytes."""

    __slots__ = ("length", "offset", "relative_path", "transform_descriptors")
    relative_path: str
    offset: int
    length: int
    transform_descriptors: tuple[str, ...] | None

    def __init__(
        self, relative_path: str, offset: int, length: int, transform_descriptors: tuple[str, ...] | None = None
    ) -> None:
        state = {"relative_path": relative_path, "offset": offset, "length": length}
        self.__setstate__(state | {"transform_descriptors": transform_descriptors})

    def __setstate__(self, state: dict[str, Value]) -> None:
        self.relative_path = state["relative_path"]
        self.offset = state["offset"]
        self.length = state["length"]
        self.transform_descriptors = state.get("transform_descriptors")
        if len(state) != 3:
            _refuse_rest("_StorageInfo", state, *_STORAGE_INFO_FIELDS)
        state.clear()

    def __reduce__(self) -> tuple[object, ...]:
        return StorageInfo, (self.relative_path, self.offset, self.length, self.transform_descriptors)


class TensorProperties(Record):
    """What a DCP says of a tensor besides its size. Its pickled state is a tuple of 5 (torch < 2.8) or 6 fields.

    ``dtype`` is a ``GlobalRef``; ``layout`` and ``memory_format`` are ``Opaque`` calls and mean nothing here.
    """

    __slots__ = ("dtype", "layout", "memory_format", "pin_memory", "requires_grad", "strides")
    STATE = ("dtype", "layout", "requires_grad", "memory_format", "pin_memory", "strides")
    dtype: GlobalRef
    layout: Value
    requires_grad: bool
    memory_format: Value
    pin_memory: bool
    strides: tuple[int, ...] | None

    def __init__(
        self,
        dtype: GlobalRef,
        layout: Value = None,
        requires_grad: bool = False,
        memory_format: Value = None,
        pin_memory: bool = False,
        strides: tuple[int, ...] | None = None,
    ) -> None:
        layout = layout or Opaque(GlobalRef("torch.serialization", "_get_layout"), ("torch.strided",))
        memory_format = memory_format or Opaque(
            GlobalRef("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"), (0,)
        )
        self.__setstate__((dtype, layout, requires_grad, memory_format, pin_memory, strides))

    def __setstate__(self, state: Any) -> None:
        if type(state) is not tuple or len(state) not in (5, 6) or type(state[0]) is not GlobalRef:
            raise _wrong("TensorProperties")
        self.dtype, self.layout, self.requires_grad, self.memory_format, self.pin_memory = state[:5]
        self.strides = state[5] if len(state) == 6 else None

    def check(self) -> tuple[Value, ...]:
        return self.state

    def __reduce__(self) -> tuple[object, ...]:
        return TensorProperties, self.state

    @property
    def state(self) -> tuple[Value, ...]:
        """The fields in the order in which torch pickles them."""
        return tuple(getattr(self, name) for name in self.STATE)

    @property
    def element_type(self) -> DType:
        """The dtype. Raises MalformedError where it is none of torch's that we know."""
        if self.dtype.dtype is None:
            raise MalformedError(f"{self.dtype} is no element type that is known here")
        return self.dtype.dtype


class TensorStorageMetadata(Record):
    """A tensor of a DCP: what it is, its whole size and its chunks."""

    __slots__ = ("chunks", "properties", "size")
    properties: TensorProperties
    size: Size
    chunks: list[ChunkStorageMetadata]

    def __init__(self, properties: TensorProperties, size: Size, chunks: list[ChunkStorageMetadata]) -> None:
        self.__setstate__({"properties": properties, "size": size, "chunks": chunks})

    def __setstate__(self, state: dict[str, Value]) -> None:
        self.properties = state.pop("properties")
        self.size = state.pop("size")
        self.chunks = state.pop("chunks")
        _refuse_rest("TensorStorageMetadata", state)

    def check(self) -> tuple[Value, ...]:
        if (
            type(self.properties) is not TensorProperties
            or type(self.size) is not Size
            or type(self.chunks) is not list
        ):
            raise _wrong("TensorStorageMetadata")
        _check_types("TensorStorageMetadata", self.chunks, ChunkStorageMetadata)
        _check_chunks(self.chunks)
        return (self.properties, self.size)

    def __reduce__(self) -> tuple[object, ...]:
        return TensorStorageMetadata, (self.properties, self.size, self.chunks)


class BytesStorageMetadata(Record):
    """An item of a DCP that is no tensor: a torch.save stream of any object."""

    __slots__ = ()

    def __setstate__(self, state: dict[str, Value]) -> None:
        _refuse_rest("BytesStorageMetadata", state)


class StorageMeta(Record):
    """Identifiers a storage gives itself."""

    __slots__ = ("checkpoint_id", "load_id", "modules", "save_id")
    checkpoint_id: Value
    save_id: Value
    load_id: Value
    modules: Value

    def __init__(
        self, checkpoint_id: Value = None, save_id: Value = None, load_id: Value = None, modules: Value = None
    ) -> None:
        self.__setstate__({"checkpoint_id": checkpoint_id, "save_id": save_id, "load_id": load_id, "modules": modules})

    def __setstate__(self, state: dict[str, Value]) -> None:
        self.checkpoint_id = state.pop("checkpoint_id", None)
        self.save_id = state.pop("save_id", None)
        self.load_id = state.pop("load_id", None)
        self.modules = state.pop("modules", None) or []
        _refuse_rest("StorageMeta", state)

    def check(self) -> tuple[Value, ...]:
        return (self.checkpoint_id, self.save_id, self.load_id, self.modules)

    def __reduce__(self) -> tuple[object, ...]:
        return StorageMeta, (self.checkpoint_id, self.save_id, self.load_id, self.modules)


class Metadata(Record):
    """A whole ``.metadata``. ``extra`` holds attributes that others set on it, such as Megatron's ``mcore_data``."""

    __slots__ = ("extra", "planner_data", "state_dict_metadata", "storage_data", "storage_meta", "version")
    state_dict_metadata: dict[str, TensorStorageMetadata | BytesStorageMetadata]
    planner_data: Value
    storage_data: dict[MetadataIndex, StorageInfo]
    storage_meta: StorageMeta | None
    version: str | None
    extra: dict[str, Value]

    def __init__(
        self,
        state_dict_metadata: dict[str, TensorStorageMetadata | BytesStorageMetadata],
        planner_data: Value = None,
        storage_data: dict[MetadataIndex, StorageInfo] | None = None,
        storage_meta: StorageMeta | None = None,
        version: str | None = None,
        extra: dict[str, Value] | None = None,
    ) -> None:
        known = {
            "state_dict_metadata": state_dict_metadata,
            "planner_data": planner_data,
            "storage_data": storage_data or {},
            "storage_meta": storage_meta,
            "version": version,
        }
        self.__setstate__(known | (extra or {}))

    def __setstate__(self, state: dict[str, Value]) -> None:
        self.state_dict_metadata = state.pop("state_dict_metadata")
        self.planner_data = state.pop("planner_data", None)
        self.storage_data = state.pop("storage_data", None) or {}
        self.storage_meta = state.pop("storage_meta", None)
        self.version = state.pop("version", None)
        self.extra = dict(state)

    def check(self) -> tuple[Value, ...]:
        if not isinstance(self.state_dict_metadata, dict):
            raise _wrong("Metadata")
        _check_types("Metadata", self.state_dict_metadata, str)
        _check_types("Metadata", self.state_dict_metadata.values(), TensorStorageMetadata, BytesStorageMetadata)
        _check_storage(self.storage_data)
        _check_types("Metadata", (self.storage_meta,), StorageMeta, type(None))
        _check_types("Metadata", (self.version,), str, type(None))
        return (*self.state_dict_metadata.values(), self.planner_data, self.storage_meta, self.extra)

    def __reduce__(self) -> tuple[object, ...]:
        return Metadata, (
            self.state_dict_metadata,
            self.planner_data,
            self.storage_data,
            self.storage_meta,
            self.version,
            self.extra,
        )


def _check_types(kind: str, values: Iterable[Value], *allowed: type) -> None:
    """Raises MalformedError where a value is of another type; 20-30 ns each, as for a million chunks it must be."""
    if not set(map(type, values)).issubset(allowed):
        raise _wrong(kind)


def _check_fields(records: Collection[Record], name: str, *allowed: type) -> None:
    kind = type(next(iter(records))).__name__ if records else ""
    _check_types(kind, map(attrgetter(name), records), *allowed)


def _check_sizes(records: Collection[Record], name: str) -> None:
    """Every ``Size`` in the field holds non-negative integers; None is passed over."""
    dims = list(chain.from_iterable(filter(None, map(attrgetter(name), records))))
    _check_types("Size", dims, int)
    if dims and not 0 <= min(dims) <= max(dims) <= INT64_MAX:
        raise MalformedError("a chunk has a negative or huge extent")


def _check_chunks(chunks: list[ChunkStorageMetadata]) -> None:
    for name in ("offsets", "sizes"):
        _check_fields(chunks, name, Size)
        _check_sizes(chunks, name)


def _check_storage(items: Value) -> None:
    if not isinstance(items, dict):
        raise _wrong("Metadata")
    _check_types("Metadata", items, MetadataIndex)
    _check_types("Metadata", items.values(), StorageInfo)
    _check_fields(items.keys(), "fqn", str)
    _check_fields(items.keys(), "offset", Size, type(None))
    _check_fields(items.keys(), "index", int, type(None))
    _check_sizes(items.keys(), "offset")
    _check_infos(items.values())


def _check_infos(infos: Collection[StorageInfo]) -> None:
    _check_fields(infos, "relative_path", str)
    for name in ("offset", "length"):
        _check_fields(infos, name, int)
        if infos and not 0 <= min(map(attrgetter(name), infos)) <= max(map(attrgetter(name), infos)) <= INT64_MAX:
            raise MalformedError(f"an item has a negative or huge {name}")
    transforms = list(filter(None, map(attrgetter("transform_descriptors"), infos)))
    _check_types("_StorageInfo", transforms, list, tuple)
    _check_types("_StorageInfo", chain.from_iterable(transforms), str)


_METADATA_MODULES = (
    "torch.distributed.checkpoint.metadata",
    "torch.distributed._shard.checkpoint.metadata",  # torch 1.13 and 2.0
)

CLASSES: dict[tuple[str, str], type[Record]] = {
    (module, kind.__name__): kind
    for module in _METADATA_MODULES
    for kind in (
        ChunkStorageMetadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
        BytesStorageMetadata,
        StorageMeta,
        Metadata,
    )
} | {
    # Until torch 2.2 the properties were those of sharded tensors.
    ("torch.distributed._shard.sharded_tensor.metadata", "TensorProperties"): TensorProperties,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): StorageInfo,
    ("torch.distributed._shard.checkpoint.filesystem", "_StorageInfo"): StorageInfo,
}
"""What each global becomes."""

GLOBALS: dict[type, GlobalRef] = (
    {kind: GlobalRef(module, name) for (module, name), kind in CLASSES.items()}
    | {
        kind: GlobalRef("torch.distributed.checkpoint.metadata", kind.__name__)
        for kind in CLASSES.values()
        if kind is not StorageInfo
    }
    | {StorageInfo: GlobalRef("torch.distributed.checkpoint.filesystem", "_StorageInfo")}
)
"""The global that is written for each."""

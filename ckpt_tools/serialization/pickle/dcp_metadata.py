"""Inert dataclasses of a DCP ``.metadata`` pickle.

Field for field those of ``torch.distributed.checkpoint.metadata`` and ``.filesystem`` (torch 2.15.0), slotted because a
checkpoint of a million chunks holds three million. Fields are checked when they are set; the content of lists and
dicts, which can change later, is checked by ``check_fields`` after reading. A record that a pickle makes and never
fills raises MalformedError where it is used.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any, ClassVar, NoReturn

from ckpt_tools.core.dtypes import INT64_MAX
from ckpt_tools.core.values import GlobalRef, Opaque, Size, Value
from ckpt_tools.errors import MalformedError, UnsupportedError

MAX_FQN_CHARS = 1 << 16
"""Length of a name: as a key, equal ones are compared again and again."""

MAX_TRANSFORMS = 16


class DcpRecord:
    """A slotted object. ``FIELDS`` are its slots in the order of its constructor, which checks them. Those that a
    pickle may leave out are ``OPTIONAL``."""

    __slots__ = ()
    FIELDS: ClassVar[tuple[str, ...]] = ()
    OPTIONAL: ClassVar[tuple[str, ...]] = ()

    def __getattr__(self, name: str) -> NoReturn:
        # Only reached where a slot was never filled.
        if name in self.FIELDS:
            raise MalformedError(f"a {type(self).__name__} of the pickle has no {name!r}")
        raise AttributeError(name)

    @property
    def fields(self) -> dict[str, Value]:
        return {name: getattr(self, name) for name in self.FIELDS}

    @property
    def is_filled(self) -> bool:
        """True once the fields are set; macros share such records, so they must not change any more."""
        try:
            return bool([getattr(self, name) for name in self.FIELDS[:1]])
        except MalformedError:
            return False

    @property
    def state(self) -> Value:
        """The attributes as a pickle holds them."""
        return self.fields

    def set_state(self, state: Value) -> None:
        """Fill the fields with the attributes that a pickle holds.

        Raises:
            MalformedError: one is of the wrong type. UnsupportedError: there are more, which could change what the
            others mean.
        """
        unknown = [name for name in state if name not in self.FIELDS]
        if unknown:
            kind = GLOBAL_BY_CLASS[type(self)].name
            raise UnsupportedError(f"a {kind} has a field {unknown[0]!r:.80}, which this version does not know")
        values = [state.get(name) if name in self.OPTIONAL else state[name] for name in self.FIELDS]
        self.__init__(*values)  # type: ignore[misc]  # made by __new__, which left the fields empty

    def check_fields(self) -> tuple[Value, ...]:
        """Check the fields that have a type. Returns the values in them that are checked on their own.

        Called when the whole pickle was read, since a list may be changed after it became a field.
        """
        return ()

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), tuple(self.fields.values())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DcpRecord) and type(other) is type(self) and self.fields == other.fields

    __hash__ = None  # type: ignore[assignment]  # only a MetadataIndex is ever a key

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in self.fields.items())})"


def make_wrong_type_error(kind: str) -> MalformedError:
    return MalformedError(f"a {kind} contains values of the wrong type")


class ChunkStorageMetadata(DcpRecord):
    """A stored region of a tensor: ``offsets`` and ``sizes``, in elements."""

    FIELDS = ("offsets", "sizes")
    __slots__ = FIELDS
    offsets: Size
    sizes: Size

    def __init__(self, offsets: Size, sizes: Size) -> None:
        # Megatron-FSDP has tuples in them (uneven_dtensor.py).
        offsets, sizes = (Size(each) if type(each) is tuple else each for each in (offsets, sizes))
        if type(offsets) is not Size or type(sizes) is not Size or len(offsets) != len(sizes):
            raise make_wrong_type_error("ChunkStorageMetadata")
        self.offsets = offsets
        self.sizes = sizes


class MetadataIndex(DcpRecord):
    """The key of an item: the name, and for a chunk its offset. ``index`` is a hint that takes no part in equality."""

    FIELDS = ("fqn", "offset", "index")
    OPTIONAL = ("offset", "index")  # torch leaves the offset out of the pickle where it is None
    __slots__ = FIELDS
    fqn: str
    offset: Size | None
    index: int | None

    def __init__(self, fqn: str, offset: Size | None = None, index: int | None = None) -> None:
        if type(fqn) is not str or len(fqn) > MAX_FQN_CHARS or not (offset is None or type(offset) is Size):
            raise make_wrong_type_error("MetadataIndex")
        if not (index is None or type(index) is int):
            raise make_wrong_type_error("MetadataIndex")
        self.fqn = fqn
        self.offset = offset
        self.index = index

    def __eq__(self, other: object) -> bool:
        return type(other) is MetadataIndex and self.fqn == other.fqn and self.offset == other.offset

    def __hash__(self) -> int:  # type: ignore[override]
        return hash((self.fqn, self.offset))


class StorageInfo(DcpRecord):
    """Position of an item: ``_StorageInfo`` of the file system storage; lengths in bytes."""

    FIELDS = ("relative_path", "offset", "length", "transform_descriptors")
    OPTIONAL = ("transform_descriptors",)
    __slots__ = FIELDS
    relative_path: str
    offset: int
    length: int
    transform_descriptors: tuple[str, ...] | None

    def __init__(
        self, relative_path: str, offset: int, length: int, transform_descriptors: Sequence[str] | None = None
    ) -> None:
        if type(relative_path) is not str or type(offset) is not int or type(length) is not int:
            raise make_wrong_type_error("_StorageInfo")
        if not (0 <= offset <= INT64_MAX and 0 <= length <= INT64_MAX):
            raise MalformedError(f"an item of {length} bytes is at byte {offset}")
        self.relative_path = relative_path
        self.offset = offset
        self.length = length
        names = transform_descriptors
        if names is not None and (
            type(names) not in (list, tuple) or len(names) > MAX_TRANSFORMS or set(map(type, names)) - {str}
        ):
            raise make_wrong_type_error("_StorageInfo")
        self.transform_descriptors = None if names is None else tuple(names)


class TensorProperties(DcpRecord):
    """Properties of a tensor in a DCP besides its size. Its pickled state is a tuple of 5 (torch < 2.8) or 6 fields.

    ``dtype`` is a ``GlobalRef``; ``layout`` and ``memory_format`` are ``Opaque`` calls and mean nothing here.
    """

    FIELDS = ("dtype", "layout", "requires_grad", "memory_format", "pin_memory", "strides")
    __slots__ = FIELDS
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
        memory_format = memory_format or Opaque(GlobalRef(_METADATA_MODULES[0], "_MEM_FORMAT_ENCODING"), (0,))
        self.set_state((dtype, layout, requires_grad, memory_format, pin_memory, strides))

    def set_state(self, state: Any) -> None:
        if type(state) is not tuple or len(state) not in (5, 6) or type(state[0]) is not GlobalRef:
            raise make_wrong_type_error("TensorProperties")
        self.dtype, self.layout, self.requires_grad, self.memory_format, self.pin_memory, self.strides = (*state, None)[
            :6
        ]

    def check_fields(self) -> tuple[Value, ...]:
        return self.state

    @property
    def state(self) -> tuple[Value, ...]:
        """The fields in the order in which torch pickles them; torch before 2.8 reads them only without strides."""
        found = tuple(self.fields.values())
        return found if self.strides is not None else found[:-1]


class TensorStorageMetadata(DcpRecord):
    """A tensor of a DCP: properties, whole size and chunks."""

    FIELDS = ("properties", "size", "chunks")
    __slots__ = FIELDS
    properties: TensorProperties
    size: Size
    chunks: list[ChunkStorageMetadata]

    def __init__(self, properties: TensorProperties, size: Size, chunks: list[ChunkStorageMetadata]) -> None:
        self.properties, self.size, self.chunks = properties, size, chunks

    def set_state(self, state: Value) -> None:
        # Of an absent field and an unknown one, the absent one is named.
        for name in self.FIELDS:
            state[name]
        super().set_state(state)

    def check_fields(self) -> tuple[Value, ...]:
        if (type(self.properties), type(self.size), type(self.chunks)) != (TensorProperties, Size, list):
            raise make_wrong_type_error("TensorStorageMetadata")
        _check_types("TensorStorageMetadata", self.chunks, ChunkStorageMetadata)
        _check_filled(self.chunks, "sizes")
        return (self.properties,)


class BytesStorageMetadata(DcpRecord):
    """An object of a DCP, stored as a stream of torch.save."""

    __slots__ = ()


class StorageMeta(DcpRecord):
    """Identifiers a storage gives itself."""

    FIELDS = OPTIONAL = ("checkpoint_id", "save_id", "load_id", "modules")
    __slots__ = FIELDS
    checkpoint_id: Value
    save_id: Value
    load_id: Value
    modules: Value

    def __init__(
        self, checkpoint_id: Value = None, save_id: Value = None, load_id: Value = None, modules: Value = None
    ) -> None:
        self.checkpoint_id, self.save_id, self.load_id = checkpoint_id, save_id, load_id
        self.modules = modules or []

    def check_fields(self) -> tuple[Value, ...]:
        return tuple(self.fields.values())


class Metadata(DcpRecord):
    """A whole ``.metadata``. ``extra`` holds attributes that others set on it, such as Megatron's ``mcore_data``."""

    FIELDS = ("state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version", "extra")
    __slots__ = FIELDS
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
        self.state_dict_metadata = state_dict_metadata
        self.planner_data = planner_data
        self.storage_data = storage_data or {}
        self.storage_meta = storage_meta
        self.version = version
        self.extra = extra or {}

    def set_state(self, state: Value) -> None:
        extra = dict(state)
        state_dict_metadata = extra.pop("state_dict_metadata")
        known = [extra.pop(name, None) for name in self.FIELDS[1:-1]]
        self.__init__(state_dict_metadata, *known, extra)  # type: ignore[misc]

    @property
    def state(self) -> Value:
        found = self.fields
        return found | found.pop("extra")

    def check_fields(self) -> tuple[Value, ...]:
        if not isinstance(self.state_dict_metadata, dict) or not isinstance(self.storage_data, dict):
            raise make_wrong_type_error("Metadata")
        _check_types("Metadata", self.state_dict_metadata, str)
        _check_types("Metadata", self.state_dict_metadata.values(), TensorStorageMetadata, BytesStorageMetadata)
        _check_types("Metadata", self.storage_data, MetadataIndex)
        _check_types("Metadata", self.storage_data.values(), StorageInfo)
        _check_filled(self.storage_data.values(), "length")
        _check_types("Metadata", (self.storage_meta,), StorageMeta, type(None))
        _check_types("Metadata", (self.version,), str, type(None))
        return (*self.state_dict_metadata.values(), self.planner_data, self.storage_meta, self.extra)


def _check_types(kind: str, values: Iterable[Value], *allowed: type) -> None:
    """Raises MalformedError where a value is of another type."""
    if not set(map(type, values)).issubset(allowed):
        raise make_wrong_type_error(kind)


def _check_filled(records: Iterable[DcpRecord], name: str) -> None:
    """Raises MalformedError where a record was never filled (30 ns each)."""
    deque(map(attrgetter(name), records), maxlen=0)


_METADATA_MODULES = (
    "torch.distributed.checkpoint.metadata",
    "torch.distributed._shard.checkpoint.metadata",  # torch 1.13 and 2.0
)

RECORD_CLASSES: dict[tuple[str, str], type[DcpRecord]] = {
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
    # A subclass with one field more, mcore_data, which megatron-core 0.15 writes.
    ("megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata"): Metadata,
}
"""Class that each global becomes."""

GLOBAL_BY_CLASS: dict[type, GlobalRef] = {
    kind: GlobalRef(_METADATA_MODULES[0], kind.__name__) for kind in RECORD_CLASSES.values()
} | {StorageInfo: GlobalRef("torch.distributed.checkpoint.filesystem", "_StorageInfo")}
"""The global that is written for each."""

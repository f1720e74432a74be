"""Inert values that pickles of a checkpoint become: they hold everything and run nothing.

Scalars, ``str``, ``bytes``, ``bytearray``, ``list``, ``dict``, ``tuple``, ``set`` and ``frozenset`` stand for
themselves. The rest is here: ``OrderedDict``, ``DefaultDict`` and ``Size`` keep what their builtin bases would lose,
a ``GlobalRef`` is a name that a loader would have imported, an ``Opaque`` is an object that a loader would have made
by calling one, and a ``StoredTensor`` says where a tensor's elements are. None of them imports or calls anything; each
keeps what is needed to write it back (``serialization.pickle.dump.dumps``) and can be pickled by our own code.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal

from ckpt_tools.core.boxes import Shape, is_row_major
from ckpt_tools.core.dtypes import INT64_MAX, DType, from_torch
from ckpt_tools.errors import MalformedError

Value = Any
"""Anything a pickle can become: builtin data and the types of this module, nested at will."""

MAX_DIMS = 64
"""Dims of a tensor; torch has the same bound."""


@dataclass(frozen=True, slots=True)
class GlobalRef:
    """A class, function or constant by name, such as ``torch.float32``; never imported."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"

    @property
    def dtype(self) -> DType | None:
        """The element type if this is one of torch's, else None."""
        return from_torch(self.name) if self.module == "torch" else None


PARAMETER = GlobalRef("torch.nn.parameter", "Parameter")
TENSOR_CLASS = GlobalRef("torch", "Tensor")


class Opaque:
    """An object of a class that is not interpreted: how a loader would have made it, and what it would have given it.

    ``form`` is ``"call"`` for ``ref(*args)`` and ``"new"`` for ``ref.__new__(ref, *args, **kwargs)``; ``state`` is what
    ``__setstate__`` or ``__dict__`` would have got (None: nothing), ``items`` what would have been appended, ``pairs``
    what would have been set by key. Compared by identity, as an object that is still being filled can be a key.
    """

    __slots__ = ("args", "form", "items", "kwargs", "pairs", "ref", "state")

    def __init__(
        self,
        ref: GlobalRef | Value,
        args: tuple[Value, ...] = (),
        *,
        form: Literal["call", "new"] = "call",
        kwargs: dict[str, Value] | None = None,
        state: Value = None,
        items: Iterable[Value] = (),
        pairs: Iterable[tuple[Value, Value]] = (),
    ) -> None:
        self.ref = ref
        self.args = args
        self.form = form
        self.kwargs = kwargs
        self.state = state
        self.items: list[Value] = list(items)
        self.pairs: list[tuple[Value, Value]] = list(pairs)

    @property
    def attributes(self) -> Mapping[str, Value]:
        """The attributes among the state, those in slots included; empty where the state is of another kind."""
        parts = self.state if isinstance(self.state, tuple) and len(self.state) == 2 else (self.state,)
        return {name: value for part in parts if isinstance(part, dict) for name, value in part.items()}

    def set_state(self, state: Value) -> None:
        """Take the state a pickle sets; once, as picklers do. Raises MalformedError."""
        if self.state is not None:
            raise MalformedError(f"a pickle sets the state of one {self.ref} twice")
        self.state = state

    def __repr__(self) -> str:
        dot_new = ".__new__" if self.form == "new" else ""
        return f"{self.ref}{dot_new}({', '.join(map(format_brief, self.args))})"


def format_brief(value: Value) -> str:
    """``value`` for a message; of a long or deep one only the kind."""
    if isinstance(value, str | bytes) and len(value) > 60:
        return repr(value[:60]) + "..."
    if isinstance(value, list | tuple | dict | set | frozenset):
        if len(value) > 4:
            return f"{type(value).__name__} of {len(value)}"
        return f"[{', '.join(describe_kind(item) if _is_compound(item) else format_brief(item) for item in value)}]"
    return str(value) if isinstance(value, GlobalRef) else describe_kind(value) if _is_compound(value) else repr(value)


def describe_kind(value: Value) -> str:
    """Description of ``value`` for a message, in the words of the program that saved it: no class of ours is named."""
    if isinstance(value, Opaque):
        return f"{value.ref} object" if isinstance(value.ref, GlobalRef) else "object of an inner class"
    return _KIND_DESCRIPTIONS.get(type(value).__name__, type(value).__name__)


_KIND_DESCRIPTIONS = {"StoredTensor": "tensor", "StorageRef": "storage", "GlobalRef": "name of a class or function"}


def _is_compound(value: Value) -> bool:
    return isinstance(value, list | tuple | dict | set | frozenset | Opaque | StoredTensor | StorageRef)


class OrderedDict(dict[Value, Value]):
    """A ``collections.OrderedDict``; ``attributes`` are those set on the object itself (``_metadata`` of a state
    dict), or None."""

    __slots__ = ("attributes",)

    def __init__(self, items: Any = (), attributes: dict[str, Value] | None = None) -> None:
        super().__init__(items)
        self.attributes = attributes

    def seal(self) -> None:
        """Refuse items and attributes from now on: the dict stands for a tensor's hooks, which must stay empty."""
        self.attributes = _SEALED

    @property
    def is_sealed(self) -> bool:
        return self.attributes is _SEALED

    def set_state(self, state: Value) -> None:
        """Take the attributes a pickle sets. Raises MalformedError."""
        if type(state) is not dict or not all(type(name) is str and name[:2] != "__" for name in state):
            raise MalformedError("a pickle gives an OrderedDict a state that is not a dict of attributes")
        if self.attributes is not None:
            raise MalformedError("a pickle sets the state of one OrderedDict twice")
        self.attributes = state

    def __reduce__(self) -> tuple[object, ...]:
        return OrderedDict, ((), self.attributes), None, None, iter(self.items())


_SEALED: dict[str, Value] = {}


class DefaultDict(dict[Value, Value]):
    """A ``collections.defaultdict`` with the name of its factory; looking up never calls it."""

    __slots__ = ("factory",)

    def __init__(self, factory: Value = None, items: Any = ()) -> None:
        super().__init__(items)
        self.factory = factory

    def __reduce__(self) -> tuple[object, ...]:
        return DefaultDict, (self.factory,), None, None, iter(self.items())


class Size(tuple[int, ...]):
    """A ``torch.Size``: at most 64 extents, each a non-negative 64-bit integer. Raises MalformedError."""

    __slots__ = ()

    def __new__(cls, dims: Iterable[int] = ()) -> Size:
        size = tuple.__new__(cls, dims)
        check_extents(size)
        return size


def as_dict(value: Value) -> dict[Any, Any]:
    """``value`` if it is a dictionary, and otherwise an empty one."""
    return value if isinstance(value, dict) else {}


def are_naturals(values: Any, max_length: int | None = MAX_DIMS) -> bool:
    """Whether ``values`` is a list or tuple of at most ``max_length`` non-negative 64-bit integers, such as a shape."""
    is_list = isinstance(values, list | tuple) and (max_length is None or len(values) <= max_length)
    return is_list and all(type(n) is int and 0 <= n <= INT64_MAX for n in values)


def check_extents(dims: tuple[int, ...]) -> None:
    """Raises MalformedError where ``dims`` are not at most 64 non-negative 64-bit integers."""
    if len(dims) > MAX_DIMS:
        raise MalformedError(f"a tensor of {len(dims)} dims")
    for dim in dims:
        if type(dim) is not int or not 0 <= dim <= INT64_MAX:
            raise MalformedError(f"{format_brief(dim)} is not a valid extent of a tensor")


@dataclass(frozen=True, slots=True)
class StorageRef:
    """A storage that tensors view, by its key in the archive.

    ``numel`` counts elements of ``dtype``, or bytes where ``dtype`` is None (an untyped storage).
    """

    key: str
    dtype: DType | None
    numel: int
    location: str = "cpu"

    def __post_init__(self) -> None:
        if type(self.key) is not str or type(self.location) is not str or type(self.numel) is not int:
            raise MalformedError("a storage is not described by its key, location and size")
        if not 0 <= self.num_bytes <= INT64_MAX:
            raise MalformedError(f"a storage of {self.numel} elements", key=self.key)

    @classmethod
    def of_elements(cls, key: str, dtype: DType, numel: int, location: str = "cpu") -> StorageRef:
        """The storage torch would pickle for ``numel`` elements of ``dtype``."""
        if dtype.torch_storage is None:
            return cls(key, None, numel * dtype.item_bytes, location)
        return cls(key, dtype, numel, location)

    @property
    def num_bytes(self) -> int:
        return self.numel * (self.dtype.item_bytes if self.dtype else 1)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A torch tensor in a pickle: a strided view of a storage.

    ``storage_offset`` and ``strides`` are in elements of ``dtype``. ``storage`` is None for a tensor on the meta
    device, which has no elements. ``wrapper`` is the class around it (``PARAMETER``, a subclass of Tensor), ``state``
    that class's own attributes.

    Raises:
        MalformedError: the view leaves its storage, or a number is not a 64-bit extent.
    """

    storage: StorageRef | None
    dtype: DType
    storage_offset: int
    shape: Shape
    strides: Shape
    requires_grad: bool = False
    wrapper: GlobalRef | None = None
    state: Value = field(default=None, hash=False)

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.strides):
            raise MalformedError(f"a tensor of {len(self.shape)} dims has {len(self.strides)} strides")
        for numbers in (self.shape, self.strides, (self.storage_offset,)):
            check_extents(numbers)
        if self.numel * self.dtype.item_bytes > INT64_MAX:
            raise MalformedError(f"a tensor of shape {list(self.shape)} is larger than any storage")
        if self.storage is not None and self.stop * self.dtype.item_bytes > self.storage.num_bytes:
            raise MalformedError(
                f"a tensor ends at element {self.stop:,} of a storage of {self.storage.num_bytes:,} bytes",
                key=f"storage {self.storage.key}",
            )

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def stop(self) -> int:
        """The position in the storage after the last element of the tensor; 0 for a tensor without elements."""
        if not self.numel:
            return 0
        return self.storage_offset + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True)) + 1

    @property
    def is_contiguous(self) -> bool:
        """True where the elements lie in row-major order without gaps."""
        return is_row_major(self.shape, self.strides)


class ValueNumbering:
    """Numbers for values: the same for equal ones of the same types, NaNs and signs of zero told apart by their bits.

    Takes the time of one walk, whatever the values share; objects that contain themselves are told apart by identity.
    """

    def __init__(self) -> None:
        self._numbers: dict[Value, int] = {}
        self._alive_objects: list[Value] = []

    def get_number(self, value: Value) -> int:
        if isinstance(value, dict):
            identity: Value = tuple((self.get_number(key), self.get_number(item)) for key, item in value.items())
        elif isinstance(value, list | tuple):
            identity = tuple(map(self.get_number, value))
        elif isinstance(value, set | frozenset):
            identity = frozenset(map(self.get_number, value))
        elif isinstance(value, Opaque):
            self._alive_objects.append(value)
            identity = id(value)
        else:
            identity = value if isinstance(value, str | bytes | int) else repr(value)
        return self._numbers.setdefault((type(value).__name__, identity), len(self._numbers))

"""The allow-list: what a pickle may call, as values.

Everything else that it calls is recorded. Nothing here calls an argument, or copies without accounting for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.values import (
    MAX_DIMS,
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
from ckpt_tools.errors import MalformedError, UnsupportedError
from ckpt_tools.serialization.pickle.key_limits import checked_keys, insert
from ckpt_tools.serialization.pickle.machine import Machine
from ckpt_tools.serialization.pickle.opcodes import made

# What torch's own functions build, as values. Positional arguments as torch passes them.


def _tensor(
    storage: Value,
    storage_offset: Value,
    size: Value,
    strides: Value,
    requires_grad: Value = False,
    backward_hooks: Value = None,
    metadata: Value = None,
    *,
    dtype: DType | None = None,
) -> StoredTensor:
    """``torch._utils._rebuild_tensor`` and ``_v2``. Hooks are not saved by torch (always an empty OrderedDict)."""
    if type(storage) is not StorageRef:
        raise MalformedError("a tensor is a view of something that is not a storage")
    if metadata:
        raise UnsupportedError(f"a tensor is stored with the flags {_flags(metadata)}, which change its values")
    if type(requires_grad) is not bool:
        raise MalformedError("whether a tensor requires gradients is neither true nor false")
    dtype = dtype or storage.dtype
    if dtype is None:
        raise MalformedError("a tensor views an untyped storage without saying of what type", key=storage.key)
    return StoredTensor(storage, dtype, storage_offset, _ints(size), _ints(strides), requires_grad)


def _flags(metadata: Value) -> str:
    return ", ".join(sorted(map(str, metadata))) if isinstance(metadata, dict) else type(metadata).__name__


def _ints(values: Value) -> tuple[int, ...]:
    if not isinstance(values, tuple | list) or len(values) > MAX_DIMS:
        raise MalformedError("the shape of a tensor is not a tuple")
    return tuple(values)


def _tensor_v3(
    storage: Value,
    storage_offset: Value,
    size: Value,
    strides: Value,
    requires_grad: Value,
    backward_hooks: Value,
    dtype: Value,
    metadata: Value = None,
) -> StoredTensor:
    return _tensor(storage, storage_offset, size, strides, requires_grad, backward_hooks, metadata, dtype=_dtype(dtype))


def _dtype(value: Value) -> DType:
    found = value.dtype if type(value) is GlobalRef else None
    if found is None:
        raise UnsupportedError(f"a tensor has the dtype {value!s:.80}, which is not supported")
    return found


def _meta_tensor(dtype: Value, size: Value, strides: Value, requires_grad: Value) -> StoredTensor:
    return StoredTensor(None, _dtype(dtype), 0, _ints(size), _ints(strides), requires_grad is True)


def _device_tensor(data: Value, dtype: Value, device: Value, requires_grad: Value) -> StoredTensor:
    """``_rebuild_device_tensor_from_cpu_tensor``: where the tensor lived does not matter, a cast would."""
    if type(data) is not StoredTensor or data.dtype is not _dtype(dtype):
        raise UnsupportedError("a tensor of another device is stored as another type")
    return replace(data, requires_grad=requires_grad is True)


def _parameter(data: Value, requires_grad: Value, backward_hooks: Value, state: Value = None) -> Value:
    """``torch._utils._rebuild_parameter`` and ``_rebuild_parameter_with_state``."""
    if type(data) is not StoredTensor:
        return Opaque(PARAMETER, (data, requires_grad))
    return replace(data, wrapper=PARAMETER, requires_grad=requires_grad is True, state=state)


def _from_type(function: Value, kind: Value, args: Value, state: Value) -> Value:
    """``torch._tensor._rebuild_from_type_v2``: ``function(*args)`` as a ``kind`` with the attributes ``state``."""
    build = _TENSORS.get(function) if type(function) is GlobalRef and function != _FROM_TYPE else None
    data = build(*args) if build is not None and type(args) is tuple else None
    if type(data) is not StoredTensor or type(kind) is not GlobalRef:
        return Opaque(_FROM_TYPE, (function, kind, args, state))
    return replace(data, wrapper=kind, state=state)


_FROM_TYPE = GlobalRef("torch._tensor", "_rebuild_from_type_v2")

_TENSORS: dict[GlobalRef, Callable[..., Value]] = {
    GlobalRef("torch._utils", "_rebuild_tensor"): _tensor,
    GlobalRef("torch._utils", "_rebuild_tensor_v2"): _tensor,
    GlobalRef("torch._utils", "_rebuild_tensor_v3"): _tensor_v3,
    GlobalRef("torch._utils", "_rebuild_parameter"): _parameter,
    GlobalRef("torch._utils", "_rebuild_parameter_with_state"): _parameter,
    GlobalRef("torch._utils", "_rebuild_meta_tensor_no_storage"): _meta_tensor,
    GlobalRef("torch._utils", "_rebuild_device_tensor_from_cpu_tensor"): _device_tensor,
    _FROM_TYPE: _from_type,
}
"""The functions that rebuild tensors."""

# Other calls on the allow-list, which get the machine to account for what they copy.


def _size(machine: Machine, args: tuple[Value, ...]) -> Size:
    (dims,) = args or ((),)
    if not isinstance(dims, tuple | list) or len(dims) > MAX_DIMS:
        machine.fail("a torch.Size of something that is not a tuple")
    return Size(dims)


def _encode(machine: Machine, args: tuple[Value, ...]) -> Value:
    """``_codecs.encode(text, "latin1")``: how protocol 2 writes bytes."""
    machine.copied(args)
    if len(args) != 2 or type(args[0]) is not str or args[1] not in ("latin1", "latin-1"):
        return Opaque(GlobalRef("_codecs", "encode"), args)
    return args[0].encode("latin-1")


def _bytes(machine: Machine, args: tuple[Value, ...]) -> Value:
    """``bytes()``: how protocols 0 to 2 write empty ones. With arguments it is recorded: ``bytes(n)`` takes n bytes."""
    return Opaque(GlobalRef("builtins", "bytes"), args) if args else b""


def _bytearray(machine: Machine, args: tuple[Value, ...]) -> Value:
    machine.copied(args)
    if not args or (len(args) == 1 and type(args[0]) is bytes):
        return bytearray(*args)
    encoded = _encode(machine, args)
    return bytearray(encoded) if type(encoded) is bytes else Opaque(GlobalRef("builtins", "bytearray"), args)


def _set(machine: Machine, args: tuple[Value, ...]) -> Value:
    return set(_elements(machine, args))


def _frozen(machine: Machine, args: tuple[Value, ...]) -> Value:
    return frozenset(_elements(machine, args))


def _elements(machine: Machine, args: tuple[Value, ...]) -> list[Value]:
    (items,) = args or ([],)
    if type(items) not in (list, tuple):
        machine.fail("a set of something that is not a list")
    machine.copied(args)
    machine.spend(4)
    return checked_keys(machine, None, list(items))


def _ordered_dict(machine: Machine, args: tuple[Value, ...]) -> Value:
    """Python 2 passed the items as one list of pairs; Python 3 sets them one by one."""
    machine.copied(args)
    machine.spend(2)
    made = OrderedDict()
    for pair in args[0] if args else ():
        insert(machine, made, list(pair))
    return made


def _default_dict(machine: Machine, args: tuple[Value, ...]) -> Value:
    machine.spend(2)
    if len(args) > 1 or (args and type(args[0]) not in (GlobalRef, Opaque, type(None))):
        return Opaque(GlobalRef("collections", "defaultdict"), args)
    return DefaultDict(*args)


def _complex(machine: Machine, args: tuple[Value, ...]) -> Value:
    if all(type(arg) in (int, float) for arg in args):
        return complex(*args)
    return Opaque(GlobalRef("builtins", "complex"), args)


def _reconstructor(machine: Machine, args: tuple[Value, ...]) -> Value:
    """``copyreg._reconstructor``: how protocols 0 and 1 make an object of a class without ``__reduce__``."""
    kind, base, state = args
    if state is None and base == GlobalRef("builtins", "object"):
        return made(machine, kind, (), None)
    return Opaque(GlobalRef("copyreg", "_reconstructor"), args)


def _plainly(build: Callable[..., Value]) -> Callable[[Machine, tuple[Value, ...]], Value]:
    return lambda _, args: build(*args)


CALLS: dict[tuple[str, str], Callable[[Machine, tuple[Value, ...]], Value]] = {
    (ref.module, ref.name): _plainly(build) for ref, build in _TENSORS.items()
} | {
    ("torch", "Size"): _size,
    ("_codecs", "encode"): _encode,
    ("builtins", "bytes"): _bytes,
    ("builtins", "bytearray"): _bytearray,
    ("builtins", "set"): _set,
    ("builtins", "frozenset"): _frozen,
    ("builtins", "complex"): _complex,
    ("collections", "OrderedDict"): _ordered_dict,
    ("collections", "defaultdict"): _default_dict,
    ("copyreg", "_reconstructor"): _reconstructor,
}
"""The allow-list of functions. All others, and all classes but those of a DCP (``dcp_classes``), are recorded."""

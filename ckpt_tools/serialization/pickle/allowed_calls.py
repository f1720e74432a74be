"""The allow-list: calls that a pickle may make, in one table, with the functions that build their values.

Every other call is recorded, and so is one whose function raises UninterpretedCallError: ``proof`` judges it by the
closed list. No function here calls an argument, or copies data without accounting for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

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
from ckpt_tools.errors import MalformedError
from ckpt_tools.serialization.pickle.keys import check_keys, insert_items
from ckpt_tools.serialization.pickle.machine import CallBuilder, Machine, TensorAttributes, UninterpretedCallError
from ckpt_tools.serialization.pickle.opcodes import build_or_record, make_object, record_object
from ckpt_tools.serialization.pickle.torch_names import (
    REBUILD_FROM_TYPE,
    REBUILD_META_TENSOR,
    REBUILD_PARAMETER,
    REBUILD_PARAMETER_WITH_STATE,
    REBUILD_TENSOR_V2,
    REBUILD_TENSOR_V3,
)

# What torch's own functions build, as values. Positional arguments as torch passes them.


def _rebuild_tensor(
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
    _check_hooks(backward_hooks)
    if metadata:
        flags = ", ".join(sorted(map(str, metadata))) if isinstance(metadata, dict) else type(metadata).__name__
        raise UninterpretedCallError(
            f"it is stored with the flags {flags}, which change its values; save it with resolve_conj() and "
            "resolve_neg()"
        )
    if type(requires_grad) is not bool:
        raise MalformedError("whether a tensor requires gradients is neither true nor false")
    dtype = dtype or storage.dtype
    if dtype is None:
        raise MalformedError("a tensor views an untyped storage without saying of what type", key=storage.key)
    return StoredTensor(
        storage, dtype, storage_offset, _check_int_tuple(size), _check_int_tuple(strides), requires_grad
    )


def _check_hooks(hooks: Value) -> None:
    """torch saves an empty OrderedDict; anything else would be called in the next backward pass."""
    if hooks is None:
        return
    if type(hooks) is not OrderedDict or hooks or hooks.attributes:
        raise MalformedError("a tensor is stored with hooks, which torch never saves")
    hooks.seal()


def _check_int_tuple(values: Value) -> tuple[int, ...]:
    if not isinstance(values, tuple | list) or len(values) > MAX_DIMS:
        raise MalformedError("the shape of a tensor is not a tuple")
    return tuple(values)


def _rebuild_tensor_v3(
    storage: Value,
    storage_offset: Value,
    size: Value,
    strides: Value,
    requires_grad: Value,
    backward_hooks: Value,
    dtype: Value,
    metadata: Value = None,
) -> StoredTensor:
    return _rebuild_tensor(
        storage, storage_offset, size, strides, requires_grad, backward_hooks, metadata, dtype=_get_dtype(dtype)
    )


def _get_dtype(value: Value) -> DType:
    found = value.dtype if type(value) is GlobalRef else None
    if found is None:
        raise UninterpretedCallError(f"it has the dtype {value!s:.80}, which is not supported")
    return found


def _rebuild_meta_tensor(dtype: Value, size: Value, strides: Value, requires_grad: Value) -> StoredTensor:
    return StoredTensor(
        None, _get_dtype(dtype), 0, _check_int_tuple(size), _check_int_tuple(strides), requires_grad is True
    )


def _rebuild_device_tensor(data: Value, dtype: Value, device: Value, requires_grad: Value) -> StoredTensor:
    """``_rebuild_device_tensor_from_cpu_tensor``: where the tensor lived does not matter, a cast would."""
    if type(data) is not StoredTensor or data.dtype is not _get_dtype(dtype):
        raise UninterpretedCallError("it is a tensor of another device, which is stored as another type")
    return replace(data, requires_grad=requires_grad is True)


def _rebuild_parameter(machine: Machine, args: tuple[Value, ...]) -> Value:
    """``torch._utils._rebuild_parameter`` and ``_rebuild_parameter_with_state``."""
    data, requires_grad, hooks, *state = args
    _check_hooks(hooks)
    if type(data) is not StoredTensor:
        return record_object(machine, Opaque(PARAMETER, (data, requires_grad), state=state[0] if state else None))
    parameter = replace(data, wrapper=PARAMETER, requires_grad=requires_grad is True)
    return _attach_state(machine, parameter, *state)


def _attach_state(machine: Machine, tensor: StoredTensor, state: Value = None) -> StoredTensor:
    """``tensor`` with ``state``. torch would set each attribute: ``closed_list`` judges them with the tensor's
    class."""
    machine.objects.append((machine.file_position, TensorAttributes(tensor.wrapper, state)))
    return replace(tensor, state=state)


def _rebuild_from_type(machine: Machine, args: tuple[Value, ...]) -> Value:
    """``torch._tensor._rebuild_from_type_v2``: ``function(*inner)`` as a ``kind`` with the attributes ``state``."""
    function, kind, inner_args, state = args
    call = _REBUILD_CALLS.get(function) if type(function) is GlobalRef and type(inner_args) is tuple else None
    data = None if call is None else build_or_record(machine, call.build, function, inner_args)
    if type(data) is not StoredTensor or type(kind) is not GlobalRef:
        raise UninterpretedCallError
    return _attach_state(machine, replace(data, wrapper=kind), state)


# Other calls on the allow-list, which get the machine to account for what they copy.


def _make_size(machine: Machine, args: tuple[Value, ...]) -> Size:
    (dims,) = args or ((),)
    if not isinstance(dims, tuple | list) or len(dims) > MAX_DIMS:
        machine.fail("a torch.Size of something that is not a tuple")
    return Size(dims)


def _encode_text(machine: Machine, args: tuple[Value, ...]) -> Value:
    """``_codecs.encode(text, "latin1")``: how protocol 2 writes bytes."""
    machine.charge_copies(args)
    if len(args) != 2 or type(args[0]) is not str or args[1] not in ("latin1", "latin-1"):
        raise UninterpretedCallError
    return args[0].encode("latin-1")


def _make_bytes(machine: Machine, args: tuple[Value, ...]) -> Value:
    """``bytes()``: how protocols 0 to 2 write empty ones. With arguments it is recorded: ``bytes(n)`` takes n bytes."""
    if args:
        raise UninterpretedCallError
    return b""


def _make_bytearray(machine: Machine, args: tuple[Value, ...]) -> Value:
    machine.charge_copies(args)
    if not args or (len(args) == 1 and type(args[0]) is bytes):
        return bytearray(*args)
    encoded = build_or_record(machine, _encode_text, _ENCODE, args)
    if type(encoded) is not bytes:
        raise UninterpretedCallError
    return bytearray(encoded)


def _make_set_builder(kind: type[set[Value]] | type[frozenset[Value]]) -> CallBuilder:
    def build_set(machine: Machine, args: tuple[Value, ...]) -> Value:
        (items,) = args or ([],)
        if type(items) not in (list, tuple):
            machine.fail("a set of something that is not a list")
        machine.charge_copies(args)
        machine.charge_containers(4)
        return kind(check_keys(machine, None, list(items)))

    return build_set


def _make_ordered_dict(machine: Machine, args: tuple[Value, ...]) -> Value:
    """Python 2 passed the items as one list of pairs; Python 3 sets them one by one."""
    machine.charge_copies(args)
    machine.charge_containers(2)
    ordered_dict = OrderedDict()
    pairs = args[0] if args else []
    if len(args) > 1 or type(pairs) is not list or any(len(pair) != 2 for pair in pairs):
        machine.fail("an OrderedDict of something that is not a list of pairs")
    for pair in pairs:
        insert_items(machine, ordered_dict, list(pair))
    return ordered_dict


def _make_default_dict(machine: Machine, args: tuple[Value, ...]) -> Value:
    machine.charge_containers(2)
    if len(args) > 1 or (args and type(args[0]) not in (GlobalRef, type(None))):
        raise UninterpretedCallError
    if args and type(args[0]) is GlobalRef:
        # A list of the factories that a proven pickle may name is kept with all other names.
        machine.factories.append((machine.file_position, args[0]))
    return DefaultDict(*args)


def _make_complex(machine: Machine, args: tuple[Value, ...]) -> Value:
    if any(type(arg) not in (int, float) for arg in args):
        raise UninterpretedCallError
    return complex(*args)


def _reconstruct_object(machine: Machine, args: tuple[Value, ...]) -> Value:
    """``copyreg._reconstructor``: how protocols 0 and 1 make an object of a class without ``__reduce__``."""
    kind, base, state = args
    if state is not None or base != GlobalRef("builtins", "object"):
        raise UninterpretedCallError
    return make_object(machine, kind, (), None)


@dataclass(frozen=True, slots=True)
class AllowedCall:
    """A function that is interpreted: what builds its value, its arguments in words, and why it is harmless."""

    build: CallBuilder
    arguments: str
    reason: str


_VIEW_REASON = "torch's own function; the view must lie inside its storage"
_HOOKS = "hooks None or an empty OrderedDict"
_VIEW, _STATE = f"storage, offset, shape, strides, bool, {_HOOKS}", "attributes that are numbers or strings"
_SET_REASON = "how protocols 0 to 3 write sets"
_ENCODE = GlobalRef("_codecs", "encode")

_TENSOR_FUNCTIONS: dict[GlobalRef, tuple[Callable[..., StoredTensor], str, str]] = {
    GlobalRef("torch._utils", "_rebuild_tensor"): (_rebuild_tensor, "storage, offset, shape, strides", _VIEW_REASON),
    REBUILD_TENSOR_V2: (_rebuild_tensor, _VIEW, _VIEW_REASON),
    REBUILD_TENSOR_V3: (_rebuild_tensor_v3, f"{_VIEW}, dtype", _VIEW_REASON),
    REBUILD_META_TENSOR: (_rebuild_meta_tensor, "dtype, shape, strides, bool", "a tensor of no bytes"),
    GlobalRef("torch._utils", "_rebuild_device_tensor_from_cpu_tensor"): (
        _rebuild_device_tensor,
        "tensor, dtype, device, bool",
        _VIEW_REASON,
    ),
}
"""The functions that rebuild plain tensors, of their arguments alone."""


def _make_tensor_call(rebuild: Callable[..., StoredTensor], arguments: str, reason: str) -> AllowedCall:
    return AllowedCall(lambda machine, args: rebuild(*args), arguments, reason)


_REBUILD_CALLS = {ref: _make_tensor_call(*described) for ref, described in _TENSOR_FUNCTIONS.items()} | {
    REBUILD_PARAMETER: AllowedCall(_rebuild_parameter, f"tensor, bool, {_HOOKS}", _VIEW_REASON),
    REBUILD_PARAMETER_WITH_STATE: AllowedCall(_rebuild_parameter, f"tensor, bool, {_HOOKS}, {_STATE}", _VIEW_REASON),
}

CALLS: dict[GlobalRef, AllowedCall] = _REBUILD_CALLS | {
    REBUILD_FROM_TYPE: AllowedCall(
        _rebuild_from_type,
        f"one of the functions above, Tensor or Parameter, its arguments, {_STATE}",
        _VIEW_REASON,
    ),
    GlobalRef("torch", "Size"): AllowedCall(_make_size, "up to 64 ints", "a tuple of numbers"),
    _ENCODE: AllowedCall(_encode_text, "text of latin-1, 'latin1'", "how protocols 0 to 2 write bytes"),
    GlobalRef("builtins", "bytes"): AllowedCall(_make_bytes, "nothing", "how protocols 0 to 2 write empty bytes"),
    GlobalRef("builtins", "bytearray"): AllowedCall(_make_bytearray, "bytes, or text and 'latin1'", "bytes"),
    GlobalRef("builtins", "set"): AllowedCall(_make_set_builder(set), "a list", _SET_REASON),
    GlobalRef("builtins", "frozenset"): AllowedCall(_make_set_builder(frozenset), "a list", _SET_REASON),
    GlobalRef("builtins", "complex"): AllowedCall(_make_complex, "two numbers", "a number"),
    GlobalRef("collections", "OrderedDict"): AllowedCall(
        _make_ordered_dict, "nothing, or a list of pairs; plain attributes", "a dict"
    ),
    GlobalRef("collections", "defaultdict"): AllowedCall(
        _make_default_dict, "the name of a builtin container or number type", "a dict"
    ),
    GlobalRef("copyreg", "_reconstructor"): AllowedCall(
        _reconstruct_object, "a class of this list, object, None", "how protocols 0 and 1 make an object"
    ),
}
"""The allow-list of functions. All others, and all classes but ``RECORD_CLASSES``, are recorded."""

ALLOWED_CALLS: dict[tuple[str, str], CallBuilder] = {(ref.module, ref.name): call.build for ref, call in CALLS.items()}


def explain_unsupported(value: Opaque) -> str | None:
    """Why a call of one of torch's functions for plain tensors makes none; None for other objects."""
    described = _TENSOR_FUNCTIONS.get(value.ref) if isinstance(value.ref, GlobalRef) else None
    if described is None or value.form != "call":
        return None
    try:
        described[0](*value.args)
    except UninterpretedCallError as error:
        return str(error)
    return None

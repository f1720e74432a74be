"""The allow-list: calls that a pickle may make, as functions that build values.

Every other call is recorded. No function here calls an argument, or copies data without accounting for it.
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
from ckpt_tools.serialization.pickle.keys import check_keys, insert_items
from ckpt_tools.serialization.pickle.machine import CallBuilder, Machine, TensorAttributes
from ckpt_tools.serialization.pickle.opcodes import make_object, record_object
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
        raise UnsupportedError(
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
        raise UnsupportedError(f"it has the dtype {value!s:.80}, which is not supported")
    return found


def _rebuild_meta_tensor(dtype: Value, size: Value, strides: Value, requires_grad: Value) -> StoredTensor:
    return StoredTensor(
        None, _get_dtype(dtype), 0, _check_int_tuple(size), _check_int_tuple(strides), requires_grad is True
    )


def _rebuild_device_tensor(data: Value, dtype: Value, device: Value, requires_grad: Value) -> StoredTensor:
    """``_rebuild_device_tensor_from_cpu_tensor``: where the tensor lived does not matter, a cast would."""
    if type(data) is not StoredTensor or data.dtype is not _get_dtype(dtype):
        raise UnsupportedError("it is a tensor of another device, which is stored as another type")
    return replace(data, requires_grad=requires_grad is True)


_TENSOR_FUNCTIONS: dict[GlobalRef, Callable[..., StoredTensor]] = {
    GlobalRef("torch._utils", "_rebuild_tensor"): _rebuild_tensor,
    REBUILD_TENSOR_V2: _rebuild_tensor,
    REBUILD_TENSOR_V3: _rebuild_tensor_v3,
    REBUILD_META_TENSOR: _rebuild_meta_tensor,
    GlobalRef("torch._utils", "_rebuild_device_tensor_from_cpu_tensor"): _rebuild_device_tensor,
}
"""The functions that rebuild plain tensors."""


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
    data = _call_rebuild_function(machine, function, inner_args)
    if type(data) is not StoredTensor or type(kind) is not GlobalRef:
        return record_object(machine, Opaque(REBUILD_FROM_TYPE, args))
    return _attach_state(machine, replace(data, wrapper=kind), state)


def _call_rebuild_function(machine: Machine, function: Value, inner_args: Value) -> Value:
    if type(function) is not GlobalRef or type(inner_args) is not tuple:
        return None
    if function in _PARAMETER_FUNCTIONS:
        return _rebuild_parameter(machine, inner_args)
    return ALLOWED_CALLS[function.module, function.name](machine, inner_args) if function in _TENSOR_FUNCTIONS else None


_PARAMETER_FUNCTIONS = (REBUILD_PARAMETER, REBUILD_PARAMETER_WITH_STATE)

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
        return record_object(machine, Opaque(GlobalRef("_codecs", "encode"), args))
    return args[0].encode("latin-1")


def _make_bytes(machine: Machine, args: tuple[Value, ...]) -> Value:
    """``bytes()``: how protocols 0 to 2 write empty ones. With arguments it is recorded: ``bytes(n)`` takes n bytes."""
    return record_object(machine, Opaque(GlobalRef("builtins", "bytes"), args)) if args else b""


def _make_bytearray(machine: Machine, args: tuple[Value, ...]) -> Value:
    machine.charge_copies(args)
    if not args or (len(args) == 1 and type(args[0]) is bytes):
        return bytearray(*args)
    encoded = _encode_text(machine, args)
    if type(encoded) is bytes:
        return bytearray(encoded)
    return record_object(machine, Opaque(GlobalRef("builtins", "bytearray"), args))


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
        return record_object(machine, Opaque(GlobalRef("collections", "defaultdict"), args))
    if args and type(args[0]) is GlobalRef:
        # A list of the factories that a proven pickle may name is kept with all other names.
        machine.factories.append((machine.file_position, args[0]))
    return DefaultDict(*args)


def _make_complex(machine: Machine, args: tuple[Value, ...]) -> Value:
    is_plain = all(type(arg) in (int, float) for arg in args)
    return complex(*args) if is_plain else record_object(machine, Opaque(GlobalRef("builtins", "complex"), args))


def _reconstruct_object(machine: Machine, args: tuple[Value, ...]) -> Value:
    """``copyreg._reconstructor``: how protocols 0 and 1 make an object of a class without ``__reduce__``."""
    kind, base, state = args
    if state is None and base == GlobalRef("builtins", "object"):
        return make_object(machine, kind, (), None)
    return record_object(machine, Opaque(GlobalRef("copyreg", "_reconstructor"), args))


def _make_tensor_builder(ref: GlobalRef) -> CallBuilder:
    """The builder of a plain tensor. Of a tensor that is not supported it records the call, so that a message can name
    it."""

    def build_tensor(machine: Machine, args: tuple[Value, ...]) -> Value:
        try:
            return _TENSOR_FUNCTIONS[ref](*args)
        except UnsupportedError:
            return record_object(machine, Opaque(ref, args))

    return build_tensor


def explain_unsupported(value: Opaque) -> str | None:
    """Why a call of one of torch's functions for plain tensors makes none; None for other objects."""
    rebuild = _TENSOR_FUNCTIONS.get(value.ref) if isinstance(value.ref, GlobalRef) else None
    if rebuild is None or value.form != "call":
        return None
    try:
        rebuild(*value.args)
    except UnsupportedError as error:
        return error.message
    return None


ALLOWED_CALLS: dict[tuple[str, str], CallBuilder] = {
    (ref.module, ref.name): _make_tensor_builder(ref) for ref in _TENSOR_FUNCTIONS
} | {
    **{(ref.module, ref.name): _rebuild_parameter for ref in _PARAMETER_FUNCTIONS},
    (REBUILD_FROM_TYPE.module, REBUILD_FROM_TYPE.name): _rebuild_from_type,
    ("torch", "Size"): _make_size,
    ("_codecs", "encode"): _encode_text,
    ("builtins", "bytes"): _make_bytes,
    ("builtins", "bytearray"): _make_bytearray,
    ("builtins", "set"): _make_set_builder(set),
    ("builtins", "frozenset"): _make_set_builder(frozenset),
    ("builtins", "complex"): _make_complex,
    ("collections", "OrderedDict"): _make_ordered_dict,
    ("collections", "defaultdict"): _make_default_dict,
    ("copyreg", "_reconstructor"): _reconstruct_object,
}
"""The allow-list of functions. All others, and all classes but ``RECORD_CLASSES``, are recorded."""


_TENSOR_REASON = "torch's own function; the view must lie inside its storage"
_EMPTY_HOOKS = "hooks None or an empty OrderedDict"

CALL_DESCRIPTIONS: dict[tuple[str, str], tuple[str, str]] = {
    ("torch._utils", "_rebuild_tensor"): ("storage, offset, shape, strides", _TENSOR_REASON),
    ("torch._utils", "_rebuild_tensor_v2"): (f"storage, offset, shape, strides, bool, {_EMPTY_HOOKS}", _TENSOR_REASON),
    ("torch._utils", "_rebuild_tensor_v3"): (
        f"storage, offset, shape, strides, bool, {_EMPTY_HOOKS}, dtype",
        _TENSOR_REASON,
    ),
    ("torch._utils", "_rebuild_meta_tensor_no_storage"): ("dtype, shape, strides, bool", "a tensor of no bytes"),
    ("torch._utils", "_rebuild_device_tensor_from_cpu_tensor"): ("tensor, dtype, device, bool", _TENSOR_REASON),
    ("torch._utils", "_rebuild_parameter"): (f"tensor, bool, {_EMPTY_HOOKS}", _TENSOR_REASON),
    ("torch._utils", "_rebuild_parameter_with_state"): (
        f"tensor, bool, {_EMPTY_HOOKS}, attributes that are numbers or strings",
        _TENSOR_REASON,
    ),
    ("torch._tensor", "_rebuild_from_type_v2"): (
        "one of the functions above, Tensor or Parameter, its arguments, attributes that are numbers or strings",
        _TENSOR_REASON,
    ),
    ("torch", "Size"): ("up to 64 ints", "a tuple of numbers"),
    ("_codecs", "encode"): ("text of latin-1, 'latin1'", "how protocols 0 to 2 write bytes"),
    ("builtins", "bytes"): ("nothing", "how protocols 0 to 2 write empty bytes"),
    ("builtins", "bytearray"): ("bytes, or text and 'latin1'", "bytes"),
    ("builtins", "set"): ("a list", "how protocols 0 to 3 write sets"),
    ("builtins", "frozenset"): ("a list", "how protocols 0 to 3 write sets"),
    ("builtins", "complex"): ("two numbers", "a number"),
    ("collections", "OrderedDict"): ("nothing, or a list of pairs; plain attributes", "a dict"),
    ("collections", "defaultdict"): ("the name of a builtin container or number type", "a dict"),
    ("copyreg", "_reconstructor"): ("a class of this list, object, None", "how protocols 0 and 1 make an object"),
}
"""Arguments of each function, and why it is harmless, for the documentation."""

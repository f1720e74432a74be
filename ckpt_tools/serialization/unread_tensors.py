"""Tensors that are not plain: reasons why their elements cannot be read, which name the class.

A plain tensor is a strided view of a storage. Subclasses (DTensor, quantized tensors of torchao, jagged nested tensors)
mean more than the elements that they hold; sparse, quantized and flagged tensors mean something else.
"""

from __future__ import annotations

from collections.abc import Mapping

from ckpt_tools.core.values import PARAMETER, TENSOR_CLASS, GlobalRef, Opaque, StoredTensor, Value
from ckpt_tools.messages.wording import join_names

_PLAIN_ATTRIBUTES = (bool, int, float, str)

_UNINITIALIZED_CLASSES = tuple(
    GlobalRef("torch.nn.parameter", name) for name in ("UninitializedParameter", "UninitializedBuffer")
)

_KIND_BY_FUNCTION = {
    "_rebuild_sparse_tensor": "sparse tensor",
    "_rebuild_qtensor": "quantized tensor",
    "_rebuild_nested_tensor": "nested tensor",
}


def explain_unreadable(value: Value) -> str | None:
    """Reason why the tensor ``value`` cannot be read; None for a plain tensor, and for other values."""
    if isinstance(value, StoredTensor):
        return _explain_unreadable_stored(value)
    if not isinstance(value, Opaque) or not isinstance(value.ref, GlobalRef):
        return None
    if value.ref in _UNINITIALIZED_CLASSES:
        return f"it is a {value.ref}, which has no elements; materialize it before saving"
    from ckpt_tools.serialization.pickle.allowed_calls import explain_unsupported

    reason = explain_unsupported(value)
    is_rebuilt = value.ref.module in ("torch._utils", "torch._tensor") and value.ref.name.startswith("_rebuild")
    if reason is None and (is_rebuilt or value.ref == PARAMETER):
        return _format_reason(_get_tensor_class(value))
    return reason


def _explain_unreadable_stored(tensor: StoredTensor) -> str | None:
    if tensor.storage is None:
        return "it is on the meta device and has no elements; materialize it before saving"
    # TENSOR_CLASS is that of a tensor with attributes: FSDP1 sets _has_been_cloned on every parameter that it gathers.
    if tensor.wrapper not in (None, PARAMETER, TENSOR_CLASS):
        return _format_reason(str(tensor.wrapper))
    parts = tensor.state if isinstance(tensor.state, tuple) else (tensor.state,)
    unknown_attributes = [
        name for part in parts if part is not None for name in _find_unknown_attributes(part, tensor.wrapper)
    ]
    if not unknown_attributes:
        return None
    return _format_reason(f"{tensor.wrapper} with attributes of its own ({join_names(unknown_attributes)})")


def _find_unknown_attributes(state: Value, wrapper: GlobalRef | None) -> list[str]:
    """Attributes that could change the meaning of the elements; all others are dropped. The attributes of a parameter
    belong to the framework that trains it, and only tensors among them could."""
    if not isinstance(state, Mapping):
        return ["its state"]
    if wrapper == PARAMETER:
        return [str(name) for name, value in state.items() if isinstance(value, StoredTensor)]
    return [str(name) for name, value in state.items() if value is not None and type(value) not in _PLAIN_ATTRIBUTES]


def _format_reason(kind: str) -> str:
    return f"it is a {kind}, which cannot be read; save plain tensors"


def _get_tensor_class(value: Opaque) -> str:
    """The class that ``_rebuild_from_type_v2`` makes, or the function that would make the tensor."""
    if value.ref == PARAMETER and value.args and isinstance(value.args[0], Opaque):
        return _get_tensor_class(value.args[0])
    global_refs = [arg for arg in value.args if isinstance(arg, GlobalRef)]
    if len(global_refs) > 1:
        return str(global_refs[1])
    return _KIND_BY_FUNCTION.get(value.ref.name, f"tensor of {value.ref}")

"""Rules of the closed list for tensors that are not views of one storage: sparse, quantized and nested ones.

torch makes each with a function of its own that takes tensors and numbers. None of their elements is looked at: indices
that lead out of a tensor are validated by torch, or not (``docs/scanning.md`` says what is trusted).
"""

from __future__ import annotations

from ckpt_tools.core.values import OrderedDict, Size, StorageRef, Value, are_naturals
from ckpt_tools.serialization.pickle.shapes import (
    A_NAME,
    ANY,
    BOOL,
    FLOAT,
    INT,
    NATURALS,
    NOTHING,
    PLAIN_ATTRIBUTES,
    TENSOR,
    NameRule,
    ValueShape,
    fields,
    global_name,
    instance_of,
    list_of,
    made_by,
    row,
    tuple_of,
    with_slots,
)

_JAGGED = "torch.nested._internal.nested_tensor"
_LAYOUT = made_by("torch.serialization._get_layout")
_DIMS = ValueShape("tuple of ints", lambda value: type(value) in (tuple, Size) and are_naturals(value))
_NO_HOOKS = NOTHING | ValueShape(
    "an empty OrderedDict", lambda value: type(value) is OrderedDict and not value and not value.attributes
)
_CHANNELS = global_name("torch.per_channel_affine", "torch.per_channel_affine_float_qparams")
_QUANTIZER = (
    row(global_name("torch.per_tensor_affine"), FLOAT, INT)
    | row(_CHANNELS, TENSOR, TENSOR, INT)
    | row(_CHANNELS, list_of(FLOAT), list_of(INT | FLOAT), INT)
)
_SPECIAL_TENSORS = made_by(
    "torch._utils._rebuild_sparse_tensor", "torch._utils._rebuild_qtensor", "torch._utils._rebuild_nested_tensor"
)

_DYNAMIC_MARKS = (
    *("_dynamo_dynamic_indices", "_dynamo_weak_dynamic_indices", "_dynamo_propagated_dynamic_indices"),
    *("_dynamo_hint_overrides", "_specialize_on"),
)


def _is_dynamic_mark(value: Value) -> bool:
    """Numbers of dims, as ``torch._dynamo.mark_dynamic`` notes them: a set of them, or by dim a number or no functions
    at all."""
    if type(value) is set:
        return all(type(each) is int for each in value)
    is_dict = type(value) is dict and all(type(key) is int for key in value)
    return is_dict and all(type(each) is int or (type(each) is list and not each) for each in value.values())


def _are_tensor_attributes(state: Value) -> bool:
    if type(state) is not dict:
        return False
    others = {key: each for key, each in state.items() if key not in _DYNAMIC_MARKS or not _is_dynamic_mark(each)}
    return PLAIN_ATTRIBUTES.accepts(others)


TENSOR_ATTRIBUTES = with_slots(ValueShape("attributes that are numbers, strings or names", _are_tensor_attributes))
"""The attributes that a tensor is given."""

_CACHE = fields(min_seqlen=TENSOR, max_seqlen=TENSOR)
_LENGTHS = TENSOR | NOTHING
_JAGGED_PARTS = row(fields(values=TENSOR, offsets=TENSOR, lengths=_LENGTHS, _ragged_idx=INT, _metadata_cache=_CACHE,
                           requires_grad=BOOL))  # fmt: skip
_SET_OF_INTS = ValueShape("set of int", lambda value: type(value) is set and _is_dynamic_mark(value))
_JAGGED_STATE = fields(
    _values=TENSOR, _offsets=TENSOR, _lengths=_LENGTHS, _ragged_idx=INT, _metadata_cache=_CACHE,
    _dynamo_propagated_dynamic_indices=_SET_OF_INTS,
)  # fmt: skip

RULES: tuple[NameRule, ...] = (
    NameRule("torch._utils", "_rebuild_sparse_tensor", "indices and values, which torch.load validates",
         call=(row(ANY, row(TENSOR, TENSOR, NATURALS)), row(ANY, row(TENSOR, TENSOR, NATURALS, BOOL)),
               row(_LAYOUT, row(TENSOR, TENSOR, TENSOR, NATURALS)))),
    NameRule("torch._utils", "_rebuild_qtensor", "torch's own function, which checks the view of the storage",
         call=(row(instance_of("storage", StorageRef), INT, _DIMS, NATURALS, _QUANTIZER, BOOL, _NO_HOOKS),)),
    NameRule("torch._utils", "_rebuild_nested_tensor", "a buffer, and sizes, strides and offsets of the tensors in it",
         call=(row(TENSOR, TENSOR, TENSOR, TENSOR | tuple_of(INT) | list_of(INT)),)),
    NameRule(_JAGGED, "NestedTensor _rebuild_njt", "handed to _rebuild_from_type_v2 alone"),
    NameRule("torch._tensor", "_rebuild_from_type_v2",
         "a nested tensor of the jagged layout: values, offsets and lengths",
         call=(row(global_name(f"{_JAGGED}._rebuild_njt"), global_name(f"{_JAGGED}.NestedTensor"), _JAGGED_PARTS,
              _JAGGED_STATE), )),
    NameRule("torch.nn.parameter", "Parameter", "one of the tensors above", call=(row(_SPECIAL_TENSORS, BOOL),)),
    NameRule("torch", "sparse_csr sparse_csc sparse_bsr sparse_bsc jagged", A_NAME),
)  # fmt: skip
"""A part of the list in ``closed_list``."""

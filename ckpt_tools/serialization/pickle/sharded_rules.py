"""Rules of the closed list for one rank's part of a tensor, and for the plans that Megatron writes into a DCP.

The names and fields are those of files that torch 2.15 and megatron-core 0.16 wrote, and of the sources of torch 2.4 to
2.9 (see ``sharded_tensors``). The parts of a DTensor are checked by their classes, so that no attribute can be a hook:
``torch._tensor._set_obj_state`` sets the slots of a DTensor, ``DeviceMesh.__setstate__`` looks up the names of process
groups, and ``ShardedTensor.__setstate__`` compares four numbers and would register itself for RPC only if told to.
"""

from __future__ import annotations

from ckpt_tools.core.values import GlobalRef, Size, Value, are_naturals
from ckpt_tools.serialization.pickle.dcp_metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from ckpt_tools.serialization.pickle.shapes import (
    A_NAME,
    AN_ENUM,
    BOOL,
    ENUM,
    INT,
    ITS_ATTRIBUTES,
    NATURALS,
    NO_ARGUMENTS,
    NOTHING,
    STR,
    TENSOR,
    NameRule,
    ValueShape,
    dict_of,
    equal_to,
    fields,
    global_name,
    instance_of,
    list_of,
    made_by,
    one_of,
    row,
    tuple_of,
)
from ckpt_tools.serialization.pickle.torch_names import (
    DTENSOR_PACKAGE,
    DTENSORS,
    OLD_DTENSOR_PACKAGE,
    PROCESS_GROUP_STATE,
    REBUILD_WRAPPER_SUBCLASS,
    SHARD_PACKAGE,
    SHARDED_TENSOR,
)

_PLANNER = "torch.distributed.checkpoint.planner"
_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"
_SPECS = f"{DTENSOR_PACKAGE}._dtensor_spec {OLD_DTENSOR_PACKAGE}.placement_types"
_PLACEMENTS = f"{DTENSOR_PACKAGE}.placement_types {OLD_DTENSOR_PACKAGE}.placement_types"


def _made_by_any(modules: str, *names: str) -> ValueShape:
    return made_by(*(f"{module}.{each}" for module in modules.split() for each in names))


_DTYPE = ValueShape("dtype", lambda value: type(value) is GlobalRef and value.dtype is not None)
_DIMS = ValueShape("tuple of ints", lambda value: type(value) in (tuple, Size) and are_naturals(value))
_OPTIONAL_INT, _OPTIONAL_STRS = INT | NOTHING, tuple_of(STR) | list_of(STR) | NOTHING
_MESHES = "torch.distributed.device_mesh torch.distributed._tensor.device_mesh"
_MESH = _made_by_any(_MESHES, "DeviceMesh")
_LAYOUT = _made_by_any("torch.distributed._mesh_layout", "_MeshLayout")
_FLAT = _made_by_any("torch.distributed._mesh_layout", "_FlatLayout")
_PLACEMENT = _made_by_any(_PLACEMENTS, "Shard", "Replicate", "Partial", "_Partial", "_StridedShard")
_TENSOR_META = _made_by_any(_SPECS, "TensorMeta")
_ORDER_ENTRY = _made_by_any(f"{DTENSOR_PACKAGE}._dtensor_spec", "ShardOrderEntry")
_SPEC = _made_by_any(_SPECS, "DTensorSpec")
_NESTED_INTS = INT | tuple_of(INT | tuple_of(INT))
_WRAPPED = row(
    global_name(*map(str, (*DTENSORS, SHARDED_TENSOR))), _DTYPE, _DIMS, NATURALS, INT,
    made_by("torch.serialization._get_layout"), made_by("torch.device"), BOOL,
)  # fmt: skip
_DEVICE = _made_by_any("torch.distributed.remote_device", "_remote_device")
_SHARD_METADATA = _made_by_any(f"{SHARD_PACKAGE}.metadata", "ShardMetadata")
_SHARD = _made_by_any(f"{SHARD_PACKAGE}.sharded_tensor.shard", "Shard")
_SHARDED_METADATA = _made_by_any(f"{SHARD_PACKAGE}.sharded_tensor.metadata", "ShardedTensorMetadata")
_SHARDING = made_by(
    f"{SHARD_PACKAGE}.sharding_spec.api.EnumerableShardingSpec",
    f"{SHARD_PACKAGE}.sharding_spec.chunk_sharding_spec.ChunkShardingSpec",
)
_PROCESS_GROUP_STATE = made_by(f"{SHARDED_TENSOR}.{PROCESS_GROUP_STATE}")


def _dataclass_state(**shapes: ValueShape) -> ValueShape:
    """Attributes of a dataclass, in slots or not."""
    return fields(**shapes) | row(NOTHING, fields(**shapes))


def _is_wrapped_tensor(args: Value) -> bool:
    """``_rebuild_from_type_v2(_rebuild_wrapper_subclass, kind, arguments, state)``, of one kind in both places."""
    if type(args) is not tuple or len(args) != 4 or args[0] != REBUILD_WRAPPER_SUBCLASS:
        return False
    _, kind, inner, state = args
    if type(kind) is not GlobalRef or not _WRAPPED.accepts(inner) or inner[0] != kind:
        return False
    return (_SHARDED_STATE if kind == SHARDED_TENSOR else _DTENSOR_STATE).accepts(state)


_DTENSOR_STATE = row(NOTHING | fields(), fields(_local_tensor=TENSOR, _spec=_SPEC))
_SHARDED_STATE = row(list_of(_SHARD), _SHARDED_METADATA, _PROCESS_GROUP_STATE, _SHARDING, equal_to(False))


def _make_object_rule(
    modules: str, names: str, state: ValueShape | None = None, *, new: ValueShape = NO_ARGUMENTS
) -> NameRule:
    return NameRule(modules, names, ITS_ATTRIBUTES if state else "a tuple", new=(new,), state=state)


_COORDINATE = tuple_of(INT) | list_of(INT) | NOTHING
_MESH_STATE = fields(
    _device_type=STR, _layout=_LAYOUT, _rank_map=TENSOR, _mesh_dim_names=_OPTIONAL_STRS, _root_mesh=_MESH | NOTHING,
    _preserve_rank_order=BOOL, _flatten_rank_map=tuple_of(INT), _thread_id=_OPTIONAL_INT,
    _flatten_mapping=dict_of(STR, _MESH), _dim_group_names=list_of(STR), _rank=INT, _coordinate_on_dim=_COORDINATE,
    _hash=_OPTIONAL_INT,
)  # fmt: skip
_OLD_MESH_STATE = fields(
    device_type=STR, mesh=TENSOR, mesh_dim_names=_OPTIONAL_STRS, _flatten_mesh_list=tuple_of(INT),
    _parent_mesh=_MESH | NOTHING, _thread_id=_OPTIONAL_INT, _coordinate_on_dim=_COORDINATE,
    _dim_group_infos=list_of(row(STR, list_of(INT), STR)), _dim_group_names=list_of(STR), _hash=_OPTIONAL_INT,
)  # fmt: skip
_PLAN_STATE = {
    "items": list_of(_made_by_any(_PLANNER, "WriteItem")),
    "storage_data": NOTHING,
    "planner_data": fields() | NOTHING,
    "usable": BOOL,
}
_MCORE_DATA = dict_of(STR, dict_of(STR, _DIMS))

RULES: tuple[NameRule, ...] = (
    NameRule("torch._utils", "_rebuild_wrapper_subclass", "handed to _rebuild_from_type_v2 alone"),
    NameRule(SHARDED_TENSOR.module, "ShardedTensor", A_NAME),
    NameRule("builtins", "getattr", "an inner class of ShardedTensor, before protocol 4",
         call=(row(global_name(str(SHARDED_TENSOR)), one_of(PROCESS_GROUP_STATE)),)),
    NameRule("torch._tensor", "_rebuild_from_type_v2", "a tensor of one rank; its parts are of the classes below",
         call=(ValueShape("(_rebuild_wrapper_subclass, DTensor or ShardedTensor, (it, dtype, shape, strides, int, "
                          "layout, device, bool), its parts)", _is_wrapped_tensor),)),
    _make_object_rule(_SPECS, "DTensorSpec",
         _dataclass_state(mesh=_MESH, placements=tuple_of(_PLACEMENT) | list_of(_PLACEMENT),
              tensor_meta=_TENSOR_META | NOTHING, shard_order=tuple_of(_ORDER_ENTRY) | NOTHING,
              use_strided_shard_as_shard_order=BOOL, _hash=_OPTIONAL_INT)),
    _make_object_rule(_SPECS, "TensorMeta", new=row(_DIMS, NATURALS, _DTYPE)),
    _make_object_rule(f"{DTENSOR_PACKAGE}._dtensor_spec", "ShardOrderEntry", new=row(INT, tuple_of(INT))),
    _make_object_rule(_MESHES, "DeviceMesh", _MESH_STATE | _OLD_MESH_STATE),
    _make_object_rule("torch.distributed._mesh_layout", "_MeshLayout",
         _dataclass_state(axes=tuple_of(_FLAT), shape=_NESTED_INTS, stride=_NESTED_INTS)),
    _make_object_rule("torch.distributed._mesh_layout", "_FlatLayout",
         _dataclass_state(shape=tuple_of(INT), stride=tuple_of(INT))),
    _make_object_rule(_PLACEMENTS, "Shard", _dataclass_state(dim=INT)),
    _make_object_rule(_PLACEMENTS, "Replicate", _dataclass_state()),
    _make_object_rule(_PLACEMENTS, "Partial _Partial", _dataclass_state(reduce_op=STR)),
    _make_object_rule(_PLACEMENTS, "_StridedShard", _dataclass_state(dim=INT, split_factor=INT)),
    _make_object_rule(f"{SHARD_PACKAGE}.sharded_tensor.shard", "Shard",
         _dataclass_state(tensor=TENSOR, metadata=_SHARD_METADATA)),
    _make_object_rule(f"{SHARD_PACKAGE}.metadata", "ShardMetadata",
         _dataclass_state(shard_offsets=list_of(INT), shard_sizes=list_of(INT), placement=_DEVICE | NOTHING)),
    _make_object_rule("torch.distributed.remote_device", "_remote_device",
         fields(_worker_name=STR | NOTHING, _rank=_OPTIONAL_INT, _device=made_by("torch.device"))),
    _make_object_rule(f"{SHARD_PACKAGE}.sharded_tensor.metadata", "ShardedTensorMetadata",
         fields(shards_metadata=list_of(_SHARD_METADATA), size=_DIMS, tensor_properties=instance_of("TensorProperties",
              TensorProperties))),
    _make_object_rule(SHARDED_TENSOR.module, f"ShardedTensor.{PROCESS_GROUP_STATE}",
         fields(local_rank=INT, global_rank=INT, local_world_size=INT, global_world_size=INT)),
    _make_object_rule(f"{SHARD_PACKAGE}.sharding_spec.chunk_sharding_spec", "ChunkShardingSpec",
         fields(dim=INT, placements=list_of(_DEVICE))),
    _make_object_rule(f"{SHARD_PACKAGE}.sharding_spec.api", "EnumerableShardingSpec",
         fields(shards=list_of(_SHARD_METADATA))),
    # What Megatron keeps of the plan of each rank, beside the metadata of a DCP
    _make_object_rule(_PLANNER, "SavePlan", fields(**_PLAN_STATE)),
    _make_object_rule(_MEGATRON, "MCoreSavePlan", fields(**_PLAN_STATE, mcore_data=_MCORE_DATA)),
    _make_object_rule(_PLANNER, "WriteItem",
         fields(index=instance_of("MetadataIndex", MetadataIndex), type=_made_by_any(_PLANNER, "WriteItemType"),
              bytes_io_data=_made_by_any(_PLANNER, "BytesIOWriteData") | NOTHING, tensor_data=_made_by_any(_PLANNER,
              "TensorWriteData") | NOTHING)),
    NameRule(_PLANNER, "WriteItemType", AN_ENUM, call=(ENUM,)),
    _make_object_rule(_PLANNER, "BytesIOWriteData", fields(nbytes=INT)),
    _make_object_rule(_PLANNER, "TensorWriteData",
         fields(chunk=instance_of("ChunkStorageMetadata", ChunkStorageMetadata),
              properties=instance_of("TensorProperties", TensorProperties), size=_DIMS)),
)  # fmt: skip
"""A part of the list in ``closed_list``."""

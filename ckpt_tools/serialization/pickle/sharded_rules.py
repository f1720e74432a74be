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
    Rule,
    Shape,
    constant,
    exactly,
    fields,
    list_of,
    made_of,
    mapping,
    name,
    row,
    several,
    words,
)

_DTENSOR, _OLD_DTENSOR = "torch.distributed.tensor", "torch.distributed._tensor"
_SHARDED = "torch.distributed._shard"
_SHARDED_API = f"{_SHARDED}.sharded_tensor.api"
_PLANNER = "torch.distributed.checkpoint.planner"
_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"
_SPECS = f"{_DTENSOR}._dtensor_spec {_OLD_DTENSOR}.placement_types"
_PLACEMENTS = f"{_DTENSOR}.placement_types {_OLD_DTENSOR}.placement_types"

DTENSORS = (f"{_DTENSOR}.DTensor", f"{_DTENSOR}._api.DTensor", f"{_OLD_DTENSOR}.DTensor", f"{_OLD_DTENSOR}.api.DTensor")
SHARDED_TENSOR = f"{_SHARDED_API}.ShardedTensor"
_INNER = "ProcessGroupState"


def _made(modules: str, *names: str) -> Shape:
    return made_of(*(f"{module}.{each}" for module in modules.split() for each in names))


_DTYPE = Shape("dtype", lambda value: type(value) is GlobalRef and value.dtype is not None)
_DIMS = Shape("tuple of ints", lambda value: type(value) in (tuple, Size) and are_naturals(value))
_OPTIONAL_INT, _OPTIONAL_STRS = INT | NOTHING, several(STR) | list_of(STR) | NOTHING
_MESHES = "torch.distributed.device_mesh torch.distributed._tensor.device_mesh"
_MESH = _made(_MESHES, "DeviceMesh")
_LAYOUT = _made("torch.distributed._mesh_layout", "_MeshLayout")
_FLAT = _made("torch.distributed._mesh_layout", "_FlatLayout")
_PLACEMENT = _made(_PLACEMENTS, "Shard", "Replicate", "Partial", "_Partial", "_StridedShard")
_META = _made(_SPECS, "TensorMeta")
_ENTRY = _made(f"{_DTENSOR}._dtensor_spec", "ShardOrderEntry")
_SPEC = _made(_SPECS, "DTensorSpec")
_NESTED_INTS = INT | several(INT | several(INT))
_WRAPPED = row(
    name(*DTENSORS, SHARDED_TENSOR), _DTYPE, _DIMS, NATURALS, INT,
    made_of("torch.serialization._get_layout"), made_of("torch.device"), BOOL,
)  # fmt: skip
_DEVICE = _made("torch.distributed.remote_device", "_remote_device")
_SHARD_METADATA = _made(f"{_SHARDED}.metadata", "ShardMetadata")
_SHARD = _made(f"{_SHARDED}.sharded_tensor.shard", "Shard")
_SHARDED_METADATA = _made(f"{_SHARDED}.sharded_tensor.metadata", "ShardedTensorMetadata")
_SHARDING = made_of(
    f"{_SHARDED}.sharding_spec.api.EnumerableShardingSpec",
    f"{_SHARDED}.sharding_spec.chunk_sharding_spec.ChunkShardingSpec",
)
_GROUP = made_of(f"{SHARDED_TENSOR}.{_INNER}")


def _slots(**shapes: Shape) -> Shape:
    """Attributes of a dataclass, in slots or not."""
    return fields(**shapes) | row(NOTHING, fields(**shapes))


def _is_wrapped(args: Value) -> bool:
    """``_rebuild_from_type_v2(_rebuild_wrapper_subclass, kind, arguments, state)``, of one kind in both places."""
    if type(args) is not tuple or len(args) != 4 or args[0] != GlobalRef("torch._utils", "_rebuild_wrapper_subclass"):
        return False
    _, kind, inner, state = args
    if type(kind) is not GlobalRef or not _WRAPPED.accepts(inner) or inner[0] != kind:
        return False
    return (_SHARDED_STATE if str(kind) == SHARDED_TENSOR else _DTENSOR_STATE).accepts(state)


_DTENSOR_STATE = row(NOTHING | fields(), fields(_local_tensor=TENSOR, _spec=_SPEC))
_SHARDED_STATE = row(list_of(_SHARD), _SHARDED_METADATA, _GROUP, _SHARDING, constant(False))


def _object(modules: str, names: str, state: Shape | None = None, *, new: Shape = NO_ARGUMENTS) -> Rule:
    return Rule(modules, names, ITS_ATTRIBUTES if state else "a tuple", new=(new,), state=state)


_MESH_STATE = fields(
    _device_type=STR, _layout=_LAYOUT, _rank_map=TENSOR, _mesh_dim_names=_OPTIONAL_STRS, _root_mesh=_MESH | NOTHING,
    _preserve_rank_order=BOOL, _flatten_rank_map=several(INT), _thread_id=_OPTIONAL_INT,
    _flatten_mapping=mapping(STR, _MESH), _dim_group_names=list_of(STR), _rank=INT, _coordinate_on_dim=several(INT)
    | list_of(INT) | NOTHING, _hash=_OPTIONAL_INT,
)  # fmt: skip
_OLD_MESH_STATE = fields(
    device_type=STR, mesh=TENSOR, mesh_dim_names=_OPTIONAL_STRS, _flatten_mesh_list=several(INT),
    _parent_mesh=_MESH | NOTHING, _thread_id=_OPTIONAL_INT, _coordinate_on_dim=several(INT) | list_of(INT) | NOTHING,
    _dim_group_infos=list_of(row(STR, list_of(INT), STR)), _dim_group_names=list_of(STR), _hash=_OPTIONAL_INT,
)  # fmt: skip
_PLAN_STATE = {
    "items": list_of(_made(_PLANNER, "WriteItem")), "storage_data": NOTHING, "planner_data": fields() | NOTHING,
    "usable": BOOL,
}  # fmt: skip
_MCORE_DATA = mapping(STR, mapping(STR, _DIMS))

RULES: tuple[Rule, ...] = (
    Rule("torch._utils", "_rebuild_wrapper_subclass", "handed to _rebuild_from_type_v2 alone"),
    Rule(_SHARDED_API, "ShardedTensor", A_NAME),
    Rule("builtins", "getattr", "an inner class of ShardedTensor, before protocol 4",
         call=(row(name(SHARDED_TENSOR), words(_INNER)),)),
    Rule("torch._tensor", "_rebuild_from_type_v2", "a tensor of one rank; its parts are of the classes below",
         call=(Shape("(_rebuild_wrapper_subclass, DTensor or ShardedTensor, (it, dtype, shape, strides, int, layout, "
                     "device, bool), its parts)", _is_wrapped),)),
    _object(_SPECS, "DTensorSpec", _slots(
        mesh=_MESH, placements=several(_PLACEMENT) | list_of(_PLACEMENT), tensor_meta=_META | NOTHING,
        shard_order=several(_ENTRY) | NOTHING, use_strided_shard_as_shard_order=BOOL, _hash=_OPTIONAL_INT)),
    _object(_SPECS, "TensorMeta", new=row(_DIMS, NATURALS, _DTYPE)),
    _object(f"{_DTENSOR}._dtensor_spec", "ShardOrderEntry", new=row(INT, several(INT))),
    _object(_MESHES, "DeviceMesh", _MESH_STATE | _OLD_MESH_STATE),
    _object("torch.distributed._mesh_layout", "_MeshLayout",
            _slots(axes=several(_FLAT), shape=_NESTED_INTS, stride=_NESTED_INTS)),
    _object("torch.distributed._mesh_layout", "_FlatLayout", _slots(shape=several(INT), stride=several(INT))),
    _object(_PLACEMENTS, "Shard", _slots(dim=INT)),
    _object(_PLACEMENTS, "Replicate", _slots()),
    _object(_PLACEMENTS, "Partial _Partial", _slots(reduce_op=STR)),
    _object(_PLACEMENTS, "_StridedShard", _slots(dim=INT, split_factor=INT)),
    _object(f"{_SHARDED}.sharded_tensor.shard", "Shard", _slots(tensor=TENSOR, metadata=_SHARD_METADATA)),
    _object(f"{_SHARDED}.metadata", "ShardMetadata",
            _slots(shard_offsets=list_of(INT), shard_sizes=list_of(INT), placement=_DEVICE | NOTHING)),
    _object("torch.distributed.remote_device", "_remote_device",
            fields(_worker_name=STR | NOTHING, _rank=_OPTIONAL_INT, _device=made_of("torch.device"))),
    _object(f"{_SHARDED}.sharded_tensor.metadata", "ShardedTensorMetadata",
            fields(shards_metadata=list_of(_SHARD_METADATA), size=_DIMS,
                   tensor_properties=exactly("TensorProperties", TensorProperties))),
    _object(_SHARDED_API, f"ShardedTensor.{_INNER}",
            fields(local_rank=INT, global_rank=INT, local_world_size=INT, global_world_size=INT)),
    _object(f"{_SHARDED}.sharding_spec.chunk_sharding_spec", "ChunkShardingSpec",
            fields(dim=INT, placements=list_of(_DEVICE))),
    _object(f"{_SHARDED}.sharding_spec.api", "EnumerableShardingSpec", fields(shards=list_of(_SHARD_METADATA))),
    # What Megatron keeps of the plan of each rank, beside the metadata of a DCP
    _object(_PLANNER, "SavePlan", fields(**_PLAN_STATE)),
    _object(_MEGATRON, "MCoreSavePlan", fields(**_PLAN_STATE, mcore_data=_MCORE_DATA)),
    _object(_PLANNER, "WriteItem", fields(
        index=exactly("MetadataIndex", MetadataIndex), type=_made(_PLANNER, "WriteItemType"),
        bytes_io_data=_made(_PLANNER, "BytesIOWriteData") | NOTHING,
        tensor_data=_made(_PLANNER, "TensorWriteData") | NOTHING)),
    Rule(_PLANNER, "WriteItemType", AN_ENUM, call=(ENUM,)),
    _object(_PLANNER, "BytesIOWriteData", fields(nbytes=INT)),
    _object(_PLANNER, "TensorWriteData", fields(
        chunk=exactly("ChunkStorageMetadata", ChunkStorageMetadata),
        properties=exactly("TensorProperties", TensorProperties), size=_DIMS)),
)  # fmt: skip
"""A part of the list in ``closed_list``."""

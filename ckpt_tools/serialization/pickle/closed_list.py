"""The closed list: every name that a pickle of a proven file may hold, and all that it may do with it.

"Harmless with any arguments" does not exist: a constructor may call what it is given, a function may hand it back, and
an attribute may be a hook. So each name stands here with the arguments and the state that genuine checkpoints have,
collected from those that torch, DeepSpeed, transformers, accelerate, Lightning, Megatron, omegaconf, numpy and the
standard library wrote. Names are exact: through a dotted one every imported module can be reached.

A name that is only listed may stand in a pickle, as the type of a storage or a dtype does. It may be called only if
``call`` has arguments for it, made by ``__new__`` only if ``new`` has, and given a state only if ``state`` has a shape
for it. The rules of numpy and joblib are in ``numpy_rules``. Names of ``allowed_calls`` and ``dcp_metadata`` are
interpreted: their functions check their arguments.
"""

from __future__ import annotations

from collections import defaultdict

from ckpt_tools.core.values import GlobalRef, Opaque, OrderedDict, Size, StorageRef, Value, are_naturals
from ckpt_tools.serialization.pickle.allowed_calls import ALLOWED_CALLS
from ckpt_tools.serialization.pickle.dcp_metadata import (
    RECORD_CLASSES,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from ckpt_tools.serialization.pickle.machine import TensorAttributes, resolve_name
from ckpt_tools.serialization.pickle.numpy_rules import DTYPE, is_consistent_dtype
from ckpt_tools.serialization.pickle.numpy_rules import RULES as NUMPY
from ckpt_tools.serialization.pickle.shapes import (
    A_NAME,
    AN_ENUM,
    ANY,
    ATTRIBUTES,
    BOOL,
    BYTES,
    CONTAINER,
    ENUM,
    FLOAT,
    INT,
    ITS_ATTRIBUTES,
    NATURALS,
    NO_ARGUMENTS,
    NOTHING,
    PLAIN_ATTRIBUTES,
    STR,
    TENSOR,
    NameRule,
    ValueShape,
    attribute_rule,
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
    with_slots,
)  # fmt: skip
from ckpt_tools.serialization.pickle.torch_names import (
    DTENSOR_PACKAGE,
    DTENSORS,
    OLD_DTENSOR_PACKAGE,
    PROCESS_GROUP_STATE,
    REBUILD_WRAPPER_SUBCLASS,
    SHARD_PACKAGE,
    SHARDED_TENSOR,
)  # fmt: skip

_OPTIONAL_INT, _OPTIONAL_STRS = INT | NOTHING, tuple_of(STR) | list_of(STR) | NOTHING
_DIMS = ValueShape("tuple of ints", lambda value: type(value) in (tuple, Size) and are_naturals(value))

# Names of torch, and of what trains with it

_LAYOUTS = one_of("torch.strided", "torch.sparse_coo", "torch.sparse_csr", "torch.sparse_csc", "torch.sparse_bsr",
                 "torch.sparse_bsc", "torch._mkldnn", "torch.jagged")  # fmt: skip
_SCALAR_KINDS = "BFloat16 Bool Byte Char ComplexDouble ComplexFloat Double Float Half Int Long Short"
_QUANTIZED_KINDS = "QInt8 QInt32 QUInt8 QUInt4x2 QUInt2x4"
_STORAGES = " ".join(f"{kind}Storage" for kind in f"{_SCALAR_KINDS} {_QUANTIZED_KINDS}".split())
_TENSORS = " ".join(f"{kind}Tensor" for kind in _SCALAR_KINDS.split())
_DTYPES = (
    "bool uint8 uint16 uint32 uint64 int8 int16 int32 int64 float16 float32 float64 bfloat16 complex32 complex64 "
    "complex128 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2 qint8 qint32 "
    "quint8 quint4x2 quint2x4 bcomplex32 bits8 bits16 bits1x8 bits2x4 bits4x2 int1 int2 int3 int4 int5 int6 int7 uint1 "
    "uint2 uint3 uint4 uint5 uint6 uint7"
)
_QSCHEMES = (
    "per_tensor_affine per_tensor_symmetric per_channel_affine per_channel_symmetric per_channel_affine_float_qparams"
)
_SCHEDULERS = (
    "LRScheduler _LRScheduler LambdaLR MultiplicativeLR StepLR MultiStepLR ConstantLR LinearLR ExponentialLR "
    "SequentialLR PolynomialLR CosineAnnealingLR ChainedScheduler ReduceLROnPlateau CyclicLR OneCycleLR "
    "CosineAnnealingWarmRestarts"
)
_HF_DEEPSPEED = "HfDeepSpeedConfig HfTrainerDeepSpeedConfig"
_OMEGACONF_NODES = (
    "AnyNode BooleanNode BytesNode EnumNode FloatNode IntegerNode InterpolationResultNode PathNode StringNode"
)
_PATH_CLASSES = "Path PosixPath WindowsPath PurePath PurePosixPath PureWindowsPath"

# Tensors that are not views of one storage: sparse, quantized and nested ones. torch makes each with a function of its
# own that takes tensors and numbers. None of their elements is looked at: indices that lead out of a tensor are
# validated by torch, or not (``docs/scanning.md`` says what is trusted).

_JAGGED = "torch.nested._internal.nested_tensor"
_STORAGE_LAYOUT = made_by("torch.serialization._get_layout")
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

# One rank's part of a tensor, and the plans that Megatron writes into a DCP. Names and fields are those of files that
# torch 2.15 and megatron-core 0.16 wrote, and of the sources of torch 2.4 to 2.9 (see ``sharded_tensors``). The parts
# of a DTensor are checked by their classes, so that no attribute can be a hook: ``torch._tensor._set_obj_state`` sets
# the slots of a DTensor, ``DeviceMesh.__setstate__`` looks up the names of process groups, and
# ``ShardedTensor.__setstate__`` compares four numbers and would register itself for RPC only if told to.

_PLANNER = "torch.distributed.checkpoint.planner"
_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"
_SPECS = f"{DTENSOR_PACKAGE}._dtensor_spec {OLD_DTENSOR_PACKAGE}.placement_types"
_PLACEMENTS = f"{DTENSOR_PACKAGE}.placement_types {OLD_DTENSOR_PACKAGE}.placement_types"


def _made_by_any(modules: str, *names: str) -> ValueShape:
    return made_by(*(f"{module}.{each}" for module in modules.split() for each in names))


_DTYPE = ValueShape("dtype", lambda value: type(value) is GlobalRef and value.dtype is not None)
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
    _STORAGE_LAYOUT, made_by("torch.device"), BOOL,
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
    # Python
    NameRule("builtins", "Ellipsis NotImplemented bool float int str object",
         "a name by itself: the type of a value, or the factory of a defaultdict"),
    NameRule("builtins", "dict list tuple", "the same, or a container of plain data", call=(row(), row(CONTAINER))),
    NameRule("builtins", "object", "an object without anything", new=(NO_ARGUMENTS,)),
    NameRule("builtins", "range", "three numbers", call=(row(INT, INT, INT),)),
    NameRule("builtins", "slice", "three numbers", call=(row(_OPTIONAL_INT, _OPTIONAL_INT, _OPTIONAL_INT),)),
    NameRule("builtins", "type", "the type of None", call=(row(NOTHING),)),
    NameRule("builtins", "getattr", "OneCycleLR of torch before 2.4 kept its annealing function",
         call=(row(global_name("torch.optim.lr_scheduler.OneCycleLR"),
                   one_of("_annealing_cos", "_annealing_linear")),)),
    NameRule("torch.optim.lr_scheduler", "OneCycleLR._annealing_cos OneCycleLR._annealing_linear",
         "the same from protocol 4 on: two functions of torch, by their exact names"),
    NameRule("typing", "Any", "a name by itself: the type of a node of omegaconf"),
    NameRule("collections", "Counter", "counts of a plain dict", call=(row(dict_of(ANY, INT)), row(CONTAINER))),
    NameRule("collections", "deque", "an empty deque that is appended to", call=(row(), row(row(), INT)),
         has_items=True),
    attribute_rule("argparse", "Namespace"),
    NameRule("types", "SimpleNamespace", ITS_ATTRIBUTES, call=(NO_ARGUMENTS,), state=ATTRIBUTES),
    NameRule("datetime", "date", "four bytes", call=(row(BYTES),)),
    NameRule("datetime", "datetime time", "ten bytes or six, and a fixed time zone",
         call=(row(BYTES), row(BYTES, made_by("datetime.timezone")))),
    NameRule("datetime", "timedelta", "three numbers", call=(row(INT, INT, INT),)),
    NameRule("datetime", "timezone", "a fixed difference",
         call=(row(made_by("datetime.timedelta")), row(made_by("datetime.timedelta"), STR))),
    NameRule("decimal", "Decimal", "digits", call=(row(STR),)),
    NameRule("fractions", "Fraction", "two numbers, or digits", call=(row(INT, INT), row(STR))),
    NameRule("uuid", "UUID", "a number", new=(NO_ARGUMENTS,), state=fields(int=INT, is_safe=_OPTIONAL_INT)),
    NameRule("uuid", "SafeUUID", AN_ENUM, call=(row(_OPTIONAL_INT),)),
    NameRule("random", "Random", "a random generator and its numbers", call=(NO_ARGUMENTS,),
         state=row(INT, tuple_of(INT), FLOAT | NOTHING)),
    NameRule("signal", "Handlers Signals", AN_ENUM, call=(ENUM,)),
    NameRule("signal", "SIGHUP SIGINT SIGTERM SIGUSR1 SIGUSR2", "a constant"),
    NameRule("io _io", "BytesIO", "bytes and a position", new=(NO_ARGUMENTS,), state=row(BYTES, INT, NOTHING)),
    NameRule("io _io", "StringIO", "a text and a position", new=(NO_ARGUMENTS,), state=row(STR, STR, INT, NOTHING)),
    NameRule("pathlib pathlib._local", _PATH_CLASSES, "parts of a path, which is not opened", call=(tuple_of(STR),)),
    # torch
    NameRule("torch",
         f"{_STORAGES} {_TENSORS} {_DTYPES} {_QSCHEMES} Tensor strided sparse_coo contiguous_format preserve_format "
         "channels_last channels_last_3d", A_NAME),
    NameRule("torch.cuda", f"{_STORAGES} {_TENSORS}", A_NAME),
    NameRule("torch.sparse torch.cuda.sparse", _TENSORS, A_NAME),
    NameRule("torch._C", "device dtype layout memory_format", A_NAME),
    NameRule("torch.storage", "TypedStorage UntypedStorage _TypedStorage _UntypedStorage", A_NAME),
    NameRule("torch.nn.parameter", "Buffer Parameter UninitializedBuffer UninitializedParameter", A_NAME),
    NameRule("torch", "device", "a kind of device and its number", call=(row(STR), row(STR, INT))),
    NameRule("torch.serialization", "_get_layout", "looks a layout up", call=(row(_LAYOUTS),)),
    NameRule("torch.distributed.checkpoint.metadata torch.distributed._shard.checkpoint.metadata",
         "_MEM_FORMAT_ENCODING", AN_ENUM, call=(ENUM,)),
    NameRule("torch.distributed._shard.sharded_tensor.metadata", "MEM_FORMAT_ENCODING", AN_ENUM, call=(ENUM,)),
    NameRule("torch._C", "Generator", "a random generator of one device, with its seed and its state",
         call=(row(made_by("torch.device")),), state=row(INT, _OPTIONAL_INT, TENSOR)),
    NameRule("torch.torch_version", "TorchVersion", "a text", new=(row(STR),)),
    NameRule("torch._utils", "_rebuild_sparse_tensor", "indices and values, which torch.load validates",
         call=(row(ANY, row(TENSOR, TENSOR, NATURALS)), row(ANY, row(TENSOR, TENSOR, NATURALS, BOOL)),
               row(_STORAGE_LAYOUT, row(TENSOR, TENSOR, TENSOR, NATURALS)))),
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
    attribute_rule("torch.optim.lr_scheduler", _SCHEDULERS),
    attribute_rule("torch.amp.grad_scaler torch.cuda.amp.grad_scaler", "GradScaler"),
    NameRule("torch.amp.grad_scaler torch.cuda.amp.grad_scaler", "OptState", AN_ENUM, call=(ENUM,)),
    NameRule("torch.distributed.checkpoint.filesystem", "_StoragePrefix", ITS_ATTRIBUTES, new=(NO_ARGUMENTS,),
         state=fields(prefix=STR)),
    NameRule("torch.distributed.tensor torch.distributed.tensor._api torch.distributed._tensor "
         "torch.distributed._tensor.api", "DTensor", A_NAME),
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
    *NUMPY,
    # Training libraries
    NameRule("deepspeed.runtime.zero.config", "ZeroStageEnum", AN_ENUM, call=(ENUM,)),
    NameRule("deepspeed.runtime.zero.offload_config", "OffloadDeviceEnum", AN_ENUM, call=(ENUM,)),
    NameRule("deepspeed.utils.tensor_fragment", "fragment_address", ITS_ATTRIBUTES, new=(NO_ARGUMENTS,),
         state=fields(numel=INT, start=INT)),
    attribute_rule("deepspeed.checkpoint.universal_checkpoint", "SubparamShape"),
    NameRule("deepspeed.runtime.fp16.loss_scaler deepspeed.pt.loss_scaler", "LossScaler DynamicLossScaler",
         ITS_ATTRIBUTES, new=(NO_ARGUMENTS,), state=PLAIN_ATTRIBUTES),
    NameRule("transformers.training_args", "OptimizerNames ParallelMode", AN_ENUM, call=(ENUM,)),
    NameRule("transformers.trainer_utils",
         "EvaluationStrategy FSDPOption HubStrategy IntervalStrategy SaveStrategy SchedulerType ShardedDDPOption",
         AN_ENUM, call=(ENUM,)),
    NameRule("transformers.debug_utils", "DebugOption", AN_ENUM, call=(ENUM,)),
    attribute_rule("transformers.training_args", "TrainingArguments"),
    attribute_rule("transformers.training_args_seq2seq", "Seq2SeqTrainingArguments"),
    attribute_rule("transformers.trainer_pt_utils", "AcceleratorConfig"),
    attribute_rule("transformers.integrations.deepspeed transformers.deepspeed", _HF_DEEPSPEED),
    NameRule("accelerate.utils.dataclasses", "DistributedType", AN_ENUM, call=(ENUM,)),
    attribute_rule("accelerate.utils.dataclasses", "DeepSpeedPlugin FullyShardedDataParallelPlugin"),
    attribute_rule("accelerate.state", "AcceleratorState PartialState"),
    NameRule("lightning.fabric.utilities.data lightning_fabric.utilities.data lightning.pytorch.utilities.parsing "
         "pytorch_lightning.utilities.parsing", "AttributeDict", "a dict; its items are set by key",
         new=(NO_ARGUMENTS,), has_pairs=True, state=fields()),
    attribute_rule("omegaconf.dictconfig", "DictConfig"),
    attribute_rule("omegaconf.listconfig", "ListConfig"),
    attribute_rule("omegaconf.base", "ContainerMetadata Metadata"),
    attribute_rule("omegaconf.nodes", _OMEGACONF_NODES),
    NameRule("megatron.core.rerun_state_machine", "RerunDiagnostic RerunMode RerunState", AN_ENUM, call=(ENUM,)),
    NameRule("megatron.core.enums", "ModelType", AN_ENUM, call=(ENUM,)),
    NameRule("megatron.model.enums megatron.core.transformer.enums",
         "AttnBackend AttnMaskType AttnType LayerType ModelType PositionEmbeddingType", AN_ENUM, call=(ENUM,)),
)  # fmt: skip
"""The list. ``docs/scanning_list.md`` shows it, and a test compares the two."""

ALLOWED_FACTORIES = frozenset(
    {("builtins", each) for each in ["bool", "dict", "float", "frozenset", "int", "list", "set", "str", "tuple"]}
    | {("collections", each) for each in ["Counter", "OrderedDict", "deque"]}
)
"""Factories allowed in a defaultdict."""


_RULES_BY_NAME: defaultdict[tuple[str, str], list[NameRule]] = defaultdict(list)
for _rule in RULES:
    for _key in _rule.keys:
        _RULES_BY_NAME[_key].append(_rule)

_TENSOR_CLASSES = frozenset({"torch.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer"})


def is_listed(module: str, attribute: str) -> bool:
    """True if a pickle may hold the name at all."""
    key = (module, attribute)
    return key in _RULES_BY_NAME or key in ALLOWED_CALLS or key in RECORD_CLASSES


def explain_refusal(recorded_object: Opaque | TensorAttributes) -> str | None:
    """Why the list does not allow an object; None if it does."""
    if isinstance(recorded_object, TensorAttributes):
        # torch sets the attributes of a tensor by ``setattr``: numbers and strings there call nothing.
        if str(recorded_object.ref) not in _TENSOR_CLASSES:
            return f"it makes a tensor a {recorded_object.ref}"
        state = recorded_object.state
        is_empty = state is None or (type(state) in (dict, OrderedDict) and not state)
        is_plain = is_empty or TENSOR_ATTRIBUTES.accepts(state)
        return None if is_plain else "it gives a tensor attributes that are objects"
    ref = resolve_name(recorded_object.ref)
    if ref is None:
        return "it calls what another call gave"
    rules = _RULES_BY_NAME.get((ref.module, ref.name), ())
    if not rules and not is_listed(ref.module, ref.name):
        return f"it calls {ref}"
    is_allowed = any(_is_allowed_by(rule, recorded_object) for rule in rules)
    if is_allowed and (ref != DTYPE or is_consistent_dtype(recorded_object)):
        return None
    return f"it uses {ref} as no checkpoint does"


def _is_allowed_by(rule: NameRule, recorded_object: Opaque) -> bool:
    made, shapes = recorded_object, rule.call if recorded_object.form == "call" else rule.new
    return (
        any(shape.accepts(made.args) for shape in shapes)
        and not made.kwargs
        and (made.state is None or (rule.state is not None and rule.state.accepts(made.state)))
        and (rule.has_items or not made.items)
        and (rule.has_pairs or not made.pairs)
    )

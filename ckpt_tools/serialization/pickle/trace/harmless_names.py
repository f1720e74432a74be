"""What genuine checkpoints name: classes and functions that run nothing of the checkpoint's, whatever they are given.

Collected from checkpoints that torch, DeepSpeed, transformers, accelerate, Lightning, Megatron and numpy wrote, over
their versions, and from the list that torch's own ``weights_only`` loader keeps. Only exact names count: through a
dotted name (``torch.serialization``, ``os.system``) every imported module can be reached. Calling those of
``HARMLESS`` with any arguments sets attributes and no more; where that takes a look at the arguments, ``recorder``
takes it. Those of ``ONLY_MADE`` are so when they are made by ``__new__`` and given a state, as picklers do: their
constructors open files or connect to other ranks.
"""

from __future__ import annotations

from collections.abc import Mapping

_TORCH_KINDS = "BFloat16 Bool Byte Char ComplexDouble ComplexFloat Double Float Half Int Long Short"
_TORCH_QUANTIZED = "QInt8 QInt32 QUInt8 QUInt4x2 QUInt2x4"
_STORAGES = " ".join(f"{kind}Storage" for kind in f"{_TORCH_KINDS} {_TORCH_QUANTIZED}".split())
_TENSORS = " ".join(f"{kind}Tensor" for kind in _TORCH_KINDS.split())
_DTYPES = (
    "bool uint8 uint16 uint32 uint64 int8 int16 int32 int64 float16 float32 float64 bfloat16 complex32 complex64 "
    "complex128 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2 qint8 qint32 "
    "quint8 quint4x2 quint2x4 bcomplex32 bits8 bits16 bits1x8 bits2x4 bits4x2 int1 int2 int3 int4 int5 int6 int7 uint1 "
    "uint2 uint3 uint4 uint5 uint6 uint7"
)
_QSCHEMES = "per_tensor_affine per_tensor_symmetric per_channel_affine per_channel_symmetric"
_DCP_METADATA = (
    "ChunkStorageMetadata MetadataIndex TensorProperties TensorStorageMetadata BytesStorageMetadata StorageMeta "
    "Metadata _MEM_FORMAT_ENCODING"
)
_PLACEMENTS = "Shard Replicate Partial _Partial _StridedShard"
_NUMPY_ARRAYS = "_reconstruct scalar"
_NUMPY_SCALARS = (
    "bool bool_ int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 longdouble complex64 "
    "complex128 str_ bytes_ void datetime64 timedelta64"
)
_OMEGACONF_NODES = (
    "AnyNode BooleanNode BytesNode EnumNode FloatNode IntegerNode InterpolationResultNode PathNode StringNode"
)
_HF_DEEPSPEED = "HfDeepSpeedConfig HfTrainerDeepSpeedConfig"
_SCHEDULERS = (
    "LRScheduler _LRScheduler LambdaLR MultiplicativeLR StepLR MultiStepLR ConstantLR LinearLR ExponentialLR "
    "SequentialLR PolynomialLR CosineAnnealingLR ChainedScheduler ReduceLROnPlateau CyclicLR OneCycleLR "
    "CosineAnnealingWarmRestarts"
)

_CALLED = {
    "builtins": "Ellipsis NotImplemented bool bytes complex dict float frozenset int list object range set "
    "slice str tuple unicode long xrange",
    "collections": "Counter OrderedDict defaultdict deque",
    "argparse": "Namespace",
    "types": "SimpleNamespace",
    "typing": "Any",
    "datetime": "date datetime time timedelta timezone",
    "decimal": "Decimal",
    "fractions": "Fraction",
    "uuid": "UUID SafeUUID",
    "random": "Random",
    "signal": "Handlers SIGHUP SIGINT SIGTERM SIGUSR1 SIGUSR2 Signals",
    "io": "BytesIO StringIO",
    "_io": "BytesIO StringIO",
    "pathlib": "Path PosixPath WindowsPath PurePath PurePosixPath PureWindowsPath",
    "pathlib._local": "Path PosixPath WindowsPath PurePath PurePosixPath PureWindowsPath",
    "torch": f"{_STORAGES} {_TENSORS} {_DTYPES} {_QSCHEMES} per_channel_affine_float_qparams Size Tensor device "
    "strided sparse_coo contiguous_format preserve_format channels_last channels_last_3d",
    "torch.cuda": f"{_STORAGES} {_TENSORS}",
    "torch.sparse": _TENSORS,
    "torch.cuda.sparse": _TENSORS,
    "torch._C": "device dtype layout memory_format",
    "torch.storage": "TypedStorage UntypedStorage _TypedStorage _UntypedStorage",
    "torch.nn.parameter": "Buffer Parameter UninitializedBuffer UninitializedParameter",
    "torch.serialization": "_get_layout",
    "torch._utils": "_rebuild_tensor _rebuild_tensor_v2 _rebuild_tensor_v3 _rebuild_parameter "
    "_rebuild_qtensor _rebuild_sparse_tensor _rebuild_sparse_csr_tensor "
    "_rebuild_nested_tensor _rebuild_wrapper_subclass _rebuild_meta_tensor_no_storage "
    "_rebuild_device_tensor_from_numpy _rebuild_device_tensor_from_cpu_tensor _rebuild_xla_tensor",
    "torch.jit._pickle": "build_intlist build_tensorlist build_doublelist build_boollist restore_type_tag",
    "torch.distributed.checkpoint.metadata": _DCP_METADATA,
    "torch.distributed.checkpoint.planner": "BytesIOWriteData SavePlan TensorWriteData WriteItem WriteItemType",
    "torch.distributed._shard.checkpoint.metadata": _DCP_METADATA,
    "torch.distributed.checkpoint.filesystem": "_StorageInfo _StoragePrefix",
    "torch.distributed._shard.checkpoint.filesystem": "_StorageInfo",
    "torch.distributed._shard.metadata": "ShardMetadata",
    "torch.distributed._shard.sharded_tensor.metadata": "MEM_FORMAT_ENCODING ShardedTensorMetadata TensorProperties",
    "torch.distributed._shard.sharded_tensor.shard": "Shard",
    "torch.distributed._shard.sharding_spec.api": "EnumerableShardingSpec",
    "torch.distributed._shard.sharding_spec.chunk_sharding_spec": "ChunkShardingSpec",
    "torch.distributed.remote_device": "_remote_device",
    "torch.distributed._mesh_layout": "_FlatLayout _MeshLayout",
    "torch.distributed.tensor._dtensor_spec": "DTensorSpec ShardOrderEntry TensorMeta",
    "torch.distributed.tensor.placement_types": _PLACEMENTS,
    "torch.distributed._tensor.placement_types": f"{_PLACEMENTS} DTensorSpec TensorMeta",
    "numpy": f"{_NUMPY_SCALARS} dtype ndarray",
    "numpy.core.multiarray": _NUMPY_ARRAYS,
    "numpy._core.multiarray": _NUMPY_ARRAYS,
    "numpy.core.numeric": "_frombuffer",
    "numpy._core.numeric": "_frombuffer",
    "numpy.random._pickle": "__randomstate_ctor __generator_ctor __bit_generator_ctor",
    "numpy.random.bit_generator": "SeedSequence __pyx_unpickle_SeedSequence",
    "numpy.random._mt19937": "MT19937",
    "numpy.random._pcg64": "PCG64 PCG64DXSM",
    "numpy.random._philox": "Philox",
    "numpy.random._sfc64": "SFC64",
    "deepspeed.runtime.zero.config": "ZeroStageEnum",
    "deepspeed.runtime.zero.offload_config": "OffloadDeviceEnum",
    "deepspeed.utils.tensor_fragment": "fragment_address",
    "deepspeed.checkpoint.universal_checkpoint": "SubparamShape",
    "transformers.training_args": "OptimizerNames ParallelMode",
    "transformers.trainer_utils": "EvaluationStrategy FSDPOption HubStrategy IntervalStrategy SaveStrategy "
    "SchedulerType ShardedDDPOption",
    "transformers.debug_utils": "DebugOption",
    "accelerate.utils.dataclasses": "DistributedType",
    "megatron.core.enums": "ModelType",
    "megatron.model.enums": "AttnMaskType AttnType LayerType ModelType PositionEmbeddingType",
    "megatron.core.transformer.enums": "AttnBackend AttnMaskType AttnType LayerType ModelType",
}

_MADE = {
    "torch.optim.lr_scheduler": _SCHEDULERS,
    "torch.amp.grad_scaler": "GradScaler OptState",
    "torch.cuda.amp.grad_scaler": "GradScaler OptState",
    "torch.distributed._shard.sharded_tensor.api": "ShardedTensor",
    "torch.distributed.device_mesh": "DeviceMesh",
    "torch.distributed.tensor": "DTensor",
    "torch.distributed.tensor._api": "DTensor",
    "torch.distributed._tensor": "DTensor",
    "torch.distributed._tensor.api": "DTensor",
    "torch.distributed._tensor.device_mesh": "DeviceMesh",
    "deepspeed.runtime.fp16.loss_scaler": "LossScaler DynamicLossScaler",
    "deepspeed.pt.loss_scaler": "LossScaler DynamicLossScaler",
    "transformers.training_args_seq2seq": "Seq2SeqTrainingArguments",
    "transformers.trainer_pt_utils": "AcceleratorConfig",
    "transformers.integrations.deepspeed": _HF_DEEPSPEED,
    "transformers.deepspeed": _HF_DEEPSPEED,
    "accelerate.state": "AcceleratorState PartialState",
    "lightning.fabric.utilities.data": "AttributeDict",
    "lightning_fabric.utilities.data": "AttributeDict",
    "pytorch_lightning.utilities.parsing": "AttributeDict",
    "lightning.pytorch.utilities.parsing": "AttributeDict",
    "omegaconf.dictconfig": "DictConfig",
    "omegaconf.listconfig": "ListConfig",
    "omegaconf.base": "ContainerMetadata Metadata",
    "omegaconf.nodes": _OMEGACONF_NODES,
    "megatron.core.dist_checkpointing.strategies.torch": "MCoreMetadata MCoreSavePlan",
    "megatron.core.rerun_state_machine": "RerunDiagnostic RerunMode RerunState",
    "transformers.training_args": "TrainingArguments",
    "accelerate.utils.dataclasses": "DeepSpeedPlugin FullyShardedDataParallelPlugin",
}

_JUDGED = {
    "_codecs": "encode",
    "builtins": "bytearray getattr",
    "copyreg": "_reconstructor __newobj__ __newobj_ex__",
    "torch._tensor": "_rebuild_from_type _rebuild_from_type_v2",
    "torch._utils": "_rebuild_parameter_with_state",
    "torch.storage": "_load_from_bytes",
}


def _by_module(table: Mapping[str, str]) -> Mapping[str, frozenset[str]]:
    return {module: frozenset(names.split()) for module, names in table.items()}


HARMLESS: Mapping[str, frozenset[str]] = _by_module(_CALLED)
"""What may be called, by module."""

ONLY_MADE: Mapping[str, frozenset[str]] = _by_module(_MADE)
"""Classes of which objects may be made and given a state, by module."""

JUDGED: Mapping[str, frozenset[str]] = _by_module(_JUDGED)
"""What may be called with some arguments, by module: ``judging`` has a rule for each."""


def may_be_called(module: str, name: str) -> bool:
    return name in HARMLESS.get(module, ())


def may_be_named(module: str, name: str) -> bool:
    return any(name in table.get(module, ()) for table in (HARMLESS, ONLY_MADE, JUDGED))

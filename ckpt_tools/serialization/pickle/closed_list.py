"""The closed list: every name that a pickle of a proven file may hold, and all that it may do with it.

"Harmless with any arguments" does not exist: a constructor may call what it is given, a function may hand it back, and
an attribute may be a hook. So each name stands here with the arguments and the state that genuine checkpoints have,
collected from those that torch, DeepSpeed, transformers, accelerate, Lightning, Megatron, omegaconf, numpy and the
standard library wrote. Names are exact: through a dotted one every imported module can be reached.

A name that is only listed may stand in a pickle, as the type of a storage or a dtype does. It may be called only if
``call`` has arguments for it, made by ``__new__`` only if ``new`` has, and given a state only if ``state`` has a shape
for it. Names of ``allowed_calls`` and ``dcp_metadata`` are interpreted: their functions check their arguments.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from ckpt_tools.core.values import Opaque, OrderedDict
from ckpt_tools.serialization.pickle.allowed_calls import ALLOWED_CALLS, CALL_DESCRIPTIONS
from ckpt_tools.serialization.pickle.dcp_metadata import RECORD_CLASSES
from ckpt_tools.serialization.pickle.machine import TensorAttributes
from ckpt_tools.serialization.pickle.numpy_rules import DTYPE, is_consistent_dtype
from ckpt_tools.serialization.pickle.numpy_rules import RULES as NUMPY
from ckpt_tools.serialization.pickle.shapes import (
    A_NAME,
    AN_ENUM,
    ANY,
    ATTRIBUTES,
    BYTES,
    CONTAINER,
    ENUM,
    FLOAT,
    INT,
    ITS_ATTRIBUTES,
    NO_ARGUMENTS,
    NOTHING,
    PLAIN_ATTRIBUTES,
    STR,
    TENSOR,
    NameRule,
    attribute_rule,
    dict_of,
    fields,
    global_name,
    made_by,
    one_of,
    resolve_name,
    row,
    tuple_of,
)
from ckpt_tools.serialization.pickle.sharded_rules import RULES as SHARDED
from ckpt_tools.serialization.pickle.tensor_rules import RULES as TENSORS
from ckpt_tools.serialization.pickle.tensor_rules import TENSOR_ATTRIBUTES

# torch

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
_OPTIONAL_INT = INT | NOTHING


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
    *TENSORS,
    attribute_rule("torch.optim.lr_scheduler", _SCHEDULERS),
    attribute_rule("torch.amp.grad_scaler torch.cuda.amp.grad_scaler", "GradScaler"),
    NameRule("torch.amp.grad_scaler torch.cuda.amp.grad_scaler", "OptState", AN_ENUM, call=(ENUM,)),
    NameRule("torch.distributed.checkpoint.filesystem", "_StoragePrefix", ITS_ATTRIBUTES, new=(NO_ARGUMENTS,),
         state=fields(prefix=STR)),
    NameRule("torch.distributed.tensor torch.distributed.tensor._api torch.distributed._tensor "
         "torch.distributed._tensor.api", "DTensor", A_NAME),
    *SHARDED,
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


_RULES_BY_NAME: defaultdict[tuple[str, str], list[NameRule]] = defaultdict(list)
for _rule in RULES:
    for _key in _rule.keys:
        _RULES_BY_NAME[_key].append(_rule)

ALLOWED_FACTORIES = frozenset(
    {("builtins", each) for each in ["bool", "dict", "float", "frozenset", "int", "list", "set", "str", "tuple"]}
    | {("collections", each) for each in ["Counter", "OrderedDict", "deque"]}
)
"""Factories allowed in a defaultdict."""

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


@dataclass(frozen=True, slots=True)
class ClosedListEntry:
    """A line of the list, in words."""

    names: str
    allowed_uses: str
    reason: str


def iter_list_entries() -> Iterator[ClosedListEntry]:
    """The whole list in words, interpreted names first."""
    for (module, attribute), (arguments, reason) in CALL_DESCRIPTIONS.items():
        yield ClosedListEntry(f"{module}.{attribute}", arguments, reason)
    for module, attribute in RECORD_CLASSES:
        yield ClosedListEntry(f"{module}.{attribute}", "its fields, each of its type", "a record of a DCP, interpreted")
    for rule in RULES:
        for module in rule.modules.split():
            yield ClosedListEntry(f"{module}: {rule.names}", _describe_allowed_uses(rule), rule.reason)


def _describe_allowed_uses(rule: NameRule) -> str:
    parts = [f"call{shape.text if shape.text.startswith('(') else f'(*{shape.text})'}" for shape in rule.call]
    parts += [f"new{shape.text}" for shape in rule.new]
    parts += [f"state {rule.state.text}"] if rule.state else []
    parts += ["items"] if rule.has_items else []
    parts += ["items by key"] if rule.has_pairs else []
    return "; ".join(parts) or "stand as a value"

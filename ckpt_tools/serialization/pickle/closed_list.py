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
from ckpt_tools.serialization.pickle.allowed_calls import ARGUMENTS, CALLS
from ckpt_tools.serialization.pickle.dcp_metadata import CLASSES
from ckpt_tools.serialization.pickle.machine import SetState
from ckpt_tools.serialization.pickle.numpy_rules import DTYPE, agrees_with_itself
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
    Rule,
    fields,
    made_of,
    mapping,
    name,
    named,
    plain,
    row,
    several,
    words,
)
from ckpt_tools.serialization.pickle.sharded_rules import RULES as SHARDED
from ckpt_tools.serialization.pickle.tensor_rules import RULES as TENSORS
from ckpt_tools.serialization.pickle.tensor_rules import TENSOR_ATTRIBUTES

# torch

_LAYOUTS = words("torch.strided", "torch.sparse_coo", "torch.sparse_csr", "torch.sparse_csc", "torch.sparse_bsr",
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
_PATHS = "Path PosixPath WindowsPath PurePath PurePosixPath PureWindowsPath"
_OPTIONAL_INT = INT | NOTHING


RULES: tuple[Rule, ...] = (
    # Python
    Rule("builtins", "Ellipsis NotImplemented bool float int str object",
         "a name by itself: the type of a value, or the factory of a defaultdict"),
    Rule("builtins", "dict list tuple", "the same, or a container of plain data", call=(row(), row(CONTAINER))),
    Rule("builtins", "object", "an object without anything", new=(NO_ARGUMENTS,)),
    Rule("builtins", "range", "three numbers", call=(row(INT, INT, INT),)),
    Rule("builtins", "slice", "three numbers", call=(row(_OPTIONAL_INT, _OPTIONAL_INT, _OPTIONAL_INT),)),
    Rule("builtins", "type", "the type of None", call=(row(NOTHING),)),
    Rule("builtins", "getattr", "OneCycleLR of torch before 2.4 kept its annealing function",
         call=(row(name("torch.optim.lr_scheduler.OneCycleLR"), words("_annealing_cos", "_annealing_linear")),)),
    Rule("torch.optim.lr_scheduler", "OneCycleLR._annealing_cos OneCycleLR._annealing_linear",
         "the same from protocol 4 on: two functions of torch, by their exact names"),
    Rule("typing", "Any", "a name by itself: the type of a node of omegaconf"),
    Rule("collections", "Counter", "counts of a plain dict", call=(row(mapping(ANY, INT)), row(CONTAINER))),
    Rule("collections", "deque", "an empty deque that is appended to", call=(row(), row(row(), INT)), has_items=True),
    plain("argparse", "Namespace"),
    Rule("types", "SimpleNamespace", ITS_ATTRIBUTES, call=(NO_ARGUMENTS,), state=ATTRIBUTES),
    Rule("datetime", "date", "four bytes", call=(row(BYTES),)),
    Rule("datetime", "datetime time", "ten bytes or six, and a fixed time zone",
         call=(row(BYTES), row(BYTES, made_of("datetime.timezone")))),
    Rule("datetime", "timedelta", "three numbers", call=(row(INT, INT, INT),)),
    Rule("datetime", "timezone", "a fixed difference",
         call=(row(made_of("datetime.timedelta")), row(made_of("datetime.timedelta"), STR))),
    Rule("decimal", "Decimal", "digits", call=(row(STR),)),
    Rule("fractions", "Fraction", "two numbers, or digits", call=(row(INT, INT), row(STR))),
    Rule("uuid", "UUID", "a number", new=(NO_ARGUMENTS,), state=fields(int=INT, is_safe=_OPTIONAL_INT)),
    Rule("uuid", "SafeUUID", AN_ENUM, call=(row(_OPTIONAL_INT),)),
    Rule("random", "Random", "a random generator and its numbers", call=(NO_ARGUMENTS,),
         state=row(INT, several(INT), FLOAT | NOTHING)),
    Rule("signal", "Handlers Signals", AN_ENUM, call=(ENUM,)),
    Rule("signal", "SIGHUP SIGINT SIGTERM SIGUSR1 SIGUSR2", "a constant"),
    Rule("io _io", "BytesIO", "bytes and a position", new=(NO_ARGUMENTS,), state=row(BYTES, INT, NOTHING)),
    Rule("io _io", "StringIO", "a text and a position", new=(NO_ARGUMENTS,), state=row(STR, STR, INT, NOTHING)),
    Rule("pathlib pathlib._local", _PATHS, "parts of a path, which is not opened", call=(several(STR),)),
    # torch
    Rule("torch", f"{_STORAGES} {_TENSORS} {_DTYPES} {_QSCHEMES} Tensor strided sparse_coo contiguous_format "
         "preserve_format channels_last channels_last_3d", A_NAME),
    Rule("torch.cuda", f"{_STORAGES} {_TENSORS}", A_NAME),
    Rule("torch.sparse torch.cuda.sparse", _TENSORS, A_NAME),
    Rule("torch._C", "device dtype layout memory_format", A_NAME),
    Rule("torch.storage", "TypedStorage UntypedStorage _TypedStorage _UntypedStorage", A_NAME),
    Rule("torch.nn.parameter", "Buffer Parameter UninitializedBuffer UninitializedParameter", A_NAME),
    Rule("torch", "device", "a kind of device and its number", call=(row(STR), row(STR, INT))),
    Rule("torch.serialization", "_get_layout", "looks a layout up", call=(row(_LAYOUTS),)),
    Rule("torch.distributed.checkpoint.metadata torch.distributed._shard.checkpoint.metadata", "_MEM_FORMAT_ENCODING",
         AN_ENUM, call=(ENUM,)),
    Rule("torch.distributed._shard.sharded_tensor.metadata", "MEM_FORMAT_ENCODING", AN_ENUM, call=(ENUM,)),
    Rule("torch._C", "Generator", "a random generator of one device, with its seed and its state",
         call=(row(made_of("torch.device")),), state=row(INT, _OPTIONAL_INT, TENSOR)),
    Rule("torch.torch_version", "TorchVersion", "a text", new=(row(STR),)),
    *TENSORS,
    plain("torch.optim.lr_scheduler", _SCHEDULERS),
    plain("torch.amp.grad_scaler torch.cuda.amp.grad_scaler", "GradScaler"),
    Rule("torch.amp.grad_scaler torch.cuda.amp.grad_scaler", "OptState", AN_ENUM, call=(ENUM,)),
    Rule("torch.distributed.checkpoint.filesystem", "_StoragePrefix", ITS_ATTRIBUTES, new=(NO_ARGUMENTS,),
         state=fields(prefix=STR)),
    Rule("torch.distributed.tensor torch.distributed.tensor._api torch.distributed._tensor "
         "torch.distributed._tensor.api", "DTensor", A_NAME),
    *SHARDED,
    *NUMPY,
    # Training libraries
    Rule("deepspeed.runtime.zero.config", "ZeroStageEnum", AN_ENUM, call=(ENUM,)),
    Rule("deepspeed.runtime.zero.offload_config", "OffloadDeviceEnum", AN_ENUM, call=(ENUM,)),
    Rule("deepspeed.utils.tensor_fragment", "fragment_address", ITS_ATTRIBUTES, new=(NO_ARGUMENTS,),
         state=fields(numel=INT, start=INT)),
    plain("deepspeed.checkpoint.universal_checkpoint", "SubparamShape"),
    Rule("deepspeed.runtime.fp16.loss_scaler deepspeed.pt.loss_scaler", "LossScaler DynamicLossScaler",
         ITS_ATTRIBUTES, new=(NO_ARGUMENTS,), state=PLAIN_ATTRIBUTES),
    Rule("transformers.training_args", "OptimizerNames ParallelMode", AN_ENUM, call=(ENUM,)),
    Rule("transformers.trainer_utils", "EvaluationStrategy FSDPOption HubStrategy IntervalStrategy SaveStrategy "
         "SchedulerType ShardedDDPOption", AN_ENUM, call=(ENUM,)),
    Rule("transformers.debug_utils", "DebugOption", AN_ENUM, call=(ENUM,)),
    plain("transformers.training_args", "TrainingArguments"),
    plain("transformers.training_args_seq2seq", "Seq2SeqTrainingArguments"),
    plain("transformers.trainer_pt_utils", "AcceleratorConfig"),
    plain("transformers.integrations.deepspeed transformers.deepspeed", _HF_DEEPSPEED),
    Rule("accelerate.utils.dataclasses", "DistributedType", AN_ENUM, call=(ENUM,)),
    plain("accelerate.utils.dataclasses", "DeepSpeedPlugin FullyShardedDataParallelPlugin"),
    plain("accelerate.state", "AcceleratorState PartialState"),
    Rule("lightning.fabric.utilities.data lightning_fabric.utilities.data lightning.pytorch.utilities.parsing "
         "pytorch_lightning.utilities.parsing", "AttributeDict", "a dict; its items are set by key",
         new=(NO_ARGUMENTS,), has_pairs=True, state=fields()),
    plain("omegaconf.dictconfig", "DictConfig"),
    plain("omegaconf.listconfig", "ListConfig"),
    plain("omegaconf.base", "ContainerMetadata Metadata"),
    plain("omegaconf.nodes", _OMEGACONF_NODES),
    Rule("megatron.core.rerun_state_machine", "RerunDiagnostic RerunMode RerunState", AN_ENUM, call=(ENUM,)),
    Rule("megatron.core.enums", "ModelType", AN_ENUM, call=(ENUM,)),
    Rule("megatron.model.enums megatron.core.transformer.enums",
         "AttnBackend AttnMaskType AttnType LayerType ModelType PositionEmbeddingType", AN_ENUM, call=(ENUM,)),
)  # fmt: skip
"""The list. ``docs/scanning_list.md`` shows it, and a test compares the two."""


_BY_NAME: defaultdict[tuple[str, str], list[Rule]] = defaultdict(list)
for _rule in RULES:
    for _key in _rule.keys:
        _BY_NAME[_key].append(_rule)

FACTORIES = frozenset(
    {("builtins", each) for each in ["bool", "dict", "float", "frozenset", "int", "list", "set", "str", "tuple"]}
    | {("collections", each) for each in ["Counter", "OrderedDict", "deque"]}
)
"""Factories allowed in a defaultdict."""

_WRAPPERS = frozenset({"torch.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer"})


def is_listed(module: str, attribute: str) -> bool:
    """True if a pickle may hold the name at all."""
    key = (module, attribute)
    return key in _BY_NAME or key in CALLS or key in CLASSES


def refusal(made: Opaque | SetState) -> str | None:
    """Why an object is not one that the list knows; None if it is."""
    if isinstance(made, SetState):
        # torch sets the attributes of a tensor by ``setattr``: numbers and strings there call nothing.
        if str(made.ref) not in _WRAPPERS:
            return f"it makes a tensor a {made.ref}"
        is_empty = made.state is None or (type(made.state) in (dict, OrderedDict) and not made.state)
        is_plain = is_empty or TENSOR_ATTRIBUTES.accepts(made.state)
        return None if is_plain else "it gives a tensor attributes that are objects"
    ref = named(made.ref)
    if ref is None:
        return "it calls what another call gave"
    rules = _BY_NAME.get((ref.module, ref.name), ())
    if not rules and not is_listed(ref.module, ref.name):
        return f"it calls {ref}"
    if any(_fits(rule, made) for rule in rules) and (ref != DTYPE or agrees_with_itself(made)):
        return None
    return f"it uses {ref} as no checkpoint does"


def _fits(rule: Rule, made: Opaque) -> bool:
    shapes = rule.call if made.form == "call" else rule.new
    return (
        any(shape.accepts(made.args) for shape in shapes)
        and not made.kwargs
        and (made.state is None or (rule.state is not None and rule.state.accepts(made.state)))
        and (rule.has_items or not made.items)
        and (rule.has_pairs or not made.pairs)
    )


@dataclass(frozen=True, slots=True)
class Entry:
    """A line of the list, in words."""

    names: str
    may: str
    reason: str


def entries() -> Iterator[Entry]:
    """The whole list in words, interpreted names first."""
    for (module, attribute), (arguments, reason) in ARGUMENTS.items():
        yield Entry(f"{module}.{attribute}", arguments, reason)
    for module, attribute in CLASSES:
        yield Entry(f"{module}.{attribute}", "its fields, each of its type", "a record of a DCP, interpreted")
    for rule in RULES:
        for module in rule.modules.split():
            yield Entry(f"{module}: {rule.names}", _may(rule), rule.reason)


def _may(rule: Rule) -> str:
    parts = [f"call{shape.text if shape.text.startswith('(') else f'(*{shape.text})'}" for shape in rule.call]
    parts += [f"new{shape.text}" for shape in rule.new]
    parts += [f"state {rule.state.text}"] if rule.state else []
    parts += ["items"] if rule.has_items else []
    parts += ["items by key"] if rule.has_pairs else []
    return "; ".join(parts) or "stand as a value"

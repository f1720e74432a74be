"""The two kinds of DeepSpeed files as checked values: model states and a rank's optimizer states.

Every key that decides where bytes are is read here, once, with its type checked; nothing after this module meets a
raw dictionary of a checkpoint. deepspeed/runtime/engine.py ``_common_checkpoint_state`` and ``_save_zero_checkpoint``;
stage_1_and_2.py, bf16_optimizer.py and stage3.py ``state_dict``.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, TypeVar

from ckpt_tools.core.boxes import Shape
from ckpt_tools.core.dtypes import decode_number
from ckpt_tools.core.manifest import MASTER, WEIGHT
from ckpt_tools.core.names import strip_wrapper_parts
from ckpt_tools.core.shards import ShardTable
from ckpt_tools.core.step_claims import StepClaim, make_rank_claims
from ckpt_tools.core.values import INT64_MAX, Opaque, StoredTensor, Value, are_naturals, describe_kind, format_brief
from ckpt_tools.errors import MalformedError, UnsupportedError
from ckpt_tools.formats.state_dict.leaf import TensorLeaf
from ckpt_tools.serialization.torch_archive import TorchArchive
from ckpt_tools.serialization.torch_zip import open_archive
from ckpt_tools.stores.source import Source

Kind = TypeVar("Kind")

MAX_PADDING = 1 << 48
"""Elements, a petabyte of them: sums over ten thousand ranks stay 64-bit numbers."""


@dataclass(frozen=True, slots=True)
class File:
    """An opened file: its dictionary, and where the tensors in it have their bytes."""

    path: str
    content: Mapping[str, Value]
    archive: TorchArchive = field(repr=False)

    @classmethod
    def open(cls, source: Source, path: str) -> File:
        """Raises FormatError where ``path`` is missing, damaged, or holds no dictionary."""
        archive = open_archive(lambda start, stop: source.read(path, start, stop), source.size(path), path)
        if not isinstance(archive.value, dict):
            raise MalformedError("it does not contain a dictionary, as DeepSpeed's files do", path=path)
        archive.check_rank()
        return cls(path, archive.value, archive)

    def start(self, tensor: StoredTensor) -> int:
        """The byte of element 0 of ``tensor``; opening the archive has checked that it holds them all."""
        return storage_start(self.archive, tensor) + tensor.storage_offset * tensor.dtype.item_bytes

    def number(self, source: Source, value: Value) -> Any:
        """The number that a 0-d tensor holds; any other value as it is."""
        if not isinstance(value, StoredTensor) or value.shape or value.dtype.num_values > 1:
            return value
        start = self.start(value)
        return decode_number(source.read(self.path, start, start + value.dtype.item_bytes), value.dtype)

    def table(self, tensor: StoredTensor) -> ShardTable:
        return TensorLeaf.of(tensor, self.path, storage_start(self.archive, tensor)).shards

    def get(self, name: str, kind: type[Kind]) -> Kind:
        return checked(self.content, name, kind, self.path)


def storage_start(archive: TorchArchive, tensor: StoredTensor) -> int:
    """The byte at which the storage of ``tensor`` starts; 0 for a tensor without elements."""
    if not tensor.numel:
        return 0
    if tensor.storage is None:
        raise MalformedError("the tensor is on the meta device and has no elements", path=archive.path)
    return archive.locate_storage(tensor.storage.key)[0]


def checked(content: Mapping[str, Value], name: str, kind: type[Kind], path: str) -> Kind:
    """``content[name]``. Raises MalformedError where it is missing or of another kind."""
    if name not in content:
        raise MalformedError(f"it has no {name!r}, which DeepSpeed saves", path=path, key=name)
    value = content[name]
    if not isinstance(value, kind):
        raise MalformedError(f"its {name!r} is a {describe_kind(value)}", path=path, key=name)
    return value


@dataclass(frozen=True, slots=True)
class ModelStates:
    """Parameters and buffers as a model file describes them.

    ``module`` is the model's state dict, in its own order. ``param_shapes`` has one mapping a param group (stages 1, 2)
    or a sub-group (3); ``ties`` maps aliases to owners as DeepSpeed saw them. ``homes`` has the files of values that
    are in a file of a layer or an expert.
    """

    file: File
    module: Mapping[str, Value]
    buffers: frozenset[str]
    param_shapes: tuple[Mapping[str, Shape], ...]
    frozen_shapes: Mapping[str, Shape]
    frozen_fragments: Mapping[str, StoredTensor]
    ties: Mapping[str, str]
    homes: Mapping[str, File] = field(default_factory=dict)

    @classmethod
    def of(cls, file: File) -> ModelStates:
        if "param_shapes" not in file.content or "buffer_names" not in file.content:
            raise UnsupportedError(
                "it has no param_shapes and buffer_names: it is not of ZeRO, or it is older than DeepSpeed 0.4",
                path=file.path,
            )
        if file.content["param_shapes"] is None:
            raise UnsupportedError(
                "it was saved without ZeRO (stage 0), but there is a file of ZeRO's optimizer beside it", path=file.path
            )
        return cls._of(file, _module(file), _param_shapes(file))

    @classmethod
    def without_zero(cls, file: File) -> ModelStates:
        """The model of stage 0, where no file says which parameters train."""
        return cls._of(file, _module(file), ())

    @classmethod
    def of_stage(cls, file: File) -> ModelStates:
        """A stage of a pipeline: everything except ``module``, which the files of layers hold."""
        return cls._of(file, {}, () if file.content.get("param_shapes") is None else _param_shapes(file))

    @classmethod
    def _of(cls, file: File, module: Mapping[str, Value], param_shapes: tuple[Mapping[str, Shape], ...]) -> ModelStates:
        ties, buffers = _optional(file, "shared_params"), _strings(file.get("buffer_names", list), file.path)
        _strings([*ties, *ties.values()], file.path)
        frozen_shapes = _shapes(_optional(file, "frozen_param_shapes"), file.path)
        in_module = _NamesInModule(module, {*buffers, *ties, *frozen_shapes}.union(*param_shapes))
        return cls(
            file=file,
            module=module,
            buffers=frozenset(map(in_module, buffers)),
            param_shapes=tuple(map(in_module.keys_of, param_shapes)),
            frozen_shapes=in_module.keys_of(frozen_shapes),
            frozen_fragments=in_module.keys_of(_tensors(_optional(file, "frozen_param_fragments"), file.path)),
            ties={in_module(alias): in_module(owner) for alias, owner in ties.items()},
        )

    @property
    def step(self) -> int | None:
        found = self.file.content.get("global_steps")
        return found if type(found) is int else None

    @property
    def trainable(self) -> dict[str, Shape]:
        return {name: shape for group in self.param_shapes for name, shape in group.items()}

    def home(self, name: str) -> File:
        return self.homes.get(name, self.file)


def model_claims(file: File) -> list[StepClaim]:
    """Claims of a model file: every rank has the counters of the engine and the state of the scheduler."""
    scheduler = file.content.get("lr_scheduler")
    values = {**(scheduler if isinstance(scheduler, dict) else {}), **file.content}
    counters = ("global_steps", "global_samples", "skipped_steps", "iteration", "last_epoch", "last_batch_iteration")
    return make_rank_claims(file.path, values, counters)


class _NamesInModule:
    """Names of parameters and buffers as ``module`` has them: a state dict leaves out parts that wrappers put into
    names, and a hook of the model may put a prefix before some. A prefix is believed where it fits one name alone, the
    longest names first: ``norm.bias`` is the end of a layer's name too."""

    def __init__(self, module: Mapping[str, Value], names: Collection[str]) -> None:
        bare = {strip_wrapper_parts(key): key for key in module}
        self.keys = {name: name if name in module else bare.get(strip_wrapper_parts(name), name) for name in names}
        lost = {name: strip_wrapper_parts(name) for name, key in self.keys.items() if key not in module}
        depths, wanted = {name.count(".") + 1 for name in lost.values()}, {*lost.values()}

        def ends_of(key: str) -> set[str]:
            parts = key.split(".")
            return wanted & {".".join(parts[-depth:]) for depth in depths if depth < len(parts)}

        fitting: defaultdict[str, set[str]] = defaultdict(set)
        for key in module.keys() - self.keys.values():
            for end in ends_of(key):
                fitting[end].add(key)
        for name, end in sorted(lost.items(), key=lambda item: -item[1].count(".")):
            if len(fitting[end]) == 1:
                (self.keys[name],) = fitting[end]
                for other in ends_of(self.keys[name]):
                    fitting[other].discard(self.keys[name])

    def __call__(self, name: str) -> str:
        return self.keys.get(name, name)

    def keys_of(self, values: Mapping[str, Kind]) -> Mapping[str, Kind]:
        return {self(name): value for name, value in values.items()}


def _module(file: File) -> Mapping[str, Value]:
    """The model's state dict. The parts of a pipeline are layers, and no rule of tensor parallelism is for them."""
    if stages_of(file) > 1:
        raise UnsupportedError(
            "it is of a pipeline-parallel run, and there are no files of layers (layer_00-model_states.pt) beside it",
            path=file.path,
        )
    return _named(file.get("module", dict), file.path)


def stages_of(file: File) -> int:
    parallel = file.content.get("checkpoint_parallel_dimensions")
    stages = parallel.get("pp_degree") if isinstance(parallel, dict) else None
    return stages if type(stages) is int else 1


def _named(found: Mapping[Value, Value], path: str) -> Mapping[str, Value]:
    _strings(list(found), path)
    return found


def _strings(found: Sequence[Value], path: str) -> Sequence[str]:
    for name in found:
        if not isinstance(name, str):
            raise MalformedError(f"expected a name, found a {describe_kind(name)}", path=path)
    return found


def _param_shapes(file: File) -> tuple[Mapping[str, Shape], ...]:
    """Older versions write one dictionary where newer ones write a list of them."""
    found = file.content["param_shapes"]
    groups = found if isinstance(found, list) else [found]
    shapes = tuple(_shapes(group, file.path) for group in groups)
    counts = Counter(name for group in shapes for name in group)
    if twice := next((name for name, count in counts.items() if count > 1), None):
        raise MalformedError("param_shapes lists it in two groups", path=file.path, key=twice)
    return shapes


def _shapes(found: Value, path: str) -> Mapping[str, Shape]:
    """Name to shape; a shape is a ``torch.Size`` or a plain tuple."""
    if not isinstance(found, dict):
        raise MalformedError("its shapes are not a dictionary by name", path=path)
    for name, shape in _named(found, path).items():
        if not are_naturals(shape) or prod(max(extent, 1) for extent in shape) > INT64_MAX:
            raise MalformedError(f"its shape is {format_brief(shape)}", path=path, key=name)
    return {name: tuple(shape) for name, shape in found.items()}


def _optional(file: File, name: str) -> Mapping[Value, Value]:
    """A dictionary that may be None, and that old versions leave out."""
    found = file.content.get(name)
    if found is not None and not isinstance(found, dict):
        raise MalformedError(f"its {name!r} is a {describe_kind(found)}", path=file.path, key=name)
    return found or {}


def _tensors(found: Mapping[Value, Value], path: str) -> Mapping[str, StoredTensor]:
    for name, value in _named(found, path).items():
        if not isinstance(value, StoredTensor):
            raise MalformedError("its fragment is not a tensor", path=path, key=name)
    return found


@dataclass(frozen=True, slots=True)
class OptimStates:
    """A rank's optimizer file.

    ``masters`` are its flats in order: one a param group (stages 1, 2) or a sub-group (3). ``states`` has the
    optimizer's state of each, ``paddings`` the elements its slots may have more than the masters (none for
    BF16_Optimizer, which trims nothing and counts its padding otherwise). ``partition_counts`` say over how many ranks
    each is cut. ``groups`` are the param groups: their hyperparameters, and which flats they have.
    """

    file: File
    own: Mapping[str, Value]
    stage: int
    is_bf16_optimizer: bool
    partition_counts: tuple[int, ...]
    masters: tuple[StoredTensor, ...]
    states: tuple[Mapping[str, Value], ...]
    paddings: tuple[int, ...]
    groups: tuple[OptimGroup, ...]
    alignment_paddings: tuple[tuple[int, ...], ...] | None

    @classmethod
    def of(cls, file: File) -> OptimStates:
        own = file.get("optimizer_state_dict", dict)
        stage = _stage(own, file.path)
        name = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
        masters = _flat_tensors(checked(own, name, list, file.path), name, file.path)
        states, groups = _optimizer(own, stage, len(masters), file.path)
        return cls(
            file=file,
            own=own,
            stage=stage,
            is_bf16_optimizer="zero_stage" not in own,
            partition_counts=_partition_counts(own, len(masters), file.path),
            masters=masters,
            states=states,
            paddings=_paddings(own, len(masters), file.path) if "zero_stage" in own else (0,) * len(masters),
            groups=groups,
            alignment_paddings=_alignment_paddings(own, len(masters), file.path),
        )

    @property
    def world_size(self) -> int:
        """The ranks that partition the optimizer; those of experts are cut over some of them."""
        return max(self.partition_counts)


@dataclass(frozen=True, slots=True)
class OptimGroup:
    """A param group as the optimizer saved it: numbers of its flats, and its hyperparameters."""

    flats: tuple[int, ...]
    options: Mapping[str, Value]


def _stage(own: Mapping[str, Value], path: str) -> int:
    """1, 2 or 3; BF16_Optimizer, which is a stage 1, does not state it."""
    if "zero_stage" not in own:
        if "single_partition_of_fp32_groups" not in own:
            raise UnsupportedError("it does not contain ZeRO optimizer state", path=path)
        return 1
    found = own["zero_stage"]
    stage = found.args[0] if isinstance(found, Opaque) and len(found.args) == 1 else found
    if type(stage) is not int or stage not in (1, 2, 3):
        raise UnsupportedError(
            f"its ZeRO stage is {format_brief(stage)}; only stages 1, 2 and 3 are supported", path=path
        )
    return stage


def _partition_counts(own: Mapping[str, Value], num_flats: int, path: str) -> tuple[int, ...]:
    """``partition_count``: a number, or one a param group. Experts are cut into fewer partitions than the rest."""
    found = own.get("partition_count")
    counts: list[Any] = found if isinstance(found, list) and found else [found] * max(1, num_flats)
    if not all(type(count) is int and count > 0 for count in counts):
        raise MalformedError(f"its partition_count is {format_brief(found)}", path=path, key="partition_count")
    return tuple(counts)


def _flat_tensors(found: list[Value], name: str, path: str) -> tuple[StoredTensor, ...]:
    for value in found:
        if not isinstance(value, StoredTensor) or len(value.shape) != 1 or not value.is_contiguous:
            raise MalformedError(f"{name} contains something other than flat tensors", path=path, key=name)
    return tuple(found)


def _paddings(own: Mapping[str, Value], num_flats: int, path: str) -> tuple[int, ...]:
    found = own.get("group_paddings") or [0] * num_flats
    if not are_naturals(found, num_flats) or len(found) != num_flats or max(found, default=0) > MAX_PADDING:
        raise MalformedError(f"its group_paddings are not {num_flats} numbers", path=path, key="group_paddings")
    return tuple(found)


def _alignment_paddings(own: Mapping[str, Value], num_flats: int, path: str) -> tuple[tuple[int, ...], ...] | None:
    """Zeros after each parameter of a group; since 0.19.7, stages 1 and 2."""
    found = own.get("param_alignment_paddings")
    if found is None:
        return None
    if not isinstance(found, list) or len(found) != num_flats or not all(are_naturals(group, None) for group in found):
        raise MalformedError("they are not a list of numbers for each group", path=path, key="param_alignment_paddings")
    return tuple(tuple(group) for group in found)


def _optimizer(
    own: Mapping[str, Value], stage: int, num_flats: int, path: str
) -> tuple[tuple[Mapping[str, Value], ...], tuple[OptimGroup, ...]]:
    """The state of each flat, and the param groups."""
    name = "optimizer_state_dict" if stage == 3 else "base_optimizer_state"
    found = own.get(name)
    if isinstance(found, list):  # An elastic checkpoint has the states alone, and one step for all.
        if len(found) != num_flats:
            message = f"{len(found)} states, but {num_flats} param groups"
            raise MalformedError(message, path=path, key=name)
        step = own.get("base_optimizer_state_step")
        options = {} if step is None else {"step": step}
        return tuple(_slots(state, path) for state in found), tuple(OptimGroup((i,), options) for i in range(num_flats))
    if not isinstance(found, dict):
        raise MalformedError(f"it has no {name!r}", path=path, key=name)
    groups = _groups(checked(found, "param_groups", list, path), num_flats, path)
    state = checked(found, "state", dict, path)
    return tuple(_slots(state.get(flat), path) for flat in range(num_flats)), groups


def _slots(found: Value, path: str) -> Mapping[str, Value]:
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise MalformedError("the state of a parameter is not a dictionary", path=path)
    for slot in (WEIGHT, MASTER):
        if slot in found:
            raise UnsupportedError(f"the optimizer has a slot named {slot!r}, which is a reserved name", path=path)
    return _named(found, path)


def _groups(found: list[Value], num_flats: int, path: str) -> tuple[OptimGroup, ...]:
    """Each flat has to be in exactly one group; torch numbers them in the order of the groups."""
    groups = []
    for group in found:
        if not isinstance(group, dict) or not isinstance(group.get("params"), list):
            raise MalformedError("a param group has no 'params'", path=path, key="param_groups")
        if not all(type(number) is int for number in group["params"]):
            raise MalformedError("the params of a group are not numbers", path=path, key="param_groups")
        options = {name: value for name, value in _named(group, path).items() if name not in ("params", "param_names")}
        groups.append(OptimGroup(tuple(dict.fromkeys(group["params"])), options))
    flats = [flat for group in groups for flat in group.flats]
    if sorted(flats) != list(range(num_flats)):
        raise MalformedError(f"its param groups hold the partitions {format_brief(flats)} of {num_flats}", path=path)
    return tuple(groups)


def plain(value: Value) -> Any:
    """The attributes of an object that was pickled by its ``__dict__``; any other value as it is."""
    return dict(value.attributes) if isinstance(value, Opaque) and value.attributes else value

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
from ckpt_tools.core.dtypes import INT64_MAX, decode_number
from ckpt_tools.core.manifest import MASTER, WEIGHT
from ckpt_tools.core.names import strip_wrapper_parts
from ckpt_tools.core.shards import ShardTable
from ckpt_tools.core.step_claims import StepClaim, make_rank_claims
from ckpt_tools.core.values import Opaque, StoredTensor, Value, are_naturals, as_dict, describe_kind, format_brief
from ckpt_tools.errors import MalformedError, UnsupportedError
from ckpt_tools.serialization.torch_archive import TorchArchive
from ckpt_tools.serialization.torch_zip import open_torch_file
from ckpt_tools.state_tree.leaf import TensorLeaf
from ckpt_tools.stores.source import Source

EntryType = TypeVar("EntryType")

MAX_PADDING = 1 << 48
"""Elements, a petabyte of them: sums over ten thousand ranks stay 64-bit numbers."""


@dataclass(frozen=True, slots=True)
class DeepSpeedFile:
    """An opened file: its dictionary, and where the tensors in it have their bytes."""

    path: str
    content: Mapping[str, Value]
    archive: TorchArchive = field(repr=False)

    @classmethod
    def open(cls, source: Source, path: str) -> DeepSpeedFile:
        """Raises FormatError if ``path`` is missing, damaged, or holds no dictionary."""
        archive = open_torch_file(source, path)
        if not isinstance(archive.value, dict):
            raise MalformedError("it does not contain a dictionary, as DeepSpeed's files do", path=path)
        archive.check_rank()
        archive.locate_storages()  # here, where several files are opened at once
        return cls(path, archive.value, archive)

    def find_start_byte(self, tensor: StoredTensor) -> int:
        """The byte in the file at which element 0 of ``tensor`` is; opening the archive has checked that it holds all
        elements."""
        return find_storage_start(self.archive, tensor) + tensor.storage_offset * tensor.dtype.item_bytes

    def read_number(self, source: Source, value: Value) -> Any:
        """The number that a 0-d tensor holds, read from ``source``; any other value as it is."""
        if not isinstance(value, StoredTensor) or value.shape or value.dtype.num_values > 1:
            return value
        start_byte = self.find_start_byte(value)
        return decode_number(source.read(self.path, start_byte, start_byte + value.dtype.item_bytes), value.dtype)

    def build_shard_table(self, tensor: StoredTensor) -> ShardTable:
        return TensorLeaf.of(tensor, self.path, find_storage_start(self.archive, tensor)).shards

    def require_entry(self, name: str, expected_type: type[EntryType]) -> EntryType:
        return require_entry(self.content, name, expected_type, self.path)


def find_storage_start(archive: TorchArchive, tensor: StoredTensor) -> int:
    """The byte at which the storage of ``tensor`` starts; 0 for a tensor without elements."""
    if not tensor.numel:
        return 0
    if tensor.storage is None:
        raise MalformedError("the tensor is on the meta device and has no elements", path=archive.path)
    return archive.locate_storage(tensor.storage.key)[0]


def require_entry(content: Mapping[str, Value], name: str, expected_type: type[EntryType], path: str) -> EntryType:
    """``content[name]``. Raises MalformedError if it is missing or of another kind."""
    if name not in content:
        raise MalformedError(f"it has no {name!r}, which DeepSpeed saves", path=path, key=name)
    value = content[name]
    if not isinstance(value, expected_type):
        raise MalformedError(f"its {name!r} is a {describe_kind(value)}", path=path, key=name)
    return value


@dataclass(frozen=True, slots=True)
class ModelStates:
    """Parameters and buffers as a model file describes them.

    ``module`` is the model's state dict, in its own order. ``param_shapes`` has one mapping from name to shape for each
    param group (stages 1, 2) or sub-group (3); ``ties`` maps aliases to owners as DeepSpeed saw them. ``value_files``
    has the file of each value of ``module`` that is in another file than ``file``, that of a layer or an expert.
    """

    file: DeepSpeedFile
    module: Mapping[str, Value]
    buffers: frozenset[str]
    param_shapes: tuple[Mapping[str, Shape], ...]
    frozen_shapes: Mapping[str, Shape]
    frozen_fragments: Mapping[str, StoredTensor]
    ties: Mapping[str, str]
    value_files: Mapping[str, DeepSpeedFile] = field(default_factory=dict)

    @classmethod
    def of(cls, file: DeepSpeedFile) -> ModelStates:
        if "param_shapes" not in file.content or "buffer_names" not in file.content:
            raise UnsupportedError(
                "it has no param_shapes and buffer_names: it is not of ZeRO, or it is older than DeepSpeed 0.4",
                path=file.path,
            )
        if file.content["param_shapes"] is None:
            raise UnsupportedError(
                "it was saved without ZeRO (stage 0), but there is a file of ZeRO's optimizer beside it", path=file.path
            )
        return cls._from_entries(file, _read_module(file), _read_param_shapes(file))

    @classmethod
    def of_stage0(cls, file: DeepSpeedFile) -> ModelStates:
        """The model of stage 0, where no file says which parameters train."""
        return cls._from_entries(file, _read_module(file), ())

    @classmethod
    def of_pipeline_stage(cls, file: DeepSpeedFile) -> ModelStates:
        """A stage of a pipeline: everything except ``module``, which the files of layers hold."""
        return cls._from_entries(file, {}, () if file.content.get("param_shapes") is None else _read_param_shapes(file))

    @classmethod
    def _from_entries(
        cls, file: DeepSpeedFile, module: Mapping[str, Value], param_shapes: tuple[Mapping[str, Shape], ...]
    ) -> ModelStates:
        ties = _read_optional_dict(file, "shared_params")
        buffers = _require_strings(file.require_entry("buffer_names", list), file.path)
        _require_strings([*ties, *ties.values()], file.path)
        frozen_shapes = _parse_shapes(_read_optional_dict(file, "frozen_param_shapes"), file.path)
        resolver = _ModuleKeyResolver(module, {*buffers, *ties, *frozen_shapes}.union(*param_shapes))
        return cls(
            file=file,
            module=module,
            buffers=frozenset(map(resolver, buffers)),
            param_shapes=tuple(map(resolver.resolve_keys, param_shapes)),
            frozen_shapes=resolver.resolve_keys(frozen_shapes),
            frozen_fragments=resolver.resolve_keys(
                _require_tensors(_read_optional_dict(file, "frozen_param_fragments"), file.path)
            ),
            ties={resolver(alias): resolver(owner) for alias, owner in ties.items()},
        )

    @property
    def step(self) -> int | None:
        global_steps = self.file.content.get("global_steps")
        return global_steps if type(global_steps) is int else None

    @property
    def trainable(self) -> dict[str, Shape]:
        return {name: shape for group in self.param_shapes for name, shape in group.items()}

    def find_value_file(self, name: str) -> DeepSpeedFile:
        return self.value_files.get(name, self.file)


def collect_model_claims(file: DeepSpeedFile) -> list[StepClaim]:
    """Claims of a model file: every rank has the counters of the engine and the state of the scheduler."""
    values = {**as_dict(file.content.get("lr_scheduler")), **file.content}
    counters = ("global_steps", "global_samples", "skipped_steps", "iteration", "last_epoch", "last_batch_iteration")
    return make_rank_claims(file.path, values, counters)


class _ModuleKeyResolver:
    """Finds the keys of ``module`` for names of parameters and buffers, which differ where a wrapper put parts into
    names, or a hook of the model a prefix before keys. The first that applies:

    1. the key that is the name;
    2. the key that is the name after both lose the parts of wrappers (``core.names``);
    3. the only key left that ends with the name. Long names go first and use their key up: ``norm.bias`` is the end of
       ``layer.norm.bias`` too.
    """

    def __init__(self, module: Mapping[str, Value], names: Collection[str]) -> None:
        key_by_bare_name = {strip_wrapper_parts(key): key for key in module}
        self.key_by_name = {
            name: name if name in module else key_by_bare_name.get(strip_wrapper_parts(name), name) for name in names
        }
        unresolved = {name: strip_wrapper_parts(name) for name, key in self.key_by_name.items() if key not in module}
        wanted_suffixes = {*unresolved.values()}
        depths = {name.count(".") + 1 for name in wanted_suffixes}

        def list_wanted_suffixes(key: str) -> set[str]:
            parts = key.split(".")
            return wanted_suffixes & {".".join(parts[-depth:]) for depth in depths if depth < len(parts)}

        keys_by_suffix: defaultdict[str, set[str]] = defaultdict(set)
        for key in module.keys() - self.key_by_name.values():
            for suffix in list_wanted_suffixes(key):
                keys_by_suffix[suffix].add(key)
        for name, suffix in sorted(unresolved.items(), key=lambda item: -item[1].count(".")):
            if len(keys_by_suffix[suffix]) == 1:
                (key,) = keys_by_suffix[suffix]
                self.key_by_name[name] = key
                for other in list_wanted_suffixes(key):
                    keys_by_suffix[other].discard(key)

    def __call__(self, name: str) -> str:
        return self.key_by_name.get(name, name)

    def resolve_keys(self, values: Mapping[str, EntryType]) -> Mapping[str, EntryType]:
        return {self(name): value for name, value in values.items()}


def _read_module(file: DeepSpeedFile) -> Mapping[str, Value]:
    """The model's state dict. Raises UnsupportedError if the run has stages of a pipeline: they have whole layers,
    which no rule of tensor parallelism joins."""
    if count_pipeline_stages(file) > 1:
        raise UnsupportedError(
            "it is of a pipeline-parallel run, and there are no files of layers (layer_00-model_states.pt) beside it",
            path=file.path,
        )
    return _require_string_keys(file.require_entry("module", dict), file.path)


def count_pipeline_stages(file: DeepSpeedFile) -> int:
    stages = as_dict(file.content.get("checkpoint_parallel_dimensions")).get("pp_degree")
    return stages if type(stages) is int else 1


def _require_string_keys(mapping: Mapping[Value, Value], path: str) -> Mapping[str, Value]:
    _require_strings(list(mapping), path)
    return mapping


def _require_strings(values: Sequence[Value], path: str) -> Sequence[str]:
    for name in values:
        if not isinstance(name, str):
            raise MalformedError(f"expected a name, found a {describe_kind(name)}", path=path)
    return values


def _read_param_shapes(file: DeepSpeedFile) -> tuple[Mapping[str, Shape], ...]:
    """``param_shapes``: a list of dictionaries, or in older versions one dictionary. Raises MalformedError."""
    raw_shapes = file.content["param_shapes"]
    groups = raw_shapes if isinstance(raw_shapes, list) else [raw_shapes]
    shapes = tuple(_parse_shapes(group, file.path) for group in groups)
    counts = Counter(name for group in shapes for name in group)
    if duplicate := next((name for name, count in counts.items() if count > 1), None):
        raise MalformedError("param_shapes lists it in two groups", path=file.path, key=duplicate)
    return shapes


def _parse_shapes(raw_shapes: Value, path: str) -> Mapping[str, Shape]:
    """Shapes by name; in the file a shape is a ``torch.Size`` or a plain tuple. Raises MalformedError."""
    if not isinstance(raw_shapes, dict):
        raise MalformedError("its shapes are not a dictionary by name", path=path)
    for name, shape in _require_string_keys(raw_shapes, path).items():
        if not are_naturals(shape) or prod(max(extent, 1) for extent in shape) > INT64_MAX:
            raise MalformedError(f"its shape is {format_brief(shape)}", path=path, key=name)
    return {name: tuple(shape) for name, shape in raw_shapes.items()}


def _read_optional_dict(file: DeepSpeedFile, name: str) -> Mapping[Value, Value]:
    """A dictionary of the file, empty if it is None or left out, as by old versions. Raises MalformedError."""
    mapping = file.content.get(name)
    if mapping is not None and not isinstance(mapping, dict):
        raise MalformedError(f"its {name!r} is a {describe_kind(mapping)}", path=file.path, key=name)
    return mapping or {}


def _require_tensors(tensors: Mapping[Value, Value], path: str) -> Mapping[str, StoredTensor]:
    for name, value in _require_string_keys(tensors, path).items():
        if not isinstance(value, StoredTensor):
            raise MalformedError("its fragment is not a tensor", path=path, key=name)
    return tensors


@dataclass(frozen=True, slots=True)
class OptimStates:
    """A rank's optimizer file.

    ``masters`` are its flats in order: one for each param group (stages 1, 2) or sub-group (3). By flat, ``states`` has
    the optimizer's state, ``paddings`` the number of elements that slots may have more than the masters (0 for
    BF16_Optimizer, which trims nothing and counts its padding otherwise), ``partition_counts`` the number of ranks over
    which it is cut, and ``alignment_paddings`` the zeros after each of its parameters. ``groups`` are the param groups:
    their hyperparameters, and which flats they have.
    """

    file: DeepSpeedFile
    state_dict: Mapping[str, Value]
    stage: int
    is_bf16_optimizer: bool
    partition_counts: tuple[int, ...]
    masters: tuple[StoredTensor, ...]
    states: tuple[Mapping[str, Value], ...]
    paddings: tuple[int, ...]
    groups: tuple[OptimGroup, ...]
    alignment_paddings: tuple[tuple[int, ...], ...] | None

    @classmethod
    def of(cls, file: DeepSpeedFile) -> OptimStates:
        state_dict = file.require_entry("optimizer_state_dict", dict)
        stage = _read_zero_stage(state_dict, file.path)
        is_bf16 = "zero_stage" not in state_dict
        masters_entry = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
        tensors = require_entry(state_dict, masters_entry, list, file.path)
        for value in tensors:
            if not isinstance(value, StoredTensor) or len(value.shape) != 1 or not value.is_contiguous:
                message = f"{masters_entry} contains something other than flat tensors"
                raise MalformedError(message, path=file.path, key=masters_entry)
        masters = tuple(tensors)
        states, groups = _read_optimizer(state_dict, stage, len(masters), file.path)
        return cls(
            file=file,
            state_dict=state_dict,
            stage=stage,
            is_bf16_optimizer=is_bf16,
            partition_counts=_read_partition_counts(state_dict, len(masters), file.path),
            masters=masters,
            states=states,
            paddings=(0,) * len(masters) if is_bf16 else _read_paddings(state_dict, len(masters), file.path),
            groups=groups,
            alignment_paddings=_read_alignment(state_dict, len(masters), file.path),
        )

    @property
    def world_size(self) -> int:
        """The number of ranks that partition the optimizer; flats of experts are cut over some of them."""
        return max(self.partition_counts)


@dataclass(frozen=True, slots=True)
class OptimGroup:
    """A param group as the optimizer saved it: numbers of its flats, and its hyperparameters."""

    flats: tuple[int, ...]
    options: Mapping[str, Value]


def _read_zero_stage(state_dict: Mapping[str, Value], path: str) -> int:
    """The stage, 1, 2 or 3. BF16_Optimizer, which is a stage 1, does not state it."""
    if "zero_stage" not in state_dict:
        if "single_partition_of_fp32_groups" not in state_dict:
            raise UnsupportedError("it does not contain ZeRO optimizer state", path=path)
        return 1
    raw_stage = state_dict["zero_stage"]
    stage = raw_stage.args[0] if isinstance(raw_stage, Opaque) and len(raw_stage.args) == 1 else raw_stage
    if type(stage) is not int or stage not in (1, 2, 3):
        why = f"its ZeRO stage is {format_brief(stage)}; only stages 1, 2 and 3 are supported"
        raise UnsupportedError(why, path=path)
    return stage


def _read_partition_counts(state_dict: Mapping[str, Value], num_flats: int, path: str) -> tuple[int, ...]:
    """``partition_count``: a number, or one a param group. Experts are cut into fewer partitions than the rest."""
    value = state_dict.get("partition_count")
    counts: list[Any] = value if isinstance(value, list) and value else [value] * max(1, num_flats)
    if not all(type(count) is int and count > 0 for count in counts):
        raise MalformedError(f"its partition_count is {format_brief(value)}", path=path, key="partition_count")
    return tuple(counts)


def _read_paddings(state_dict: Mapping[str, Value], num_flats: int, path: str) -> tuple[int, ...]:
    paddings = state_dict.get("group_paddings") or [0] * num_flats
    if not are_naturals(paddings, num_flats) or len(paddings) != num_flats or max(paddings, default=0) > MAX_PADDING:
        raise MalformedError(f"its group_paddings are not {num_flats} numbers", path=path, key="group_paddings")
    return tuple(paddings)


def _read_alignment(state_dict: Mapping[str, Value], num_flats: int, path: str) -> tuple[tuple[int, ...], ...] | None:
    """``param_alignment_paddings``: the number of zeros after each parameter of a group, in stages 1 and 2 since
    0.19.7. None for none."""
    name = "param_alignment_paddings"
    groups = state_dict.get(name)
    if groups is None:
        return None
    if not isinstance(groups, list) or len(groups) != num_flats or not all(are_naturals(g, None) for g in groups):
        raise MalformedError("they are not a list of numbers for each group", path=path, key=name)
    return tuple(tuple(group) for group in groups)


def _read_optimizer(
    state_dict: Mapping[str, Value], stage: int, num_flats: int, path: str
) -> tuple[tuple[Mapping[str, Value], ...], tuple[OptimGroup, ...]]:
    """The state of each flat, and the param groups."""
    name = "optimizer_state_dict" if stage == 3 else "base_optimizer_state"
    optimizer = state_dict.get(name)
    if isinstance(optimizer, list):  # An elastic checkpoint has the states alone, and one step for all.
        if len(optimizer) != num_flats:
            message = f"{len(optimizer)} states, but {num_flats} param groups"
            raise MalformedError(message, path=path, key=name)
        step = state_dict.get("base_optimizer_state_step")
        options = {} if step is None else {"step": step}
        states = tuple(_read_slots(state, path) for state in optimizer)
        return states, tuple(OptimGroup((flat,), options) for flat in range(num_flats))
    if not isinstance(optimizer, dict):
        raise MalformedError(f"it has no {name!r}", path=path, key=name)
    groups = _read_groups(require_entry(optimizer, "param_groups", list, path), num_flats, path)
    state = require_entry(optimizer, "state", dict, path)
    return tuple(_read_slots(state.get(flat), path) for flat in range(num_flats)), groups


def _read_slots(slots: Value, path: str) -> Mapping[str, Value]:
    if slots is None:
        return {}
    if not isinstance(slots, dict):
        raise MalformedError("the state of a parameter is not a dictionary", path=path)
    for slot in (WEIGHT, MASTER):
        if slot in slots:
            raise UnsupportedError(f"the optimizer has a slot named {slot!r}, which is a reserved name", path=path)
    return _require_string_keys(slots, path)


def _read_groups(raw_groups: list[Value], num_flats: int, path: str) -> tuple[OptimGroup, ...]:
    """Each flat has to be in exactly one group; torch numbers them in the order of the groups."""
    groups = []
    for group in raw_groups:
        if not isinstance(group, dict) or not isinstance(group.get("params"), list):
            raise MalformedError("a param group has no 'params'", path=path, key="param_groups")
        if not all(type(number) is int for number in group["params"]):
            raise MalformedError("the params of a group are not numbers", path=path, key="param_groups")
        options = {
            name: value
            for name, value in _require_string_keys(group, path).items()
            if name not in ("params", "param_names")
        }
        groups.append(OptimGroup(tuple(dict.fromkeys(group["params"])), options))
    flats = [flat for group in groups for flat in group.flats]
    if sorted(flats) != list(range(num_flats)):
        raise MalformedError(f"its param groups hold the partitions {format_brief(flats)} of {num_flats}", path=path)
    return tuple(groups)


def unwrap_attributes(value: Value) -> Any:
    """The attributes of an object that was pickled by its ``__dict__``; any other value as it is."""
    return dict(value.attributes) if isinstance(value, Opaque) and value.attributes else value

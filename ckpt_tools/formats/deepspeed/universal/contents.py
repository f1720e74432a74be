"""Builds the manifest of a universal checkpoint from the headers of its files.

Parameters that train have their states in ``zero/``, and their weights in the model's file or, where that has them at
size 0 (stage 3, and what we write), only as the masters: the weight is then their cast. Buffers, frozen weights and
ties come from the model's file alone, for in ``zero/`` DeepSpeed leaves copies of them that went through float32.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

from ckpt_tools.core.boxes import Box, Shape
from ckpt_tools.core.manifest import MASTER, WEIGHT, Kind, Manifest, ParamGroup, StateKey, TensorEntry
from ckpt_tools.core.shards import ByteRange, Shard, ShardTable
from ckpt_tools.core.step_claims import OPTIMIZER_STEP_COUNTER, StepClaim, is_finite_number
from ckpt_tools.core.values import Opaque, StoredTensor, Value, as_dict, format_brief
from ckpt_tools.errors import IncompleteError, MalformedError, UnsupportedError
from ckpt_tools.formats.deepspeed.common.files import DeepSpeedFile, ModelStates, require_entry
from ckpt_tools.formats.deepspeed.common.fused_experts import DISTRIBUTION_ENTRIES
from ckpt_tools.formats.deepspeed.common.model_file import (
    KeyedEntries,
    check_parameter_names,
    find_aliases,
    is_round_robin,
    make_shape_error,
)
from ckpt_tools.formats.deepspeed.common.partition import undo_round_robin
from ckpt_tools.formats.deepspeed.common.saved_extras import ExtrasCollector
from ckpt_tools.formats.deepspeed.common.tensor_parallel import MergeRules, drop_partition_entries
from ckpt_tools.formats.deepspeed.names import UNIVERSAL_MASTER_SLOT
from ckpt_tools.formats.deepspeed.universal.loader_limits import STEP_SLOT
from ckpt_tools.formats.deepspeed.universal.states import SlotFileReader, UniversalFiles
from ckpt_tools.state_tree.incomplete_state import refuse_tensor_object


@dataclass
class UniversalManifestBuilder:
    """Builds the manifest of a universal checkpoint.

    ``models`` are the model's files: several, one a rank, if DeepSpeed converted it from stage 3 and it has frozen
    parameters. ``tp_models`` has one a tensor-parallel rank: trained parameters are whole in ``zero/``, and in parts in
    these files.
    """

    files: UniversalFiles
    models: tuple[ModelStates, ...]
    optimizer_file: DeepSpeedFile
    slot_reader: SlotFileReader
    tp_models: tuple[ModelStates, ...]
    extras: ExtrasCollector = field(default_factory=ExtrasCollector)

    def build_manifest(self) -> Manifest:
        """The manifest of the checkpoint. Raises FormatError if the files contradict each other."""
        trained_slots = (self.files.slot_paths.get(name, {}) for name in self.model.trainable)
        self.slot_reader.open_files([path for slots in trained_slots for path in slots.values()])
        tensors = {key: entry for name in self._list_names() for key, entry in self._build_entries(name)}
        groups = tuple(self._build_group(number, group) for number, group in enumerate(self.group_values))
        skipped_entries = DISTRIBUTION_ENTRIES if self.slot_reader.expert_tensors else ()
        self.extras.add_model(self.model.file, skipped_entries)
        self.extras.add_optimizer(self.optimizer_file, self.optimizer_file.content)
        if self.files.tag:
            self.extras.values.setdefault("deepspeed", {})["tag"] = self.files.tag
        world_size = self.model.file.content.get("dp_world_size")
        return Manifest(
            format="universal",
            tensors=tensors | self.extras.tensors,
            aliases=self.aliases,
            groups=groups if any(group.params for group in groups) else (),
            literals=self.slot_reader.literals,
            extra=drop_partition_entries(self.extras.values) if self.is_tensor_parallel else self.extras.values,
            step=self.model.step,
            step_claims=tuple(self._collect_step_claims()),
            world_size=world_size * len(self.tp_models) if type(world_size) is int else None,
        )

    @property
    def model(self) -> ModelStates:
        return self.models[0]

    @property
    def is_tensor_parallel(self) -> bool:
        return len(self.tp_models) > 1

    @cached_property
    def trainable(self) -> Mapping[str, Shape]:
        """The whole shapes of trained parameters, by name."""
        if not self.is_tensor_parallel:
            return self.model.trainable
        return {name: self._read_whole_shape(name, shape) for name, shape in self.model.trainable.items()}

    def _read_whole_shape(self, name: str, part_shape: Shape) -> Shape:
        """The whole shape of a parameter of a tensor-parallel run, which only the file of its master has. Raises
        FormatError if there is no such file, or if the shape has other dims than that of a part."""
        path = self.files.slot_paths.get(name, {}).get(UNIVERSAL_MASTER_SLOT)
        if path is None:
            raise IncompleteError("there is no file zero/.../fp32.pt", path=self.model.file.path, key=name)
        shape = self.slot_reader.read_shape(path)
        if len(shape) != len(part_shape):
            why = f"its shape is {list(shape)}, but that of a part is {list(part_shape)}"
            raise MalformedError(why, path=path, key=name)
        return shape

    # Names

    @cached_property
    def aliases(self) -> Mapping[str, str]:
        return find_aliases(self.model, self._are_tied)

    def _are_tied(self, alias: str, one: StoredTensor, other: StoredTensor) -> bool:
        if one.numel:
            return one.shape == other.shape
        return not other.numel and alias not in self.model.frozen_shapes

    def _list_names(self) -> list[str]:
        """The model's own names in its own order, each tie once. Raises IncompleteError."""
        check_parameter_names(self.model)
        return [name for name in self.model.module if name not in self.aliases]

    # Tensors

    def _build_entries(self, name: str) -> KeyedEntries:
        """The entries of one name: its weight or buffer, and the optimizer's state."""
        value = self.model.module[name]
        refuse_tensor_object(value, name)
        if not isinstance(value, StoredTensor):
            self.extras.add_value("module", name, value, self.model.file)
        elif name in self.trainable:
            yield from self._build_trained(name, value, self.trainable[name])
        else:
            yield StateKey(name, WEIGHT), self._build_untrained(name, value)

    def _build_trained(self, name: str, value: StoredTensor, shape: Shape) -> KeyedEntries:
        paths = self.files.slot_paths.get(name, {})
        if UNIVERSAL_MASTER_SLOT not in paths and 0 not in shape:
            raise IncompleteError("there is no file zero/.../fp32.pt", path=self.model.file.path, key=name)
        self._check_slots(name, paths, shape)
        states: dict[str, TensorEntry] = {}
        for slot, path in paths.items():
            if slot in (WEIGHT, MASTER):
                raise UnsupportedError(f"the optimizer has a slot named {slot!r}, which is a reserved name", path=path)
            if slot == STEP_SLOT:
                table = self.slot_reader.read_scalar(path)
                states[slot] = TensorEntry((), table.dtype, Kind.STATE, table)
            else:
                table = self.slot_reader.build_shard_table(path, shape, name)
                manifest_slot = MASTER if slot == UNIVERSAL_MASTER_SLOT else slot
                states[manifest_slot] = TensorEntry(shape, table.dtype, Kind.STATE, table)
        yield StateKey(name, WEIGHT), self._build_weight(name, value, shape, states.get(MASTER))
        yield from ((StateKey(name, slot), entry) for slot, entry in states.items())
        if states.keys() - {MASTER, STEP_SLOT} and STEP_SLOT not in states and name in self.shared_steps:
            yield StateKey(name, STEP_SLOT), self.shared_steps[name]

    def _check_slots(self, name: str, paths: Mapping[str, str], shape: Shape) -> None:
        """Checks that a parameter has the files that are usual in its group, since DeepSpeed cuts them out of the
        group's flat tensors; a parameter that never got a gradient may have its master alone. Raises IncompleteError if
        a file is missing; MalformedError if there is one that is not usual."""
        usual_slots = self.usual_slots[name]
        if 0 in shape or (paths.keys() == {UNIVERSAL_MASTER_SLOT} and len(usual_slots) > 2):
            return
        missing_slots, unexpected_slots = sorted(usual_slots - paths.keys()), sorted(paths.keys() - usual_slots)
        if missing_slots:
            raise IncompleteError(
                f"there is no file zero/.../{missing_slots[0]}.pt, which the other parameters of its group have",
                path=self.model.file.path,
                key=name,
            )
        if unexpected_slots:
            path = paths[unexpected_slots[0]]
            raise MalformedError("the other parameters of its group have no such file", path=path, key=name)

    @cached_property
    def usual_slots(self) -> Mapping[str, frozenset[str]]:
        """By trained parameter, the slots that most parameters of its group have; of sets that equally many have, the
        largest. A parameter that deviates has lost a file, or has one too many."""
        slots_by_name: dict[str, frozenset[str]] = {}
        for group in self.model.param_shapes:
            names = [name for name, shape in group.items() if 0 not in shape]
            counts = Counter(frozenset(self.files.slot_paths.get(name, {})) for name in names)
            usual = max(counts, key=lambda slots: (counts[slots], len(slots)), default=frozenset[str]())
            slots_by_name |= dict.fromkeys(group, usual)
        return slots_by_name

    def _build_weight(self, name: str, value: StoredTensor, shape: Shape, master: TensorEntry | None) -> TensorEntry:
        if tuple(value.shape) == shape and not self.is_tensor_parallel:
            return TensorEntry(shape, value.dtype, Kind.PARAMETER, self.model.file.build_shard_table(value))
        if value.numel and not self.is_tensor_parallel:
            raise make_shape_error(self.model, name, value, shape)
        table = ShardTable.build(shape, value.dtype, []) if master is None else master.shards
        return TensorEntry(shape, value.dtype, Kind.PARAMETER, table)

    def _build_untrained(self, name: str, value: StoredTensor) -> TensorEntry:
        """The entry of a buffer, or of a frozen weight, whose elements stage 3 leaves in the ranks' model files."""
        if name in self.model.buffers:
            return TensorEntry(tuple(value.shape), value.dtype, Kind.BUFFER, self.model.file.build_shard_table(value))
        if self.is_tensor_parallel:
            return self._merge_frozen(name, value)
        shape = self.model.frozen_shapes.get(name, tuple(value.shape))
        if tuple(value.shape) == shape:
            return TensorEntry(shape, value.dtype, Kind.PARAMETER, self.model.file.build_shard_table(value))
        if value.numel:
            raise make_shape_error(self.model, name, value, shape)
        return TensorEntry(shape, value.dtype, Kind.PARAMETER, self._build_fragment_table(name, shape, value))

    def _merge_frozen(self, name: str, value: StoredTensor) -> TensorEntry:
        """The entry of a frozen weight of a tensor-parallel run, from its parts in the model's files. Raises
        FormatError if a part is missing, or if stage 3 has cut the parts again."""
        tensors = [each for part in self.tp_models if isinstance(each := part.module.get(name), StoredTensor)]
        if len(tensors) != len(self.tp_models):
            raise MalformedError("the model's files do not all contain it", path=self.model.file.path, key=name)
        stored_shapes = [tuple(tensor.shape) for tensor in tensors]
        parts = zip(self.tp_models, stored_shapes, strict=True)
        shapes = [part.frozen_shapes.get(name, shape) for part, shape in parts]
        merge = self._merge_rules.plan_merge(name, shapes)
        if shapes == stored_shapes:
            tables = [part.file.build_shard_table(tensor) for part, tensor in zip(self.tp_models, tensors, strict=True)]
            return TensorEntry(merge.shape, value.dtype, Kind.PARAMETER, merge.build_shard_table(tables, shapes))
        if any(merge.rank_boxes[1:]):
            raise UnsupportedError(
                "it is a frozen weight of a tensor-parallel run in stage 3, which is not supported in a universal "
                "checkpoint; convert the native one",
                path=self.model.file.path,
                key=name,
            )
        table = self._build_fragment_table(name, merge.shape, value)
        return TensorEntry(merge.shape, value.dtype, Kind.PARAMETER, table)

    @cached_property
    def _merge_rules(self) -> MergeRules:
        return MergeRules.of(self.model.file.content.get("universal_checkpoint_info"), self.model.file.path)

    def _build_fragment_table(self, name: str, shape: Shape, value: StoredTensor) -> ShardTable:
        """The ranks' fragments of a frozen weight: each has ``ceil(numel / world size)`` elements, padding included
        (stage3.py). Raises IncompleteError if a file lacks its fragment."""
        numel, shards = prod(shape), []
        share = -(-numel // len(self.models))
        for rank, model in enumerate(self.models):
            lower, upper = min(rank * share, numel), min((rank + 1) * share, numel)
            if lower == upper:
                continue
            fragment, path = model.frozen_fragments.get(name), model.file.path
            if fragment is None or fragment.numel < upper - lower or not fragment.is_contiguous:
                raise IncompleteError("the file does not contain its part of this frozen weight", path=path, key=name)
            start = model.file.find_start_byte(fragment)
            stop = start + (upper - lower) * fragment.dtype.item_bytes
            shards.append(Shard(Box((lower,), (upper,)), ByteRange(path, start, stop)))
        return ShardTable.build((numel,), value.dtype, shards)

    # Groups

    @cached_property
    def group_values(self) -> list[Mapping[str, Value]]:
        """The optimizer's param groups as they were saved. Their ``params`` are positions in ``param_shapes``, each in
        exactly one group. Raises MalformedError."""
        group_container = self.optimizer_file.content
        if "param_groups" not in group_container:
            group_container = as_dict(group_container.get("optimizer_state_dict"))
        groups = require_entry(group_container, "param_groups", list, self.optimizer_file.path)
        for group in groups:
            if not isinstance(group, dict) or not isinstance(group.get("params"), list):
                raise self._make_groups_error("a param group has no 'params'")
        numbers = [number for group in groups for number in group["params"]]
        expected = list(range(len(self.model.param_shapes)))
        if not all(type(number) is int for number in numbers) or (numbers and sorted(numbers) != expected):
            raise self._make_groups_error(
                f"its param groups contain the parameters {format_brief(numbers)}; param_shapes has {len(expected)}"
            )
        return groups

    def _make_groups_error(self, message: str) -> MalformedError:
        return MalformedError(message, path=self.optimizer_file.path, key="param_groups")

    def _build_group(self, number: int, group: Mapping[str, Value]) -> ParamGroup:
        members = tuple(name for flat in group["params"] for name in self._list_members(flat))
        names = [name for name in group if isinstance(name, str) and name not in ("params", "param_names")]
        options = {name: group[name] for name in names}
        return ParamGroup(members, self.extras.replace_option_tensors(number, options, self.optimizer_file))

    def _list_members(self, number: int) -> tuple[str, ...]:
        """The names in ``param_shapes[number]`` in the order in which the optimizer got them."""
        names, world_size = tuple(self.model.param_shapes[number]), self.model.file.content.get("dp_world_size")
        if self._is_round_robin and type(world_size) is int and world_size > 0:
            return undo_round_robin(names, world_size)
        return names

    @property
    def _is_round_robin(self) -> bool:
        """Whether ``round_robin_gradients`` was in force: its optimizer is one of stage 1 or 2."""
        stage = self.optimizer_file.content.get("zero_stage")
        stage = stage.args[0] if isinstance(stage, Opaque) and stage.args else stage
        return is_round_robin(self.model) and stage in (1, 2)

    @cached_property
    def shared_steps(self) -> Mapping[str, TensorEntry]:
        """By parameter, a step that is kept once for many: stage 3 has one a sub-group, Apex one among a group's
        options."""
        step_by_name: dict[str, TensorEntry] = {}
        for group in self.group_values:
            for number in group["params"]:
                value = self._find_shared_step(number, group)
                if value is not None:
                    entry = self._build_step(number, value)
                    step_by_name |= dict.fromkeys(self.model.param_shapes[number], entry)
        return step_by_name

    def _collect_step_claims(self) -> Iterator[StepClaim]:
        """A claim of the step in the optimizer's file, which a file of each parameter states besides."""
        for group in self.group_values[:1]:
            value = self._find_shared_step(next(iter(group["params"]), 0), group)
            step = self.optimizer_file.read_number(self.slot_reader.source, value)
            if is_finite_number(step):
                yield StepClaim(OPTIMIZER_STEP_COUNTER, step, self.optimizer_file.path)

    def _find_shared_step(self, number: int, group: Mapping[str, Value]) -> Value:
        states = as_dict(as_dict(self.optimizer_file.content.get("optimizer_state_dict")).get("state"))
        state = as_dict(states.get(number, states.get(0)))
        return state[STEP_SLOT] if STEP_SLOT in state else group.get(STEP_SLOT)

    def _build_step(self, number: int, value: Value) -> TensorEntry:
        if isinstance(value, StoredTensor) and not value.shape:
            table = self.optimizer_file.build_shard_table(value)
        else:
            table = self.slot_reader.store_number(f"{number}.{STEP_SLOT}", value)
        return TensorEntry((), table.dtype, Kind.STATE, table)

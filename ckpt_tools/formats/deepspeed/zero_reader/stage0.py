"""Runs without ZeRO (stage 0): one model file, with torch's optimizer state or that of a 16-bit wrapper in it.

In fp32 ``optimizer`` is what torch's ``state_dict`` gives. In 16 bit a wrapper keeps fp32 masters beside it:
``fp32_groups``, a tensor for each parameter (FP16_UnfusedOptimizer), or ``fp32_groups_flat``, one vector for each param
group (FP16_Optimizer, with fused Adam on a GPU). No file says which parameter is which. Numbers are matched with
parameters by order and shape, as for a file of torch's. Of flat groups the model's weights are views into one storage,
in the order of the vector.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

import numpy as np

from ckpt_tools.core.boxes import Shape
from ckpt_tools.core.literals import is_number, make_number_table
from ckpt_tools.core.manifest import MASTER, WEIGHT, Kind, Manifest, ParamGroup, StateKey, TensorEntry
from ckpt_tools.core.notes import Note, Outcome
from ckpt_tools.core.shards import ByteRange, ShardTable
from ckpt_tools.core.values import StoredTensor, Value, describe_kind, format_brief
from ckpt_tools.errors import IncompleteError, MalformedError, UnsupportedError
from ckpt_tools.formats.deepspeed.common.files import DeepSpeedFile, ModelStates, collect_model_claims, require_entry
from ckpt_tools.formats.deepspeed.common.model_file import find_aliases
from ckpt_tools.formats.deepspeed.common.saved_extras import ExtrasCollector
from ckpt_tools.formats.deepspeed.names import describe_folder, optim_file_name
from ckpt_tools.formats.deepspeed.zero_reader.tag_files import TagFiles
from ckpt_tools.state_tree.incomplete_state import refuse_tensor_object
from ckpt_tools.state_tree.param_numbers import NumberedGroup, match_numbers, note_assumed_order
from ckpt_tools.stores.source import Source

UNFUSED_MASTERS, FLAT_MASTERS = "fp32_groups", "fp32_groups_flat"

_SCALER_ENTRIES = ("cur_scale", "cur_iter", "last_overflow_iter", "scale_factor", "scale_window")

SlotValues = Mapping[str, Value]


def open_stage0_model(source: Source, files: TagFiles) -> ModelStates:
    """The model. Raises IncompleteError if its file is of a run with ZeRO, whose optimizer has files that are
    missing."""
    file = DeepSpeedFile.open(source, files.require_model_paths(0)[0])
    if "param_shapes" not in file.content or file.content["param_shapes"] is not None:
        raise IncompleteError(
            f"{describe_folder(files.prefix.rstrip('/'))} has no *_optim_states.pt, the optimizer's files, which ZeRO "
            "writes",
            path=files.prefix + optim_file_name(0, files.mp_rank),
        )
    return ModelStates.of_stage0(file)


class MasterSlice(NamedTuple):
    """The place of a parameter's masters: elements ``[start, start + numel)`` of the master with ``number``."""

    number: int
    start: int
    numel: int


@dataclass(frozen=True, slots=True)
class SavedOptimizer:
    """The entry ``optimizer`` of ``file``: torch's state and groups by number, and a wrapper's masters.

    ``masters`` are by number: of a parameter, or with ``is_flat`` of a group, whose state is flat as well.
    """

    file: DeepSpeedFile
    states: Mapping[int, SlotValues] = field(default_factory=dict)
    groups: tuple[Mapping[str, Value], ...] = ()
    masters: Mapping[int, StoredTensor] = field(default_factory=dict)
    is_flat: bool = False
    wrapper_entries: Mapping[str, Value] = field(default_factory=dict)

    @classmethod
    def of(cls, file: DeepSpeedFile) -> SavedOptimizer:
        """The optimizer in ``file``, empty if there is none. Raises FormatError if it is neither torch's state nor that
        of DeepSpeed's two wrappers."""
        optimizer = file.content.get("optimizer")
        if optimizer is None:
            return cls(file)
        if not isinstance(optimizer, dict):
            raise MalformedError(f"its 'optimizer' is a {describe_kind(optimizer)}", path=file.path, key="optimizer")
        if "param_groups" in optimizer:
            return cls(file, _read_states(optimizer, file.path), _read_groups(optimizer, file.path))
        if UNFUSED_MASTERS not in optimizer and FLAT_MASTERS not in optimizer:
            raise UnsupportedError(
                f"its optimizer state has the entries {format_brief(list(optimizer))}, which are not those of torch "
                "or of DeepSpeed's 16-bit optimizers; save with ZeRO stage 1",
                path=file.path,
                key="optimizer",
            )
        state_dict = require_entry(optimizer, "optimizer_state_dict", dict, file.path)
        groups = _read_groups(state_dict, file.path)
        is_flat = FLAT_MASTERS in optimizer
        masters = _read_masters(optimizer, groups, is_flat, file.path)
        return cls(file, _read_states(state_dict, file.path), groups, masters, is_flat, optimizer)

    def find_named_shapes(self) -> tuple[dict[str, Shape], ...] | None:
        """Shapes of each group's parameters by the names that the optimizer itself has; None if it has only numbers, or
        masters, or no state of a parameter."""
        shapes = self.find_shapes()
        groups = [(group["params"], _read_param_names(group)) for group in self.groups]
        if self.masters or any(names is None or not shapes.keys() >= {*numbers} for numbers, names in groups):
            return None
        named = [{name: shapes[n] for n, name in zip(numbers, names or (), strict=True)} for numbers, names in groups]
        return tuple(named) or None

    def find_shapes(self) -> dict[int, Shape]:
        """Shapes by number: that of the master, or else the shape that all state of a parameter but ``step`` has. A
        number without state, or with state of several shapes, is left out."""
        shape_by_number = {number: tuple(master.shape) for number, master in self.masters.items()}
        for number, slots in self.states.items():
            tensors = [value for slot, value in slots.items() if isinstance(value, StoredTensor) and slot != "step"]
            if len(shapes := {tuple(tensor.shape) for tensor in tensors}) == 1:
                shape_by_number.setdefault(number, shapes.pop())
        return shape_by_number


def _read_groups(state_dict: Mapping[Value, Value], path: str) -> tuple[Mapping[str, Value], ...]:
    groups = require_entry(state_dict, "param_groups", list, path)
    for group in groups:
        params = group.get("params") if isinstance(group, dict) else None
        if not isinstance(params, list) or not all(type(number) is int for number in params):
            raise MalformedError("a param group has no list 'params' of numbers", path=path, key="param_groups")
    numbers = [number for group in groups for number in group["params"]]
    if len(set(numbers)) != len(numbers):
        raise MalformedError("its param groups name a parameter twice", path=path, key="param_groups")
    return tuple(groups)


def _read_states(state_dict: Mapping[Value, Value], path: str) -> dict[int, SlotValues]:
    states = require_entry(state_dict, "state", dict, path)
    for number, slots in states.items():
        if type(number) is not int or not isinstance(slots, dict) or not all(type(slot) is str for slot in slots):
            raise MalformedError("its state is not slots by the number of a parameter", path=path, key="state")
        if not {WEIGHT, MASTER}.isdisjoint(slots):
            raise UnsupportedError("the optimizer has a slot with a reserved name", path=path, key="state")
    return states


def _read_masters(
    wrapper_entries: Mapping[Value, Value], groups: tuple[Mapping[str, Value], ...], is_flat: bool, path: str
) -> dict[int, StoredTensor]:
    name = FLAT_MASTERS if is_flat else UNFUSED_MASTERS
    lists = require_entry(wrapper_entries, name, list, path)
    if is_flat:
        lists = [[flat] for flat in lists]
    masters: dict[int, StoredTensor] = {}
    if len(lists) != len(groups):
        raise MalformedError(f"{len(lists)} lists of masters, but {len(groups)} param groups", path=path, key=name)
    for tensors, group in zip(lists, groups, strict=True):
        if not isinstance(tensors, list) or not all(isinstance(tensor, StoredTensor) for tensor in tensors):
            raise MalformedError("its masters are not tensors", path=path, key=name)
        numbers: list[int] = group["params"]
        if len(tensors) != len(numbers):
            raise MalformedError(f"{len(tensors)} masters for {len(numbers)} parameters", path=path, key=name)
        masters |= dict(zip(numbers, tensors, strict=True))
    return masters


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Names of parameters that are experts: those of an expert-parallel rank, and those of all ranks."""

    own: frozenset[str]
    all_ranks: frozenset[str]


@dataclass
class Stage0ManifestBuilder:
    """Builds the manifest of a checkpoint of stage 0, or of one of its expert-parallel ranks, which has ``experts``.

    ``weight_tables`` has the shards of weights that are not one tensor of ``module``. ``literals`` gathers plain
    numbers under names that start with ``literal_prefix``, so that those of several checkpoints that are joined differ.
    ``optimizer_name`` is the name under which the optimizer is kept in the extras if its numbers cannot be matched with
    parameters.
    """

    model: ModelStates
    optimizer: SavedOptimizer
    extras: ExtrasCollector = field(default_factory=ExtrasCollector)
    literals: dict[str, bytes] = field(default_factory=dict)
    literal_prefix: str = ""
    optimizer_name: str = "optimizer"
    skipped_entries: tuple[str, ...] = ("optimizer",)
    experts: ExpertNames | None = None
    weight_tables: Mapping[str, ShardTable] = field(default_factory=dict)

    @property
    def remedy(self) -> str:
        named = ", or with an optimizer that was made from model.named_parameters()" if self.experts is None else ""
        return f"resume the run and save it with ZeRO stage 1{named}"

    def build_manifest(self) -> Manifest:
        """Raises FormatError if the files contradict themselves, UnsupportedError if masters cannot be matched with
        parameters."""
        ties = find_aliases(self.model, lambda alias, one, other: True)
        tensors = dict(self._list_weights(ties))
        parameters = {key.fqn: entry.shape for key, entry in tensors.items() if entry.kind is Kind.PARAMETER}
        group_members = (
            self._find_flat_members(parameters) if self.optimizer.is_flat else self._find_group_members(parameters)
        )
        notes: tuple[Note, ...] = ()
        if group_members is None:
            file = self.optimizer.file
            value = self.extras.replace_tensors(file.content["optimizer"], self.optimizer_name, file)
            self.extras.values["optimizer"] = value
            why = "it numbers its parameters, and their order and shapes do not identify them"
            notes = (Note(Outcome.KEPT, "optimizer", why),)
        elif not self.optimizer.is_flat:
            notes = note_assumed_order(self._list_numbered_groups(), self.optimizer.find_shapes(), parameters)
        for group in group_members or ():
            for name, master_slice in group.items():
                tensors |= dict(self._build_optimizer_entries(name, master_slice))
        self._gather_extras()
        world_size = self.model.file.content.get("dp_world_size")
        return Manifest(
            format="zero0",
            tensors=tensors | self.extras.tensors,
            aliases=ties,
            groups=tuple(self._build_group(number, names) for number, names in enumerate(group_members or ())),
            literals=self.literals,
            extra=self.extras.values,
            step=self.model.step,
            step_claims=tuple(collect_model_claims(self.model.file)),
            world_size=world_size if type(world_size) is int else None,
            notes=notes,
            unnamed_optimizer="" if group_members is not None else f"optimizer: {notes[0].why}; {self.remedy}",
        )

    def _list_weights(self, ties: Mapping[str, str]) -> Iterator[tuple[StateKey, TensorEntry]]:
        for name, value in self.model.module.items():
            refuse_tensor_object(value, name)
            if not isinstance(value, StoredTensor):
                self.extras.add_value("module", name, value, self.model.find_value_file(name))
            elif name not in ties:
                kind = Kind.BUFFER if name in self.model.buffers else Kind.PARAMETER
                table = self.weight_tables.get(name)
                if table is None:
                    table = self.model.find_value_file(name).build_shard_table(value)
                yield StateKey(name), TensorEntry(table.shape, value.dtype, kind, table)

    # Which number is which parameter

    def _find_group_members(self, parameters: Mapping[str, Shape]) -> list[dict[str, MasterSlice]] | None:
        """The slices of each group's parameters by name; None if it cannot be proven which they are. Raises
        UnsupportedError if that cannot be proven and there are masters."""
        names = self._match_numbers(parameters)
        if names is not None:
            numbers = [group["params"] for group in self.optimizer.groups]
            return [{names[n]: MasterSlice(n, 0, prod(parameters[names[n]])) for n in group} for group in numbers]
        if self.optimizer.masters:
            raise UnsupportedError(
                "its fp32 masters lie under numbers, and the order and shapes of the parameters do not prove which "
                f"they are; {self.remedy}",
                path=self.optimizer.file.path,
                key="optimizer",
            )
        return None

    def _match_numbers(self, parameters: Mapping[str, Shape]) -> dict[int, str] | None:
        """The name of each number. Groups of experts have only this rank's experts, and no other group has an expert.
        So the two kinds are matched apart: together, an expert's number could fit another parameter of its shape."""
        groups, shapes, experts = self.optimizer.groups, self.optimizer.find_shapes(), self.experts
        if experts is None:
            return match_numbers(self._list_numbered_groups(), shapes, parameters)
        found: dict[int, str] = {}
        for is_expert in (False, True):
            own_groups = [tuple(group["params"]) for group in groups if bool(group.get("moe")) == is_expert]
            own_shapes = {number: shapes[number] for group in own_groups for number in group if number in shapes}
            own_parameters = {
                name: shape
                for name, shape in parameters.items()
                if (name in experts.own if is_expert else name not in experts.all_ranks)
            }
            matched = match_numbers(list(map(NumberedGroup, own_groups)), own_shapes, own_parameters)
            if matched is None:
                return None
            found |= matched
        return found

    def _list_numbered_groups(self) -> list[NumberedGroup]:
        return [NumberedGroup(tuple(group["params"]), _read_param_names(group)) for group in self.optimizer.groups]

    def _find_flat_members(self, parameters: Mapping[str, Shape]) -> list[dict[str, MasterSlice]]:
        """The slices of each flat group's parameters by name. Raises UnsupportedError if they cannot be told.

        The wrapper flattens the weights of a group, and they become views into that vector. So the storage that views
        fill, and that is as long as the group's master, has its parameters in their order. If several are, none counts.
        """
        if self.experts is not None:
            raise UnsupportedError(
                "its fp32 masters are flat vectors without names; save with ZeRO stage 1",
                path=self.optimizer.file.path,
            )
        names_by_storage: dict[str, dict[int, str]] = {}
        for name in parameters:
            value = self.model.module[name]
            assert isinstance(value, StoredTensor), "parameters are tensors"
            if value.numel and value.storage is not None:
                names_by_storage.setdefault(value.storage.key, {})[value.storage_offset] = name
        layouts = [sizes for views in names_by_storage.values() if (sizes := self._find_view_sizes(views)) is not None]
        group_members = []
        for group in self.optimizer.groups:
            (number,) = group["params"]
            numel = self.optimizer.masters[number].numel
            fitting_layouts = [layout for layout in layouts if sum(layout.values()) == numel]
            if len(fitting_layouts) != 1:
                raise UnsupportedError(
                    f"its fp32 masters are flat vectors without names, and {len(fitting_layouts)} of the model's "
                    f"storages have the {numel:,} elements of one; save with ZeRO stage 1",
                    path=self.model.file.path,
                    key=FLAT_MASTERS,
                )
            layouts.remove(fitting_layouts[0])
            ends = np.cumsum([0, *fitting_layouts[0].values()]).tolist()
            spans = zip(fitting_layouts[0].items(), ends, strict=False)
            group_members.append({name: MasterSlice(number, start, size) for (name, size), start in spans})
        return group_members

    def _find_view_sizes(self, name_by_offset: Mapping[int, str]) -> dict[str, int] | None:
        """The number of elements of each view by name, in order, if they fill the storage from its start without gaps;
        None otherwise. ``name_by_offset`` are the views into one storage."""
        size_by_name: dict[str, int] = {}
        cursor = 0
        for offset in sorted(name_by_offset):
            value = self.model.module[name_by_offset[offset]]
            if offset != cursor or not isinstance(value, StoredTensor) or not value.is_contiguous:
                return None
            size_by_name[name_by_offset[offset]] = value.numel
            cursor += value.numel
        return size_by_name

    # The optimizer's tensors

    def _build_optimizer_entries(self, name: str, master_slice: MasterSlice) -> Iterator[tuple[StateKey, TensorEntry]]:
        shape = tuple(self.model.module[name].shape)
        state = self.optimizer.states.get(master_slice.number, {})
        master = {MASTER: self.optimizer.masters[master_slice.number]} if self.optimizer.masters else {}
        for slot, value in {**master, **state}.items():
            if isinstance(value, StoredTensor):
                yield StateKey(name, slot), self._build_state_entry(name, shape, master_slice, value)
            elif is_number(value):
                table, files = make_number_table(value, f"{self.literal_prefix}{master_slice.number}.{slot}")
                self.literals |= files
                yield StateKey(name, slot), TensorEntry((), table.dtype, Kind.STATE, table)
            elif value is not None:
                self.extras.add_value("optimizer_state", f"{name}.{slot}", value, self.optimizer.file)

    def _build_state_entry(
        self, name: str, shape: Shape, master_slice: MasterSlice, value: StoredTensor
    ) -> TensorEntry:
        file, item_bytes = self.optimizer.file, value.dtype.item_bytes
        if not self.optimizer.is_flat or not value.shape:
            return TensorEntry(tuple(value.shape), value.dtype, Kind.STATE, file.build_shard_table(value))
        master = self.optimizer.masters[master_slice.number]
        if tuple(value.shape) != tuple(master.shape) or not value.is_contiguous:
            raise UnsupportedError("state of a flat group is not cut like its masters", path=file.path)
        start = file.find_start_byte(value) + master_slice.start * item_bytes
        byte_range = ByteRange(file.path, start, start + master_slice.numel * item_bytes)
        table = ShardTable.whole((master_slice.numel,), value.dtype, byte_range)
        return TensorEntry(shape, value.dtype, Kind.STATE, table)

    # Groups and extras

    def _build_group(self, number: int, names: Mapping[str, MasterSlice]) -> ParamGroup:
        items = self.optimizer.groups[number].items()
        options = {str(name): value for name, value in items if name not in ("params", "param_names")}
        return ParamGroup(tuple(names), self.extras.replace_option_tensors(number, options, self.optimizer.file))

    def _gather_extras(self) -> None:
        self.extras.add_model(self.model.file, skipped_entries=self.skipped_entries)
        if entries := self.optimizer.wrapper_entries:
            scaler = {name: entries[name] for name in _SCALER_ENTRIES if name in entries}
            dynamic = entries.get("dynamic_loss_scale") is True
            self.extras.values["loss_scaler"] = {"dynamic": dynamic, **scaler}


def _read_param_names(group: Mapping[str, Value]) -> tuple[str, ...] | None:
    """The names in an optimizer made of named parameters. None if there are none, or not one a parameter: a wrapper may
    have dropped frozen parameters and left their names."""
    names = group.get("param_names")
    if not isinstance(names, list) or len(names) != len(group["params"]):
        return None
    return tuple(names) if all(type(name) is str for name in names) else None

"""Builds the manifest of a ZeRO checkpoint from the headers of its files.

Weights come from ``module`` where it has them (stages 1 and 2). In stage 3 it has only their dtype, and weights are the
masters, cast to it: DeepSpeed itself refills the 16-bit weights from the masters when it loads, stage3.py
``_rigid_load_state_dict``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from math import prod

import numpy as np

from ckpt_tools.core.boxes import Shape
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.literals import is_number, make_number_table
from ckpt_tools.core.manifest import MASTER, WEIGHT, Kind, Manifest, ParamGroup, StateKey, TensorEntry
from ckpt_tools.core.notes import Note, Outcome
from ckpt_tools.core.shards import ShardTable
from ckpt_tools.core.step_claims import StepClaim
from ckpt_tools.core.values import StoredTensor, Value, describe_kind, format_brief
from ckpt_tools.errors import IncompleteError, MalformedError, UnsupportedError
from ckpt_tools.formats.deepspeed.common.files import (
    DeepSpeedFile,
    ModelStates,
    OptimGroup,
    OptimStates,
    collect_model_claims,
)
from ckpt_tools.formats.deepspeed.common.model_file import (
    KeyedEntries,
    check_parameter_names,
    find_aliases,
    get_zero_option,
    make_shape_error,
)
from ckpt_tools.formats.deepspeed.common.partition import MUON_MOMENTUM_SLOT
from ckpt_tools.formats.deepspeed.common.saved_extras import ExtrasCollector
from ckpt_tools.formats.deepspeed.zero_reader.joining import to_comparable_text
from ckpt_tools.formats.deepspeed.zero_reader.placements import (
    FlatIntervals,
    GroupPlacement,
    SlotVectors,
    StoredVector,
    compute_share,
    list_optimizer_order,
    list_placements,
    locate_param,
    locate_parameters,
    locate_whole_momentum,
)
from ckpt_tools.formats.deepspeed.zero_reader.ranks import RankPartitions, is_scalar, locate_vector
from ckpt_tools.state_tree.incomplete_state import refuse_tensor_object
from ckpt_tools.stores.source import Source

ScalarsByFlat = list[Mapping[str, TensorEntry]]
"""For each flat its 0-d slots by name, such as ``step``."""


@dataclass
class ZeroManifestBuilder:
    """Builds the manifest of a checkpoint of ZeRO from the content of its files.

    ``model`` has the experts of all ranks. ``model_paths`` are the model's files, one a rank in stage 3. ``groups`` say
    where the optimizer's state lies, and ``members`` are, in stages 1 and 2, the parameters of each flat in the order
    in which the optimizer got them. ``weight_tables`` has the shards of weights that are not one tensor of ``module``.
    ``skipped_entries`` of the model's file are not kept. ``literals`` gathers plain numbers under names that start with
    ``literal_prefix``, so that those of several checkpoints that are joined differ.
    """

    source: Source
    model: ModelStates
    optim: OptimStates
    model_paths: tuple[str, ...]
    partitions: RankPartitions
    groups: Sequence[GroupPlacement]
    members: Sequence[tuple[str, ...]]
    weight_tables: Mapping[str, ShardTable] = field(default_factory=dict)
    skipped_entries: tuple[str, ...] = ("optimizer",)
    extras: ExtrasCollector = field(default_factory=ExtrasCollector)
    literals: dict[str, bytes] = field(default_factory=dict)
    literal_prefix: str = ""
    _scalars_by_rank: dict[int, ScalarsByFlat] = field(default_factory=dict)

    @classmethod
    def of_all_ranks(
        cls,
        source: Source,
        model: ModelStates,
        optim: OptimStates,
        model_paths: tuple[str, ...],
        partitions: RankPartitions,
        literal_prefix: str = "",
    ) -> ZeroManifestBuilder:
        """The builder of a run without experts: every group is on all ranks."""
        num_flats, all_ranks = len(model.param_shapes), np.arange(len(partitions.masters.files), dtype=np.int64)
        groups = list_placements(model, optim, [[all_ranks]] * num_flats)
        members = [list_optimizer_order(model, optim, flat, len(all_ranks)) for flat in range(num_flats)]
        return cls(source, model, optim, model_paths, partitions, groups, members, literal_prefix=literal_prefix)

    def build_manifest(self) -> Manifest:
        """The manifest of the checkpoint. Raises FormatError if the files contradict each other."""
        tensors = {key: entry for name in self._list_names() for key, entry in self._build_entries(name)}
        groups = tuple(self._build_group(number, group) for number, group in enumerate(self.optim.groups))
        self._gather_extras()
        return Manifest(
            format=f"zero{self.optim.stage}",
            tensors=tensors | self.extras.tensors,
            aliases=self.aliases,
            groups=groups,
            literals=self.literals,
            extra=self.extras.values,
            step=self.model.step,
            world_size=self.optim.world_size,
            notes=tuple(self._make_notes()),
            step_claims=(*chain(*(claims for _, claims in self._rank_models)), *self.partitions.step_claims),
            masters_are_outdated=get_zero_option(self.model, "zenflow") is not None,
        )

    def _make_notes(self) -> Iterator[Note]:
        """Notes on frozen parameters that may be missing.

        Stages 2 and 3 list frozen parameters, with None in place of the list if they were not saved. Stage 1 never
        lists them: if one is in ``module``, all are.
        """
        content = self.model.file.content
        if "frozen_param_shapes" not in content or content["frozen_param_shapes"] is not None:
            return
        what = "weights of frozen parameters, if the run has any"
        if self.optim.stage > 1:
            yield Note(Outcome.MISSING, what, "the checkpoint was saved with exclude_frozen_parameters")
            return
        known_names = {*self.trainable, *self.model.buffers, *self.aliases}
        others = (value for name, value in self.model.module.items() if name not in known_names)
        if not any(isinstance(value, StoredTensor) for value in others):
            why = "there are none, and stage 1 does not record whether exclude_frozen_parameters left them out"
            yield Note(Outcome.MISSING, what, why)

    @cached_property
    def trainable(self) -> Mapping[str, Shape]:
        return self.model.trainable

    def check_partitions(self) -> None:
        """Raises MalformedError if the partitions do not fit the shapes of the parameters."""
        locate_parameters(self.groups, self.partitions.masters, self.partitions.paddings, self.optim.stage)

    @cached_property
    def param_intervals(self) -> Mapping[str, FlatIntervals]:
        """Intervals of each trainable parameter that has elements."""
        return locate_parameters(self.groups, self.partitions.masters, self.partitions.paddings, self.optim.stage)

    @cached_property
    def momentum_intervals(self) -> Mapping[str, FlatIntervals]:
        """Intervals of Muon's momentum by parameter, of those that its vectors hold whole."""
        return locate_whole_momentum(self.param_intervals, self.partitions.momentum)

    @cached_property
    def aliases(self) -> Mapping[str, str]:
        """Tied parameters, by alias."""
        return find_aliases(self.model, self._are_tied)

    def _are_tied(self, alias: str, one: StoredTensor, other: StoredTensor) -> bool:
        if self.optim.stage == 3:
            return alias not in self.model.frozen_shapes
        return one.numel > 0 and one.shape == other.shape

    def _list_names(self) -> list[str]:
        """The model's own names in its own order, each tie once. Raises IncompleteError."""
        check_parameter_names(self.model)
        return [name for name in self.model.module if name not in self.aliases and not self._is_alias_of_excluded(name)]

    def _is_alias_of_excluded(self, name: str) -> bool:
        """Whether ``exclude_frozen_parameters`` took the owner of a tie and left its alias, empty, behind."""
        value, owner = self.model.module[name], self.model.ties.get(name)
        is_left_behind = owner is not None and owner not in self.model.module
        return is_left_behind and isinstance(value, StoredTensor) and not value.numel

    def _build_entries(self, name: str) -> KeyedEntries:
        """The entries of one name: its weight or buffer, and the optimizer's state."""
        value = self.model.module[name]
        refuse_tensor_object(value, name)
        if not isinstance(value, StoredTensor) and name not in self.trainable:
            self.extras.add_value("module", name, value, self.model.find_value_file(name))
            return
        if not isinstance(value, StoredTensor):
            raise MalformedError(
                f"module contains a {describe_kind(value)} instead of a tensor", path=self.model.file.path, key=name
            )
        yield StateKey(name, WEIGHT), self._build_weight(name, value)
        if name in self.param_intervals:
            yield from self._build_states(name, self.trainable[name], self.param_intervals[name])

    def _build_weight(self, name: str, value: StoredTensor) -> TensorEntry:
        if (table := self.weight_tables.get(name)) is not None:
            return TensorEntry(table.shape, table.dtype, Kind.PARAMETER, table)
        kind = Kind.BUFFER if name in self.model.buffers else Kind.PARAMETER
        shape = self._find_whole_shape(name, value)
        if tuple(value.shape) == shape:
            return TensorEntry(shape, value.dtype, kind, self.model.find_value_file(name).build_shard_table(value))
        if self.optim.stage < 3 or value.numel:
            raise make_shape_error(self.model, name, value, shape)
        return TensorEntry(shape, value.dtype, kind, self._build_partitioned_table(name, shape, value.dtype))

    def _find_whole_shape(self, name: str, value: StoredTensor) -> Shape:
        """The shape of the whole weight; in stage 3 ``module`` has an empty tensor in place of one that is cut."""
        if name in self.model.buffers:
            return tuple(value.shape)
        frozen_shapes = self.model.frozen_shapes if self.optim.stage == 3 else {}
        shape = self.trainable.get(name, frozen_shapes.get(name))
        if shape is None and self.optim.stage == 3 and not value.numel:
            why = "no file contains the elements of this parameter"
            raise IncompleteError(why, path=self.model.file.path, key=name)
        return tuple(value.shape) if shape is None else shape

    def _build_partitioned_table(self, name: str, shape: Shape, dtype: DType) -> ShardTable:
        """The elements of a weight in stage 3: its masters, or if it is frozen the ranks' fragments."""
        if not prod(shape):
            return ShardTable.build(shape, dtype, [])
        if name in self.param_intervals:
            return self.partitions.masters.build_shard_table(self.param_intervals[name])
        fragments = {(rank, 0): own[name] for rank, (own, _) in enumerate(self._rank_models) if name in own}
        # Each rank's fragment is a vector of its own, flat 0, that holds one share.
        numel, world_size = prod(shape), self.optim.world_size
        intervals = locate_param(0, numel, world_size, np.array([0, compute_share(numel, world_size)]))
        return SlotVectors.of(f"the frozen {name}", self.model_paths, fragments, 1).build_shard_table(intervals)

    @cached_property
    def _rank_models(self) -> list[tuple[Mapping[str, StoredVector], list[StepClaim]]]:
        """The fragments of frozen parameters and the step claims of each model file; only stage 3 has several. Raises
        MalformedError if they differ in the number of ranks."""
        return list(self.source.map_files(self._read_rank_model, self.model_paths))

    def _read_rank_model(self, source: Source, path: str) -> tuple[Mapping[str, StoredVector], list[StepClaim]]:
        is_first = path == self.model.file.path
        model = self.model if is_first else ModelStates.of(DeepSpeedFile.open(source, path))
        sizes = [each.file.content.get("dp_world_size") for each in (model, self.model)]
        if sizes[0] != sizes[1]:
            why = f"its dp_world_size is {format_brief(sizes[0])} but that of rank 0 is {format_brief(sizes[1])}"
            raise MalformedError(why, path=path)
        fragments = ((name, each) for name, each in model.frozen_fragments.items() if each.numel)
        return {name: locate_vector(model.file, each) for name, each in fragments}, collect_model_claims(model.file)

    def _build_states(self, name: str, shape: Shape, intervals: FlatIntervals) -> KeyedEntries:
        yield StateKey(name, MASTER), _make_state_entry(shape, self.partitions.masters.build_shard_table(intervals))
        for slot in self.partitions.slots:
            if slot.has_intervals(intervals):
                yield StateKey(name, slot.name), _make_state_entry(shape, slot.build_shard_table(intervals))
        if name in self.momentum_intervals:
            yield (
                StateKey(name, MUON_MOMENTUM_SLOT),
                _make_state_entry(shape, self.partitions.momentum.build_shard_table(self.momentum_intervals[name])),
            )
        for slot_name, entry in self._find_scalars(name)[int(intervals.flats[0])].items():
            yield StateKey(name, slot_name), entry

    # What is not cut

    def _find_scalars(self, name: str) -> ScalarsByFlat:
        """The scalars of the first rank that has the parameter. Raises UnsupportedError if ranks have rows of it each,
        and other scalars than rank 0."""
        ranks = [int(group.ranks[0]) for group in self.groups_by_name[name]]
        scalars = [self._get_scalars_of_rank(rank) for rank in ranks]
        for rank, each in zip(ranks, scalars, strict=True) if len(ranks) > 1 else ():
            if each is not self.scalars:
                raise UnsupportedError(
                    "its step is not that of rank 0, which has other experts of the same tensors",
                    path=self.partitions.masters.files[rank],
                )
        return scalars[0]

    @cached_property
    def groups_by_name(self) -> Mapping[str, list[GroupPlacement]]:
        """By parameter the groups that have it: of rows of experts, those of all expert-parallel ranks."""
        groups_by_name: dict[str, list[GroupPlacement]] = {}
        for group in self.groups:
            for name in group.numels:
                groups_by_name.setdefault(name, []).append(group)
        return groups_by_name

    @cached_property
    def scalars(self) -> ScalarsByFlat:
        """The 0-d state of each flat of rank 0, which has elements of every parameter (stage 3) or group (1, 2) but for
        experts of other ranks."""
        return self._read_scalars(self.optim, self.literal_prefix)

    def _get_scalars_of_rank(self, rank: int) -> ScalarsByFlat:
        """The scalars of a rank; ``self.scalars`` itself if they are equal to those of rank 0. Raises MalformedError if
        the rank has other param groups."""
        if rank == 0:
            return self.scalars
        if rank not in self._scalars_by_rank:
            optim = OptimStates.of(DeepSpeedFile.open(self.source, self.partitions.masters.files[rank]))
            options = [[to_comparable_text(group.options) for group in each.groups] for each in (optim, self.optim)]
            if options[0] != options[1]:
                raise MalformedError("its param groups are not those of rank 0", path=optim.file.path)
            scalars = self._read_scalars(optim, f"rank{rank}.")
            self._scalars_by_rank[rank] = self.scalars if self._are_scalars_equal(scalars, self.scalars) else scalars
        return self._scalars_by_rank[rank]

    def _are_scalars_equal(self, one: ScalarsByFlat, other: ScalarsByFlat) -> bool:
        """Whether all scalars are equal, so that a value that all ranks have is read from one place."""
        return [[*slots] for slots in one] == [[*slots] for slots in other] and all(
            mine.dtype is theirs[slot].dtype and self._read_entry_bytes(mine) == self._read_entry_bytes(theirs[slot])
            for slots, theirs in zip(one, other, strict=True)
            for slot, mine in slots.items()
        )

    def _read_entry_bytes(self, entry: TensorEntry) -> bytes:
        byte_range = entry.shards.get_byte_range(0)
        if byte_range.file in self.literals:
            return self.literals[byte_range.file]
        return self.source.read(byte_range.file, byte_range.start, byte_range.stop)

    def _read_scalars(self, optim: OptimStates, literal_prefix: str) -> ScalarsByFlat:
        step_by_flat = {flat: group.options.get("step") for group in optim.groups for flat in group.flats}
        scalars_by_flat: ScalarsByFlat = []
        for flat, state in enumerate(optim.states):
            values = {slot: value for slot, value in state.items() if is_scalar(value)}
            # Apex keeps one step for a whole group, among its hyperparameters.
            if "step" not in values and is_scalar(group_step := step_by_flat.get(flat)):
                values["step"] = group_step
            scalars_by_flat.append(
                {
                    slot: self._read_scalar(optim.file, f"{literal_prefix}{flat}.{slot}", value)
                    for slot, value in values.items()
                }
            )
        return scalars_by_flat

    def _read_scalar(self, file: DeepSpeedFile, name: str, value: Value) -> TensorEntry:
        if isinstance(value, StoredTensor):
            return _make_state_entry((), file.build_shard_table(value))
        if not is_number(value):
            raise MalformedError(f"a step or another counter of the optimizer is {value.bit_length()} bits long")
        table, files = make_number_table(value, name)
        self.literals |= files
        return _make_state_entry((), table)

    def _build_group(self, number: int, group: OptimGroup) -> ParamGroup:
        options = self.extras.replace_option_tensors(number, group.options, self.optim.file)
        return ParamGroup(self._list_members(group), options)

    def _list_members(self, group: OptimGroup) -> tuple[str, ...]:
        """The parameters of a group in the order in which the optimizer got them.

        A group is one flat in stages 1 and 2, but for Adagrad: DeepSpeed remakes it with a single group of all flats.
        """
        if self.optim.stage == 3:
            flats = set(group.flats)
            return tuple(name for name, pieces in self.param_intervals.items() if int(pieces.flats[0]) in flats)
        return tuple(name for flat in group.flats for name in self.members[flat])

    def _gather_extras(self) -> None:
        self.extras.add_model(self.model.file, skipped_entries=self.skipped_entries)
        self.extras.add_optimizer(self.optim.file, self.optim.state_dict)
        for state in self.partitions.other_states:
            self.extras.add_value("partition_state", state.rank, dict(state.slots), state.file)


def _make_state_entry(shape: Shape, table: ShardTable) -> TensorEntry:
    return TensorEntry(shape, table.dtype, Kind.STATE, table)

"""Runs with experts that AutoEP distributed, as one checkpoint whose tensors have the experts of all ranks.

Stages 1 and 2 have a file for each expert, and partitions as runs with ``deepspeed.moe`` layers have. Stage 3 has the
experts in the partitions alone, and cuts a rank's over the ranks that hold the same ones (stage3.py
``_zero3_partition_group_metadata``). Without ZeRO there is a file for each expert, and for each expert-parallel rank
one of its whole optimizer, which numbers its parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from typing import ClassVar

import numpy as np

from ckpt_tools.core.boxes import Box, Shape
from ckpt_tools.core.manifest import EqualPair, Kind, Manifest, StateKey, TensorEntry
from ckpt_tools.core.shards import ByteRange, Ints, Shard, ShardTable
from ckpt_tools.core.values import StoredTensor
from ckpt_tools.errors import IncompleteError, MalformedError, UnsupportedError
from ckpt_tools.formats.deepspeed.common.files import DeepSpeedFile, ModelStates, OptimStates
from ckpt_tools.formats.deepspeed.common.fused_experts import (
    DISTRIBUTION_ENTRIES,
    FOLDED_RUN_TEXT,
    AutoEPLayer,
    AutoEPLayers,
)
from ckpt_tools.formats.deepspeed.common.tensor_parallel import MergeRules, ParameterMerge
from ckpt_tools.formats.deepspeed.names import expert_file_name, expert_optim_file_name
from ckpt_tools.formats.deepspeed.zero_reader import stage0
from ckpt_tools.formats.deepspeed.zero_reader.checks import PARTITION_GROUPS_ENTRY, check_expert_run
from ckpt_tools.formats.deepspeed.zero_reader.contents import ScalarsByFlat
from ckpt_tools.formats.deepspeed.zero_reader.experts import MoEExperts
from ckpt_tools.formats.deepspeed.zero_reader.flat import FlatIntervals
from ckpt_tools.formats.deepspeed.zero_reader.joining import ManifestMerger
from ckpt_tools.formats.deepspeed.zero_reader.locate_elements import locate_params
from ckpt_tools.formats.deepspeed.zero_reader.moe import MoEManifestBuilder, read_mapped_partitions
from ckpt_tools.formats.deepspeed.zero_reader.moe_stage0 import ExpertRankManifestBuilder
from ckpt_tools.formats.deepspeed.zero_reader.ranks import read_partitions
from ckpt_tools.formats.deepspeed.zero_reader.tag_files import ExpertFiles, TagFiles
from ckpt_tools.messages.wording import format_count
from ckpt_tools.stores.source import Source


def read(source: Source, mp_rank_files: Sequence[TagFiles], files: ExpertFiles, ep_layers: AutoEPLayers) -> Manifest:
    """The whole model of a run in stage 0, 1 or 2. Raises FormatError if a file is missing or damaged, or does not fit
    the others."""
    if len(mp_rank_files) > 1:
        raise UnsupportedError(FOLDED_RUN_TEXT, path=mp_rank_files[1].require_model_paths(0)[0])
    tag_files = mp_rank_files[0]
    if not tag_files.optim_paths:
        return _read_without_zero(source, tag_files, files, ep_layers)
    optim = OptimStates.of(DeepSpeedFile.open(source, tag_files.optim_paths[0]))
    if optim.stage > 2 or files.optim_paths:
        raise MalformedError(
            "it is of a run in stage 1 or 2, perhaps from an earlier save",
            path=min(files.weight_paths.values(), default=ep_layers.path),
        )
    model = ModelStates.of(DeepSpeedFile.open(source, tag_files.require_model_paths(optim.stage)[0]))
    check_expert_run(tag_files, model, optim)
    expert_tables, first_values = read_expert_weights(source, ep_layers, model, files)
    partitions, mappings_by_rank = read_mapped_partitions(source, tag_files.optim_paths, optim)
    num_ranks = {flat: len(tag_files.optim_paths) // parts for flat, parts in enumerate(optim.partition_counts)}
    _check_expert_groups(ep_layers, model, num_ranks, optim.file.path)
    return AutoEPManifestBuilder(
        source,
        ep_layers.add_all_experts(model, first_values),
        optim,
        (model.file.path,),
        partitions,
        experts=MoEExperts({}, {}),
        local_model=model,
        num_expert_ranks=num_ranks,
        mappings_by_rank=mappings_by_rank,
        expert_tables=expert_tables,
    ).build_manifest()


@dataclass(kw_only=True)
class AutoEPManifestBuilder(MoEManifestBuilder):
    """Builds the manifest of a run in stage 1 or 2. ``expert_tables`` has the shards of the tensors of experts, by
    name, if these have files of their own."""

    expert_tables: Mapping[str, ShardTable]
    skipped_entries: ClassVar[tuple[str, ...]] = ("optimizer", *DISTRIBUTION_ENTRIES)

    def _build_weight(self, name: str, value: StoredTensor) -> TensorEntry:
        if name not in self.expert_tables:
            return super()._build_weight(name, value)
        table = self.expert_tables[name]
        return TensorEntry(table.shape, table.dtype, Kind.PARAMETER, table)

    def _find_scalars(self, intervals: FlatIntervals) -> ScalarsByFlat:
        """The scalars of rank 0. Raises UnsupportedError if ranks with other rows of the same tensor have others."""
        flat = int(intervals.flats[0])
        for rank in range(self.num_expert_ranks[flat]):
            first = int(self._list_data_ranks(flat, rank)[0])
            if self._get_scalars_of_rank(first) is not self.scalars:
                raise UnsupportedError(
                    "its step is not that of rank 0, which has other experts of the same tensors",
                    path=self.partitions.masters.files[first],
                )
        return self.scalars


def _check_expert_groups(ep_layers: AutoEPLayers, model: ModelStates, num_ranks: Mapping[int, int], path: str) -> None:
    """Raises MalformedError if a group of partitions is not cut over the ranks of its experts. ``num_ranks`` is the
    number of expert-parallel ranks by flat."""
    for flat, shapes in enumerate(model.param_shapes):
        expected_ranks = {layer.num_ranks if (layer := ep_layers.find_layer(name)) else 1 for name in shapes}
        if shapes and expected_ranks != {num_ranks.get(flat)}:
            raise MalformedError(f"its group {flat} of partitions is not cut over the ranks of its experts", path=path)


# The files of experts


def read_expert_weights(
    source: Source, ep_layers: AutoEPLayers, model: ModelStates, files: ExpertFiles, expert_rank: int | None = None
) -> tuple[dict[str, ShardTable], dict[str, tuple[StoredTensor, DeepSpeedFile]]]:
    """Two mappings by the names of the tensors of experts: the shards of all experts' rows, or of those of
    ``expert_rank``; and the first expert's tensor with its file. Raises FormatError if a file is missing or is not of
    its expert."""
    shapes = {**model.trainable, **model.frozen_shapes}
    names = ep_layers.list_expert_tensors(model)
    tables: dict[str, ShardTable] = {}
    first_values: dict[str, tuple[StoredTensor, DeepSpeedFile]] = {}
    expected_experts = {(layer.moe_number, number) for layer in ep_layers.layers for number in range(layer.num_experts)}
    if missing_experts := expected_experts - files.weight_paths.keys():
        path = files.prefix + expert_file_name(*min(missing_experts))
        raise IncompleteError("the file of this expert is missing", path=path)
    if unexpected_experts := files.weight_paths.keys() - expected_experts:
        raise MalformedError(
            "there is no such expert; this file is perhaps from an earlier save",
            path=files.weight_paths[min(unexpected_experts)],
        )
    # Row i of a tensor is in the file of expert i, or with ``expert_rank`` in that of the rank's i-th expert.
    for layer in ep_layers.layers:
        layer_names = [name for name in names if ep_layers.find_layer(name) is layer]
        numbers, num_local = range(layer.num_experts), layer.num_local_experts
        if expert_rank is not None:
            numbers = numbers[expert_rank * num_local : (expert_rank + 1) * num_local]
        expert_files = [DeepSpeedFile.open(source, files.weight_paths[layer.moe_number, number]) for number in numbers]
        numbered_files = zip(numbers, expert_files, strict=True)
        parts = [_read_expert(file, number, layer, layer_names) for number, file in numbered_files]
        for name in layer_names:
            shape = (len(numbers), *shapes[name][1:])
            tables[name] = _stack_experts(shape, [each[name] for each in parts], expert_files, name)
            first_values[name] = parts[0][name], expert_files[0]
    return tables, first_values


def _read_expert(file: DeepSpeedFile, number: int, layer: AutoEPLayer, names: Sequence[str]) -> dict[str, StoredTensor]:
    """The tensors of expert ``number`` by the names in the model: ``experts.w1`` for ``experts.w1.3`` in the file."""
    value_by_name = {f"{name}.{number}": file.content.get(f"{name}.{number}") for name in names}
    parts = {name.rpartition(".")[0]: value for name, value in value_by_name.items() if isinstance(value, StoredTensor)}
    if file.content.keys() != value_by_name.keys() or len(parts) < len(names):
        raise MalformedError(f"it does not hold expert {number} of {layer.module_name} alone", path=file.path)
    return parts


def _stack_experts(
    shape: tuple[int, ...], parts: Sequence[StoredTensor], files: Sequence[DeepSpeedFile], name: str
) -> ShardTable:
    """The shards of a tensor of ``shape`` whose row i is ``parts[i]`` in ``files[i]``."""
    shards = []
    for number, (part, file) in enumerate(zip(parts, files, strict=True)):
        if tuple(part.shape) != shape[1:] or part.dtype is not parts[0].dtype or not part.is_contiguous:
            raise MalformedError(f"its {name} is not as param_shapes states", path=file.path)
        start = file.find_start_byte(part)
        box = Box((number, *(0,) * (len(shape) - 1)), (number + 1, *shape[1:]))
        shards.append(Shard(box, ByteRange(file.path, start, start + part.numel * part.dtype.item_bytes)))
    return ShardTable.build(shape, parts[0].dtype, shards)


# Stage 3


def open_stage3(
    source: Source, files: TagFiles, model: ModelStates, optim: OptimStates, ep_layers: AutoEPLayers
) -> AutoEPStage3ManifestBuilder:
    """The builder of a run in stage 3. Raises FormatError as ``read`` does."""
    if optim.stage < 3:
        raise IncompleteError("the files of its experts are missing", path=files.prefix + expert_file_name(0, 0))
    world_size = optim.world_size
    expert_ranks = read_expert_ranks(source, files.rank_model_paths, world_size)
    _check_sub_groups(model, ep_layers, optim.file.path, len(optim.masters))
    num_ranks = {
        flat: ep_layers.layers[0].num_ranks if any(map(ep_layers.find_layer, shapes)) else 1
        for flat, shapes in enumerate(model.param_shapes)
    }
    _check_expert_groups(ep_layers, model, num_ranks, model.file.path)
    visited_states: list[OptimStates] = []

    def check_partition_ranks(states: OptimStates) -> None:
        """``ds_zero_partition_groups`` list, for each sub-group, the ranks over which it is cut: those that hold the
        same experts, or all."""
        rank = len(visited_states)
        visited_states.append(states)
        groups = states.state_dict.get(PARTITION_GROUPS_ENTRY)
        for flat, num in num_ranks.items():
            expected_ranks = np.flatnonzero(expert_ranks == expert_ranks[rank]) if num > 1 else np.arange(world_size)
            group = groups[flat] if isinstance(groups, list) and flat < len(groups) else None
            if not isinstance(group, dict) or group.get("partition_ranks") != expected_ranks.tolist():
                why = f"its {PARTITION_GROUPS_ENTRY} are not those of its experts"
                raise MalformedError(why, path=states.file.path)

    partitions = read_partitions(source, files.optim_paths, optim, check_partition_ranks)
    return AutoEPStage3ManifestBuilder(
        source,
        ep_layers.add_all_experts(model),
        optim,
        files.rank_model_paths,
        partitions,
        experts=MoEExperts({}, {}),
        local_model=model,
        num_expert_ranks=num_ranks,
        mappings_by_rank=[[]] * world_size,
        expert_tables={},
        expert_ranks=expert_ranks,
        ep_layers=ep_layers,
    )


def _check_sub_groups(model: ModelStates, ep_layers: AutoEPLayers, path: str, num_flats: int) -> None:
    if len(model.param_shapes) != num_flats:
        raise MalformedError(
            f"it has {num_flats} partitions, but param_shapes has {len(model.param_shapes)}", path=path
        )
    if any(map(ep_layers.find_layer, model.frozen_shapes)):
        raise UnsupportedError("its experts are frozen, which is not supported in stage 3", path=model.file.path)


@dataclass(kw_only=True)
class AutoEPStage3ManifestBuilder(AutoEPManifestBuilder):
    """Builds the manifest of a run in stage 3. ``expert_ranks`` has the expert-parallel rank of each rank.

    A tensor of 4 experts on 4 ranks with the expert-parallel ranks 0, 1, 0, 1:
        rows 0 and 1, the experts of expert-parallel rank 0, are cut over ranks 0 and 2,
        rows 2 and 3, the experts of expert-parallel rank 1, are cut over ranks 1 and 3.
    """

    expert_ranks: Ints
    ep_layers: AutoEPLayers

    @cached_property
    def param_intervals(self) -> Mapping[str, FlatIntervals]:
        world_size = len(self.mappings_by_rank)
        counts = [world_size // self.num_expert_ranks[flat] for flat in range(len(self.optim.masters))]
        found = locate_params(self.local_model.param_shapes, self.partitions.masters, counts)
        return {
            name: reduce(FlatIntervals.concatenate_rows, self._locate_on_all_ranks(name, found[name]))
            for shapes in self.local_model.param_shapes
            for name in shapes
            if name in found
        }

    def _locate_on_all_ranks(self, name: str, intervals: FlatIntervals) -> list[FlatIntervals]:
        """Intervals of the rows of each expert-parallel rank; one item if ``name`` is not of experts. ``intervals`` are
        those of one expert-parallel rank, and number its data-parallel ranks from 0."""
        if self.ep_layers.find_layer(name) is None:
            return [intervals]
        flat = int(intervals.flats[0])
        data_ranks = (self._list_data_ranks(flat, rank) for rank in range(self.num_expert_ranks[flat]))
        return [replace(intervals, ranks=own[intervals.ranks]) for own in data_ranks]

    def _list_expert_ranks(self, flat: int, *, is_data_first: bool) -> Ints:
        return self.expert_ranks if self.num_expert_ranks[flat] > 1 else np.zeros_like(self.expert_ranks)

    @cached_property
    def _is_data_first(self) -> bool:
        return False


def read_expert_ranks(source: Source, paths: Sequence[str], world_size: int) -> Ints:
    """The expert-parallel rank of each rank in stage 3, as its model file states it. Raises FormatError."""
    expert_ranks = []
    for path in paths:
        layers = AutoEPLayers.of(DeepSpeedFile.open(source, path)).layers
        ranks = {layer.rank for layer in layers}
        if len(ranks) != 1:
            raise MalformedError("its layers do not state one expert-parallel rank", path=path)
        expert_ranks.append(ranks.pop())
    ranks_per_expert_rank = np.bincount(np.array(expert_ranks, np.int64))
    if len(expert_ranks) != world_size or len(set(ranks_per_expert_rank.tolist())) != 1:
        raise MalformedError(
            f"the experts are not spread evenly over {format_count(world_size, 'rank')}", path=paths[0]
        )
    return np.array(expert_ranks, np.int64)


# Without ZeRO


@dataclass(kw_only=True)
class AutoEPRankManifestBuilder(ExpertRankManifestBuilder):
    """Builds the manifest of one expert-parallel rank. ``expert_tables`` has the shards of its experts' tensors."""

    ep_layers: AutoEPLayers
    expert_tables: Mapping[str, ShardTable]
    skipped_entries = AutoEPManifestBuilder.skipped_entries

    def _list_weights(self, ties: Mapping[str, str]) -> Iterator[tuple[StateKey, TensorEntry]]:
        for key, entry in super()._list_weights(ties):
            table = self.expert_tables.get(key.fqn)
            yield key, entry if table is None else TensorEntry(table.shape, table.dtype, Kind.PARAMETER, table)

    def _is_own_parameter(self, name: str, *, is_expert: bool) -> bool:
        return (name in self.expert_tables) == is_expert


@dataclass(frozen=True, slots=True)
class AutoEPMergeRules(MergeRules):
    """Joins experts along their first dim; all else is a copy on every rank."""

    ep_layers: AutoEPLayers

    def plan_merge(self, name: str, shapes: Sequence[Shape]) -> ParameterMerge:
        if self.ep_layers.find_layer(name):
            return self.merge_along(name, shapes, 0)
        return self.merge_replicated(name, shapes)


def _read_without_zero(source: Source, tag_files: TagFiles, files: ExpertFiles, ep_layers: AutoEPLayers) -> Manifest:
    file = stage0.open_stage0_model(source, tag_files)
    num_ranks = ep_layers.layers[0].num_ranks
    if file.content.get("optimizer") is not None and len(files.optim_paths) != num_ranks:
        raise IncompleteError(
            f"the files of the optimizers of {format_count(num_ranks, 'expert-parallel rank')} are not all there",
            path=files.prefix + expert_optim_file_name(min(len(files.optim_paths), num_ranks - 1)),
        )
    optimizers = [stage0.SavedOptimizer.of(DeepSpeedFile.open(source, path)) for path in files.optim_paths] or [
        stage0.SavedOptimizer(file)
    ] * num_ranks
    model = replace(ModelStates.of_stage0(file), param_shapes=(_read_local_shapes(source, ep_layers, files),))
    parts = []
    for rank, each in enumerate(optimizers):
        expert_tables, first_values = read_expert_weights(source, ep_layers, model, files, rank)
        rank_model = replace(ep_layers.add_all_experts(model, first_values), param_shapes=())
        parts.append(
            AutoEPRankManifestBuilder(
                rank_model,
                each,
                literal_prefix=f"rank{rank}.",
                rank=rank,
                ep_layers=ep_layers,
                expert_tables=expert_tables,
            ).build_manifest()
        )
    merged = ManifestMerger(
        parts, AutoEPMergeRules({}, ep_layers.path, ep_layers), part_name="expert-parallel rank"
    ).merge_manifests()
    literals = {name: data for part in parts for name, data in part.literals.items()}
    # A tensor of experts has one step, for which each expert-parallel rank has a value.
    equal_steps = [
        EqualPair(f"{key} of expert-parallel ranks 0 and {rank}", entry, part.tensors[key])
        for key, entry in parts[0].tensors.items()
        if entry.kind is Kind.STATE and not entry.shape and ep_layers.find_layer(key.fqn)
        for rank, part in enumerate(parts[1:], 1)
    ]
    must_equal = (*merged.must_equal, *equal_steps)
    return replace(merged, world_size=parts[0].world_size, literals=literals, must_equal=must_equal)


def _read_local_shapes(source: Source, ep_layers: AutoEPLayers, files: ExpertFiles) -> dict[str, Shape]:
    """The shapes of one rank's tensors of experts, from the file of each layer's first expert: without ZeRO no file
    states them."""
    shape_by_name: dict[str, Shape] = {}
    for layer in ep_layers.layers:
        path = files.weight_paths.get((layer.moe_number, 0))
        for name, value in (DeepSpeedFile.open(source, path).content if path else {}).items():
            if isinstance(name, str) and name.startswith(layer.expert_prefix) and isinstance(value, StoredTensor):
                shape_by_name[name.removesuffix(".0")] = (layer.num_local_experts, *value.shape)
    return shape_by_name

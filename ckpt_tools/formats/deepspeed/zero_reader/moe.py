"""Runs with ``deepspeed.moe`` layers: one checkpoint with the experts of all ranks.

The optimizer of experts is cut over the ranks that hold the same experts, and that of the rest over all ranks:
stage_1_and_2.py ``_configure_moe_settings``. Which ranks these are, ``param_slice_mappings`` prove: expert-parallel
rank e has the data-parallel ranks e, e + N, ... of N expert-parallel ranks, or with
``use_data_before_expert_parallelism`` the e-th run of ranks (utils/groups.py ``_create_expert_and_data_parallel``).

Of a run without ZeRO, ``moe_stage0`` reads the files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from ckpt_tools.core.boxes import Shape
from ckpt_tools.core.manifest import Manifest, TensorEntry
from ckpt_tools.core.shards import Ints
from ckpt_tools.errors import MalformedError, UnsupportedError
from ckpt_tools.formats.deepspeed.common.files import DeepSpeedFile, ModelStates, OptimStates
from ckpt_tools.formats.deepspeed.common.model_file import check_model_parts, is_round_robin
from ckpt_tools.formats.deepspeed.common.partition import undo_round_robin
from ckpt_tools.formats.deepspeed.names import split_expert_name
from ckpt_tools.formats.deepspeed.zero_reader import moe_stage0
from ckpt_tools.formats.deepspeed.zero_reader.checks import check_expert_run
from ckpt_tools.formats.deepspeed.zero_reader.contents import ScalarsByFlat, ZeroManifestBuilder
from ckpt_tools.formats.deepspeed.zero_reader.experts import MoEExperts, count_local_experts, open_expert_layers
from ckpt_tools.formats.deepspeed.zero_reader.flat import FlatIntervals
from ckpt_tools.formats.deepspeed.zero_reader.joining import to_comparable_text
from ckpt_tools.formats.deepspeed.zero_reader.locate_elements import (
    find_partition_numel,
    locate_group,
    partition_group,
)
from ckpt_tools.formats.deepspeed.zero_reader.ranks import (
    RankPartitions,
    SliceMapping,
    read_partitions,
    read_slice_mappings,
)
from ckpt_tools.formats.deepspeed.zero_reader.tag_files import ExpertFiles, TagFiles
from ckpt_tools.stores.source import Source

MAPPINGS_ENTRY = "param_slice_mappings"


def read(source: Source, mp_rank_files: Sequence[TagFiles], files: ExpertFiles) -> Manifest:
    """The whole model. Raises FormatError if a file is missing or damaged, or does not fit the others."""
    if len(mp_rank_files) > 1:
        raise UnsupportedError(
            "it is of a run with experts that is also tensor parallel, which is not supported; save it without "
            "tensor parallelism",
            path=mp_rank_files[1].require_model_paths(0)[0],
        )
    tag_files = mp_rank_files[0]
    if not tag_files.optim_paths:
        return moe_stage0.read(source, tag_files, files)
    optim = OptimStates.of(DeepSpeedFile.open(source, tag_files.optim_paths[0]))
    if optim.stage > 2:
        raise UnsupportedError("DeepSpeed has no experts in ZeRO-3", path=optim.file.path)
    if files.optim_paths:
        raise MalformedError("it is of a run without ZeRO, perhaps from an earlier save", path=files.optim_paths[0])
    model = ModelStates.of(DeepSpeedFile.open(source, tag_files.require_model_paths(optim.stage)[0]))
    check_model_parts(model, 1)
    check_expert_run(tag_files, model, optim)
    return _open_zero_run(source, tag_files.optim_paths, model, optim, files).build_manifest()


def _open_zero_run(
    source: Source, paths: tuple[str, ...], model: ModelStates, optim: OptimStates, files: ExpertFiles
) -> MoEManifestBuilder:
    partitions, mappings_by_rank = read_mapped_partitions(source, paths, optim)
    layers = open_expert_layers(source, model, files)
    num_expert_ranks = {flat: len(paths) // parts for flat, parts in enumerate(optim.partition_counts)}
    ranks_by_prefix = _count_ranks_by_layer(model, num_expert_ranks, optim.file.path)
    experts = MoEExperts(layers, count_local_experts(layers, model, ranks_by_prefix))
    return MoEManifestBuilder(
        source,
        experts.add_all_experts(model),
        optim,
        (model.file.path,),
        partitions,
        experts=experts,
        local_model=model,
        num_expert_ranks=num_expert_ranks,
        mappings_by_rank=mappings_by_rank,
    )


def read_mapped_partitions(
    source: Source, paths: Sequence[str], optim: OptimStates
) -> tuple[RankPartitions, list[list[SliceMapping]]]:
    """The vectors of all ranks, and the ``param_slice_mappings`` of each. Raises UnsupportedError if a file has none;
    FormatError as ``read_partitions`` does."""
    mappings_by_rank: list[list[SliceMapping]] = []

    def collect_mappings(states: OptimStates) -> None:
        if MAPPINGS_ENTRY not in states.state_dict:
            raise UnsupportedError(
                f"it has no {MAPPINGS_ENTRY} with the experts of each rank; load the run in DeepSpeed 0.8 or later "
                "and save it",
                path=states.file.path,
            )
        mappings_by_rank.append(read_slice_mappings(states.file))

    return read_partitions(source, paths, optim, collect_mappings), mappings_by_rank


def _count_ranks_by_layer(model: ModelStates, num_expert_ranks: Mapping[int, int], path: str) -> dict[str, int]:
    """The number of expert-parallel ranks of each layer with experts, by prefix, from the partitions of its groups.
    Raises MalformedError if a layer's groups differ in it, or if a group without experts is not cut over all ranks."""
    ranks_by_prefix: dict[str, int] = {}
    for flat, shapes in enumerate(model.param_shapes):
        for name in shapes if flat in num_expert_ranks else ():
            parts = split_expert_name(name)
            num_ranks = num_expert_ranks[flat]
            expected_ranks = 1 if parts is None else ranks_by_prefix.setdefault(parts[0], num_ranks)
            if num_ranks != expected_ranks:
                why = f"its group {flat} of partitions is cut over {num_ranks} sets of ranks"
                raise MalformedError(why, path=path, key=name)
    return ranks_by_prefix


@dataclass(kw_only=True)
class MoEManifestBuilder(ZeroManifestBuilder):
    """Builds the manifest of a run with ZeRO-1 or -2.

    ``model`` has the experts of all ranks, ``local_model`` those of rank 0 under its names. ``num_expert_ranks`` is the
    number of expert-parallel ranks by flat, 1 if it has no experts. ``mappings_by_rank`` are the
    ``param_slice_mappings`` of all ranks. "Data-parallel ranks" of an expert-parallel rank are the ranks with its
    experts.
    """

    experts: MoEExperts
    local_model: ModelStates
    num_expert_ranks: Mapping[int, int]
    mappings_by_rank: Sequence[Sequence[SliceMapping]]
    _scalars_by_rank: dict[int, ScalarsByFlat] = field(default_factory=dict)

    @cached_property
    def param_intervals(self) -> Mapping[str, FlatIntervals]:
        self._check_group_count(self.local_model.param_shapes)
        found: dict[str, FlatIntervals] = {}
        for flat, shapes in enumerate(self.local_model.param_shapes):
            for rank in range(self.num_expert_ranks[flat]):
                data_ranks = self._list_data_ranks(flat, rank)
                masters = self.partitions.masters.select_ranks(data_ranks)
                paddings = self.partitions.paddings[data_ranks]
                local_intervals = locate_group(flat, shapes, self._get_alignment_gaps(flat), masters, paddings)
                for name, intervals in local_intervals.items():
                    # ``locate_group`` numbers the ranks that it is given from 0.
                    intervals = replace(intervals, ranks=data_ranks[intervals.ranks])
                    whole = self.experts.make_whole_name(name, rank)
                    found[whole] = found[whole].concatenate_rows(intervals) if whole in found else intervals
        return {name: found[name] for shapes in self.model.param_shapes for name in shapes if name in found}

    # Which rank has which experts

    def _list_data_ranks(self, flat: int, rank: int) -> Ints:
        """The data-parallel ranks of expert-parallel rank ``rank``, in the order of their partitions."""
        return np.flatnonzero(self._list_expert_ranks(flat, is_data_first=self._is_data_first) == rank)

    def _list_expert_ranks(self, flat: int, *, is_data_first: bool) -> Ints:
        """The expert-parallel rank of each rank: 0, 1, 0, 1, or with ``is_data_first`` 0, 0, 1, 1, for two on four."""
        all_ranks = np.arange(len(self.mappings_by_rank), dtype=np.int64)
        return all_ranks // self._count_partitions(flat) if is_data_first else all_ranks % self.num_expert_ranks[flat]

    def _count_partitions(self, flat: int) -> int:
        return len(self.mappings_by_rank) // self.num_expert_ranks[flat]

    @cached_property
    def _is_data_first(self) -> bool:
        """Whether ranks of the same experts are neighbours. Raises MalformedError if no order fits."""
        if (wrong_rank := self._find_wrong_rank(is_data_first=False)) is None:
            return False
        if self._find_wrong_rank(is_data_first=True) is None:
            return True
        path = self.partitions.masters.files[wrong_rank]
        raise MalformedError(f"its {MAPPINGS_ENTRY} do not fit the partitions", path=path)

    def _find_wrong_rank(self, *, is_data_first: bool) -> int | None:
        """The first rank whose mapping does not fit this order of ranks; None if all do.

        A rank has the partition of the group's parameters whose position is the number of ranks before it with the same
        experts. Its mapping must be what cutting the group gives for that partition.
        """
        for flat, shapes in enumerate(self.local_model.param_shapes):
            ordered_shapes = {name: shapes[name] for name in self._list_local_params(flat)}
            expected_mappings = self._compute_mappings(flat, ordered_shapes)
            expert_ranks = self._list_expert_ranks(flat, is_data_first=is_data_first)
            next_position = [0] * self.num_expert_ranks[flat]
            for rank, groups in enumerate(self.mappings_by_rank):
                expert_rank = int(expert_ranks[rank])
                position, next_position[expert_rank] = next_position[expert_rank], next_position[expert_rank] + 1
                stated_mapping = groups[flat] if flat < len(groups) else {}
                if {name: at for name, at in stated_mapping.items() if at[0]} != expected_mappings[position]:
                    return rank
        return None

    def _compute_mappings(self, flat: int, shapes: Mapping[str, Shape]) -> list[dict[str, tuple[int, int]]]:
        """For each partition of a group, the mapping by name that a rank with it states."""
        masters, paddings = self.partitions.masters, self.partitions.paddings
        partition_numel = find_partition_numel(flat, masters, paddings)
        mappings: list[dict[str, tuple[int, int]]] = [{} for _ in range(self._count_partitions(flat))]
        gaps, path = self._get_alignment_gaps(flat), masters.files[0]
        for name, intervals in partition_group(flat, shapes, gaps, partition_numel, path).items():
            for position, _, numel, start in intervals.iterate_rows():
                if position >= len(mappings):
                    why = f"group {flat} has more elements than its {len(mappings)} partitions"
                    raise MalformedError(why, path=path)
                mappings[position][name] = (numel, start)
        return mappings

    # What is not cut

    def _find_scalars(self, intervals: FlatIntervals) -> ScalarsByFlat:
        """The scalars of the first rank that has the experts of the first rank in ``intervals``."""
        expert_ranks = self._list_expert_ranks(int(intervals.flats[0]), is_data_first=self._is_data_first)
        own_rank = expert_ranks[int(intervals.ranks[0])]
        return self._get_scalars_of_rank(int(np.flatnonzero(expert_ranks == own_rank)[0]))

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

    def _list_flat_members(self, flat: int) -> tuple[str, ...]:
        return tuple(whole for _, whole in self.experts.expand_names(self._list_local_params(flat)))

    def _list_local_params(self, flat: int) -> tuple[str, ...]:
        """The parameters of rank 0 in the order in which the optimizer got them. ``param_slice_mappings`` are in this
        order too, even if the partitions are in that of ``round_robin_gradients``."""
        names = tuple(self.local_model.param_shapes[flat])
        if is_round_robin(self.local_model) and not self.optim.is_bf16_optimizer:
            return undo_round_robin(names, self._count_partitions(flat))
        return names

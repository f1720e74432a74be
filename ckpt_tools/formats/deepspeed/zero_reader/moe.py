"""Runs with ``deepspeed.moe`` layers: one checkpoint with the experts of all ranks.

The optimizer of experts is cut over the ranks that hold the same experts, and that of the rest over all ranks:
stage_1_and_2.py ``_configure_moe_settings``. Which ranks these are, ``param_slice_mappings`` prove: expert-parallel
rank e has the data-parallel ranks e, e + N, ... of N expert-parallel ranks, or with
``use_data_before_expert_parallelism`` the e-th run of ranks (utils/groups.py ``_create_expert_and_data_parallel``).

Without ZeRO each expert-parallel rank has a file of its whole optimizer, which numbers its parameters.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from ckpt_tools.core.boxes import Shape
from ckpt_tools.core.manifest import Manifest, ParamGroup, StateKey, TensorEntry
from ckpt_tools.core.shards import Ints
from ckpt_tools.core.wording import format_count
from ckpt_tools.errors import IncompleteError, MalformedError, UnsupportedError
from ckpt_tools.formats.deepspeed.common.files import DeepSpeedFile, ModelStates, OptimStates
from ckpt_tools.formats.deepspeed.common.model_file import check_model_parts, is_round_robin
from ckpt_tools.formats.deepspeed.common.partition import is_muon, undo_round_robin
from ckpt_tools.formats.deepspeed.names import expert_optim_file_name, replace_rank, split_expert_name
from ckpt_tools.formats.deepspeed.zero_reader import locate, stage0
from ckpt_tools.formats.deepspeed.zero_reader.contents import ScalarsByFlat, ZeroManifestBuilder
from ckpt_tools.formats.deepspeed.zero_reader.experts import MoEExperts, count_local_experts, open_expert_layers
from ckpt_tools.formats.deepspeed.zero_reader.flat import (
    FlatIntervals,
    find_partition_numel,
    locate_group,
    partition_group,
)
from ckpt_tools.formats.deepspeed.zero_reader.joining import to_comparable_text
from ckpt_tools.formats.deepspeed.zero_reader.locate import ExpertFiles, TagFiles
from ckpt_tools.formats.deepspeed.zero_reader.ranks import (
    RankPartitions,
    SliceMapping,
    read_partitions,
    read_slice_mappings,
)
from ckpt_tools.formats.state_dict.param_numbers import NumberedGroup, match_numbers
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
    if not mp_rank_files[0].optim_paths:
        return _read_without_zero(source, mp_rank_files[0], files)
    optim = OptimStates.of(DeepSpeedFile.open(source, mp_rank_files[0].optim_paths[0]))
    if optim.stage > 2:
        raise UnsupportedError("DeepSpeed has no experts in ZeRO-3", path=optim.file.path)
    if files.optim_paths:
        raise MalformedError("it is of a run without ZeRO, perhaps from an earlier save", path=files.optim_paths[0])
    model = ModelStates.of(DeepSpeedFile.open(source, mp_rank_files[0].require_model_paths(optim.stage)[0]))
    check_model_parts(model, 1)
    check_ranks(mp_rank_files[0], model, optim)
    return _open_zero_run(source, mp_rank_files[0].optim_paths, model, optim, files).build_manifest()


def check_ranks(files: TagFiles, model: ModelStates, optim: OptimStates) -> None:
    """Raises FormatError where the files are not those of all ranks, or the optimizer is one that is not read."""
    world_size, path = model.file.content.get("dp_world_size"), model.file.path
    if type(world_size) is not int or not 0 < world_size <= 1 << 24:
        raise MalformedError("it does not state the number of ranks (dp_world_size)", path=path)
    locate.check_file_count(files.optim_paths, world_size)
    if len(optim.partition_counts) != len(optim.masters) or any(world_size % n for n in optim.partition_counts):
        raise MalformedError(
            f"its partition_count is {list(optim.partition_counts)}, but the run has "
            f"{format_count(world_size, 'rank')}",
            path=optim.file.path,
        )
    if any(is_muon(group.options) for group in optim.groups):
        raise UnsupportedError("it is of a run with experts and Muon, which is not supported", path=optim.file.path)


def _open_zero_run(
    source: Source, paths: tuple[str, ...], model: ModelStates, optim: OptimStates, files: ExpertFiles
) -> MoEManifestBuilder:
    partitions, mappings_by_rank = read_mapped_partitions(source, paths, optim)
    layers = open_expert_layers(source, model, files)
    num_expert_ranks = {flat: len(paths) // parts for flat, parts in enumerate(optim.partition_counts)}
    experts = MoEExperts(
        layers, count_local_experts(layers, model, _count_ranks_by_layer(model, num_expert_ranks, optim.file.path))
    )
    whole_model = experts.add_all_experts(model)
    return MoEManifestBuilder(
        source,
        whole_model,
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
    """All ranks, and their ``param_slice_mappings``. Raises FormatError as ``read_partitions`` does."""
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
    """The number of ranks of each layer's experts, by the partitions of their groups."""
    ranks_by_prefix: dict[str, int] = {}
    for flat, shapes in enumerate(model.param_shapes):
        for name in shapes if flat in num_expert_ranks else ():
            parts = split_expert_name(name)
            num_ranks = (
                num_expert_ranks[flat]
                if parts is None
                else ranks_by_prefix.setdefault(parts[0], num_expert_ranks[flat])
            )
            if num_ranks != num_expert_ranks[flat] or (parts is None and num_ranks > 1):
                raise MalformedError(
                    f"its group {flat} of partitions is cut over {num_expert_ranks[flat]} sets of ranks",
                    path=path,
                    key=name,
                )
    return ranks_by_prefix


@dataclass(kw_only=True)
class MoEManifestBuilder(ZeroManifestBuilder):
    """A run with ZeRO-1 or -2. ``model`` is the whole one, ``local_model`` that of rank 0. ``num_expert_ranks`` are the
    expert-parallel ranks of each flat, 1 if it has no experts. ``mappings_by_rank`` are the ``param_slice_mappings``
    of all ranks."""

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
        """The data-parallel ranks of an expert-parallel one, in the order of their partitions."""
        return np.flatnonzero(self._list_expert_ranks(flat, is_data_first=self._is_data_first) == rank)

    def _list_expert_ranks(self, flat: int, *, is_data_first: bool) -> Ints:
        all_ranks = np.arange(len(self.mappings_by_rank), dtype=np.int64)
        expert_ranks: Ints = (
            all_ranks // self._count_partitions(flat) if is_data_first else all_ranks % self.num_expert_ranks[flat]
        )
        return expert_ranks

    def _count_partitions(self, flat: int) -> int:
        return len(self.mappings_by_rank) // self.num_expert_ranks[flat]

    @cached_property
    def _is_data_first(self) -> bool:
        """Whether ranks of the same experts are neighbours. Raises MalformedError where no order fits."""
        if (wrong_rank := self._find_wrong_rank(is_data_first=False)) is None:
            return False
        if self._find_wrong_rank(is_data_first=True) is None:
            return True
        raise MalformedError(
            f"its {MAPPINGS_ENTRY} do not fit the partitions", path=self.partitions.masters.files[wrong_rank]
        )

    def _find_wrong_rank(self, *, is_data_first: bool) -> int | None:
        for flat, shapes in enumerate(self.local_model.param_shapes):
            expected_mappings = self._compute_mappings(
                flat, {name: shapes[name] for name in self._list_local_params(flat)}
            )
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
        """The elements of a group in each partition, and their starts, by name."""
        masters, paddings = self.partitions.masters, self.partitions.paddings
        partition_numel = find_partition_numel(flat, masters, paddings)
        mappings: list[dict[str, tuple[int, int]]] = [{} for _ in range(self._count_partitions(flat))]
        for name, intervals in partition_group(
            flat, shapes, self._get_alignment_gaps(flat), partition_numel, masters.files[0]
        ).items():
            for position, _, numel, start in intervals.iterate_rows():
                if position >= len(mappings):
                    raise MalformedError(
                        f"group {flat} has more elements than its {len(mappings)} partitions", path=masters.files[0]
                    )
                mappings[position][name] = (numel, start)
        return mappings

    # What is not cut

    def _find_scalars(self, pieces: FlatIntervals) -> ScalarsByFlat:
        """The scalars of the first rank that has these experts."""
        flat = int(pieces.flats[0])
        expert_ranks = self._list_expert_ranks(flat, is_data_first=self._is_data_first)
        return self._get_scalars_of_rank(int(np.flatnonzero(expert_ranks == expert_ranks[int(pieces.ranks[0])])[0]))

    def _get_scalars_of_rank(self, rank: int) -> ScalarsByFlat:
        """The scalars of a rank; ``self.scalars`` itself if they are equal to those of rank 0. Raises MalformedError if
        the rank has other param groups."""
        if rank == 0:
            return self.scalars
        if rank not in self._scalars_by_rank:
            optim = OptimStates.of(DeepSpeedFile.open(self.source, self.partitions.masters.files[rank]))
            own_options, first_options = (
                [to_comparable_text(group.options) for group in each.groups] for each in (optim, self.optim)
            )
            if own_options != first_options:
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
        return (
            self.literals[byte_range.file]
            if byte_range.file in self.literals
            else self.source.read(byte_range.file, byte_range.start, byte_range.stop)
        )

    def _list_flat_members(self, flat: int) -> tuple[str, ...]:
        return tuple(whole for _, whole in self.experts.expand_names(self._list_local_params(flat)))

    def _list_local_params(self, flat: int) -> tuple[str, ...]:
        """The parameters of rank 0 in the order in which the optimizer got them. ``param_slice_mappings`` are in this
        order too, even if the partitions are in that of ``round_robin_gradients``."""
        names = tuple(self.local_model.param_shapes[flat])
        if is_round_robin(self.local_model) and not self.optim.is_bf16_optimizer:
            return undo_round_robin(names, self._count_partitions(flat))
        return names


# Without ZeRO


def _read_without_zero(source: Source, tag_files: TagFiles, files: ExpertFiles) -> Manifest:
    file = stage0.open_stage0_model(source, tag_files)
    model = ModelStates.of_stage0(file)
    check_model_parts(model, 1)
    layers = open_expert_layers(source, model, files)
    if file.content.get("optimizer") is not None and not files.optim_paths:
        raise IncompleteError(
            "the optimizer's file of this expert-parallel rank is missing",
            path=files.prefix + expert_optim_file_name(0),
        )
    optimizers = [stage0.SavedOptimizer.of(DeepSpeedFile.open(source, path)) for path in files.optim_paths]
    num_ranks = _count_expert_ranks(optimizers, files)
    experts = MoEExperts(layers, count_local_experts(layers, model, dict.fromkeys(layers, num_ranks)))
    whole_model = experts.add_all_experts(model)
    return _merge_ranks(
        [
            MoERankManifestBuilder(
                whole_model,
                each,
                literal_prefix=f"rank{rank}.",
                optimizer_name=f"optimizer.expp_rank_{rank}",
                experts=experts,
                rank=rank,
            )
            for rank, each in enumerate(optimizers or [stage0.SavedOptimizer(file)])
        ]
    )


def _count_expert_ranks(optimizers: Sequence[stage0.SavedOptimizer], files: ExpertFiles) -> int:
    """The expert-parallel ranks, as groups of experts are called after them. Raises FormatError."""
    for path, optimizer in zip(files.optim_paths, optimizers, strict=True):
        for group in optimizer.groups:
            if not group.get("moe"):
                continue
            size = str(group.get("name")).removeprefix("ep_size_")
            if not size.isdecimal() or len(size) > 9:
                raise UnsupportedError("its groups of experts are not called ep_size_N", path=path)
            if int(size) > len(optimizers):
                missing = replace_rank(files.optim_paths[0], len(optimizers))
                raise IncompleteError(f"the file of this rank, one of {size}, is missing", path=missing)
            if int(size) < len(optimizers):
                raise UnsupportedError(
                    f"there are {len(optimizers)} expert-parallel ranks, and groups of {size}; save with ZeRO stage 1",
                    path=path,
                )
    return max(1, len(optimizers))


@dataclass(kw_only=True)
class ExpertRankManifestBuilder(stage0.Stage0ManifestBuilder, ABC):
    """The optimizer of one expert-parallel rank."""

    rank: int

    remedy = "resume the run and save it with ZeRO stage 1"

    def _match_numbers(self, parameters: Mapping[str, Shape]) -> dict[int, str] | None:
        """Groups of experts have only this rank's, and no other group has an expert."""
        found: dict[int, str] = {}
        for is_expert in (False, True):
            groups = [
                NumberedGroup(tuple(group["params"]))
                for group in self.saved_optimizer.groups
                if bool(group.get("moe")) == is_expert
            ]
            numbers = {number for group in groups for number in group.numbers}
            shapes = {
                number: shape for number, shape in self.saved_optimizer.find_shapes().items() if number in numbers
            }
            own = {
                name: shape for name, shape in parameters.items() if self._is_own_parameter(name, is_expert=is_expert)
            }
            matched = match_numbers(groups, shapes, own)
            if matched is None:
                return None
            found |= matched
        return found

    def _find_flat_members(self, parameters: Mapping[str, Shape]) -> list[dict[str, stage0.MasterSlice]]:
        raise UnsupportedError(
            "its fp32 masters are flat vectors without names; save with ZeRO stage 1",
            path=self.saved_optimizer.file.path,
        )

    @abstractmethod
    def _is_own_parameter(self, name: str, *, is_expert: bool) -> bool:
        """Whether this rank has the parameter, as one of its experts or as one of all others."""


@dataclass(kw_only=True)
class MoERankManifestBuilder(ExpertRankManifestBuilder):
    experts: MoEExperts

    def _is_own_parameter(self, name: str, *, is_expert: bool) -> bool:
        found = split_expert_name(name)
        if found is None or not is_expert:
            return found is None and not is_expert
        return found[1] // self.experts.num_local_experts[found[0]] == self.rank


def _merge_ranks(parts: Sequence[MoERankManifestBuilder]) -> Manifest:
    """The manifests of all expert-parallel ranks as one. Raises MalformedError."""
    manifests = [part.build_manifest() for part in parts]
    first = manifests[0]
    tensors: dict[StateKey, TensorEntry] = {}
    for manifest in reversed(manifests):
        tensors |= manifest.tensors
    return replace(
        first,
        tensors={key: tensors[key] for manifest in manifests for key in manifest.tensors},
        literals={name: data for manifest in manifests for name, data in manifest.literals.items()},
        groups=tuple(_merge_groups(manifests, parts[0])),
        extra=_merge_extra(manifests),
        notes=tuple(dict.fromkeys(note for manifest in manifests for note in manifest.notes)),
    )


def _merge_groups(manifests: Sequence[Manifest], first: MoERankManifestBuilder) -> Iterator[ParamGroup]:
    """Groups in the order of a model that has all experts."""
    for number, group in enumerate(manifests[0].groups):
        params = tuple(whole for _, whole in first.experts.expand_names(group.params))
        rank_groups = [each.groups[number] if number < len(each.groups) else None for each in manifests]
        rank_params = {name for other in rank_groups if other is not None for name in other.params}
        if rank_params != set(params) or any(
            other is None or to_comparable_text(other.options) != to_comparable_text(group.options)
            for other in rank_groups
        ):
            raise MalformedError(
                f"the expert-parallel ranks differ in param group {number}", path=first.saved_optimizer.file.path
            )
        yield replace(group, params=params)


def _merge_extra(manifests: Sequence[Manifest]) -> dict[str, Any]:
    """The entries of rank 0, with those of each rank's optimizer."""
    extra = dict(manifests[0].extra)
    if "optimizer" in extra:
        extra["optimizer"] = {f"expp_rank_{rank}": each.extra.get("optimizer") for rank, each in enumerate(manifests)}
    states = [
        own.get("optimizer_state", {}) for each in manifests if isinstance(own := each.extra.get("deepspeed"), dict)
    ]
    optimizer_states = {name: value for state in reversed(states) for name, value in state.items()}
    return (
        {**extra, "deepspeed": {**extra.get("deepspeed", {}), "optimizer_state": optimizer_states}}
        if optimizer_states
        else extra
    )

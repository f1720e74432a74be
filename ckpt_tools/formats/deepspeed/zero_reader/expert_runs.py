"""Runs with ZeRO and experts, of ``deepspeed.moe`` layers or of AutoEP: one checkpoint with the experts of all ranks.

The optimizer of experts is cut over the ranks that hold the same experts, and that of the rest over all ranks:
stage_1_and_2.py ``_configure_moe_settings``, stage3.py ``_zero3_partition_group_metadata``. So a flat of experts is a
``GroupPlacement`` for each expert-parallel rank, and this module finds the ranks of each. In stages 1 and 2
``param_slice_mappings`` prove them: expert-parallel rank e has the data-parallel ranks e, e + N, ... of N
expert-parallel ranks, or with ``use_data_before_expert_parallelism`` the e-th run of ranks (utils/groups.py
``_create_expert_and_data_parallel``). In stage 3, which only AutoEP has, the model files state them:

    A tensor of 4 experts on 4 ranks with the expert-parallel ranks 0, 1, 0, 1:
        rows 0 and 1, the experts of expert-parallel rank 0, are cut over ranks 0 and 2,
        rows 2 and 3, the experts of expert-parallel rank 1, are cut over ranks 1 and 3.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ckpt_tools.core.manifest import Manifest
from ckpt_tools.core.shards import Ints
from ckpt_tools.errors import IncompleteError, MalformedError, UnsupportedError
from ckpt_tools.formats.deepspeed.common.files import DeepSpeedFile, ModelStates, OptimStates
from ckpt_tools.formats.deepspeed.common.fused_experts import DISTRIBUTION_ENTRIES, FOLDED_RUN_TEXT, AutoEPLayers
from ckpt_tools.formats.deepspeed.common.model_file import check_model_parts
from ckpt_tools.formats.deepspeed.names import expert_file_name, split_expert_name
from ckpt_tools.formats.deepspeed.zero_reader import expert_stage0
from ckpt_tools.formats.deepspeed.zero_reader.contents import ZeroManifestBuilder
from ckpt_tools.formats.deepspeed.zero_reader.experts import (
    MoEExperts,
    count_local_experts,
    open_expert_layers,
    read_expert_weights,
)
from ckpt_tools.formats.deepspeed.zero_reader.placements import (
    list_optimizer_order,
    list_placements,
)
from ckpt_tools.formats.deepspeed.zero_reader.ranks import (
    PARTITION_GROUPS_ENTRY,
    RankPartitions,
    check_expert_run,
    read_partitions,
)
from ckpt_tools.formats.deepspeed.zero_reader.slice_mappings import (
    MAPPINGS_ENTRY,
    SliceMapping,
    find_misfit,
    read_mapped_partitions,
)
from ckpt_tools.formats.deepspeed.zero_reader.tag_files import ExpertFiles, TagFiles
from ckpt_tools.messages.wording import format_count
from ckpt_tools.stores.source import Source

_AUTOEP_SKIPPED_ENTRIES = ("optimizer", *DISTRIBUTION_ENTRIES)

_NO_MOE_EXPERTS = MoEExperts({}, {})
"""The experts of a run of AutoEP, whose tensors have the same names on all ranks."""


def read(source: Source, mp_ranks: Sequence[TagFiles], files: ExpertFiles) -> Manifest:
    """The whole model of a run in stage 0, 1 or 2. Raises FormatError if a file is missing or damaged, or does not fit
    the others."""
    tag_files = mp_ranks[0]
    ep_layers = AutoEPLayers.of(DeepSpeedFile.open(source, tag_files.require_model_paths(0)[0]))
    is_autoep = bool(ep_layers.layers)
    if len(mp_ranks) > 1:
        moe_text = (
            "it is of a run with experts that is also tensor parallel, which is not supported; save it without "
            "tensor parallelism"
        )
        path = mp_ranks[1].require_model_paths(0)[0]
        raise UnsupportedError(FOLDED_RUN_TEXT if is_autoep else moe_text, path=path)
    if not tag_files.optim_paths and is_autoep:
        return expert_stage0.read_autoep(source, tag_files, files, ep_layers)
    if not tag_files.optim_paths:
        return expert_stage0.read_moe(source, tag_files, files)
    optim = OptimStates.of(DeepSpeedFile.open(source, tag_files.optim_paths[0]))
    if is_autoep and (optim.stage > 2 or files.optim_paths):
        raise MalformedError(
            "it is of a run in stage 1 or 2, perhaps from an earlier save",
            path=min(files.weight_paths.values(), default=ep_layers.path),
        )
    if optim.stage > 2:
        raise UnsupportedError("DeepSpeed has no experts in ZeRO-3", path=optim.file.path)
    if files.optim_paths:
        raise MalformedError("it is of a run without ZeRO, perhaps from an earlier save", path=files.optim_paths[0])
    model = ModelStates.of(DeepSpeedFile.open(source, tag_files.require_model_paths(optim.stage)[0]))
    if not is_autoep:
        check_model_parts(model, 1)
    check_expert_run(tag_files, model, optim)
    partitions, mappings_by_rank = read_mapped_partitions(source, tag_files.optim_paths, optim)
    num_expert_ranks = [len(tag_files.optim_paths) // parts for parts in optim.partition_counts]
    if is_autoep:
        experts = _NO_MOE_EXPERTS
        weight_tables = read_expert_weights(source, ep_layers, model, files)
        _check_expert_groups(ep_layers, model, num_expert_ranks, optim.file.path)
        whole_model = ep_layers.add_all_experts(model, weight_tables)
    else:
        weight_tables, layers = {}, open_expert_layers(source, model, files)
        ranks_by_prefix = _count_ranks_by_layer(model, num_expert_ranks, optim.file.path)
        experts = MoEExperts(layers, count_local_experts(layers, model, ranks_by_prefix))
        whole_model = experts.add_all_experts(model)
    ranks_by_flat = _find_ranks_of_experts(model, optim, partitions, mappings_by_rank, num_expert_ranks)
    return ZeroManifestBuilder(
        source,
        whole_model,
        optim,
        (model.file.path,),
        partitions,
        groups=list_placements(model, optim, ranks_by_flat, experts.make_whole_name),
        members=[
            tuple(whole for _, whole in experts.expand_names(list_optimizer_order(model, optim, flat, len(ranks[0]))))
            for flat, ranks in enumerate(ranks_by_flat)
        ],
        weight_tables=weight_tables,
        skipped_entries=_AUTOEP_SKIPPED_ENTRIES if is_autoep else ("optimizer",),
    ).build_manifest()


def _count_ranks_by_layer(model: ModelStates, num_expert_ranks: Sequence[int], path: str) -> dict[str, int]:
    """The number of expert-parallel ranks of each layer with experts, by prefix, from the partitions of its groups.
    Raises MalformedError if a layer's groups differ in it, or if a group without experts is not cut over all ranks."""
    ranks_by_prefix: dict[str, int] = {}
    for flat, (shapes, num_ranks) in enumerate(zip(model.param_shapes, num_expert_ranks, strict=False)):
        for name in shapes:
            parts = split_expert_name(name)
            expected_ranks = 1 if parts is None else ranks_by_prefix.setdefault(parts[0], num_ranks)
            if num_ranks != expected_ranks:
                why = f"its group {flat} of partitions is cut over {num_ranks} sets of ranks"
                raise MalformedError(why, path=path, key=name)
    return ranks_by_prefix


def _check_expert_groups(
    ep_layers: AutoEPLayers, model: ModelStates, num_expert_ranks: Sequence[int], path: str
) -> None:
    """Raises MalformedError if a group of partitions is not cut over the ranks of its experts. ``num_expert_ranks`` is
    the number of expert-parallel ranks by flat."""
    for flat, shapes in enumerate(model.param_shapes):
        expected_ranks = {layer.num_ranks if (layer := ep_layers.find_layer(name)) else 1 for name in shapes}
        if shapes and expected_ranks != {*num_expert_ranks[flat : flat + 1]}:
            raise MalformedError(f"its group {flat} of partitions is not cut over the ranks of its experts", path=path)


# Which ranks have which experts, in stages 1 and 2


def _find_ranks_of_experts(
    model: ModelStates,
    optim: OptimStates,
    partitions: RankPartitions,
    mappings_by_rank: Sequence[Sequence[SliceMapping]],
    num_expert_ranks: Sequence[int],
) -> list[list[Ints]]:
    """By flat the ranks of each expert-parallel rank, in the order of their partitions. Raises MalformedError if
    ``param_slice_mappings`` fit neither order of ranks."""
    misfit_files = []
    for is_data_first in (False, True):
        ranks_by_flat = [_list_rank_sets(len(mappings_by_rank), num, is_data_first) for num in num_expert_ranks]
        groups = list_placements(model, optim, ranks_by_flat, is_in_optimizer_order=True)
        misfit = find_misfit(groups, partitions, mappings_by_rank)
        if misfit is None:
            return ranks_by_flat
        misfit_files.append(misfit[0])
    raise MalformedError(f"its {MAPPINGS_ENTRY} do not fit the partitions", path=misfit_files[0])


def _list_rank_sets(num_ranks: int, num_sets: int, is_data_first: bool) -> list[Ints]:
    """The ranks of each set: for two sets of four ranks 0, 2 and 1, 3, or with ``is_data_first`` 0, 1 and 2, 3."""
    all_ranks = np.arange(num_ranks, dtype=np.int64)
    sets = all_ranks // (num_ranks // num_sets) if is_data_first else all_ranks % num_sets
    return [np.flatnonzero(sets == number) for number in range(num_sets)]


# Stage 3, which only AutoEP has


def open_stage3(
    source: Source, files: TagFiles, model: ModelStates, optim: OptimStates, ep_layers: AutoEPLayers
) -> ZeroManifestBuilder:
    """The builder of a run in stage 3. Raises FormatError as ``read`` does."""
    if optim.stage < 3:
        raise IncompleteError("the files of its experts are missing", path=files.prefix + expert_file_name(0, 0))
    expert_ranks = _read_expert_ranks(source, files.rank_model_paths, optim.world_size)
    if len(model.param_shapes) != len(optim.masters):
        why = f"it has {len(optim.masters)} partitions, but param_shapes has {len(model.param_shapes)}"
        raise MalformedError(why, path=optim.file.path)
    if any(map(ep_layers.find_layer, model.frozen_shapes)):
        raise UnsupportedError("its experts are frozen, which is not supported in stage 3", path=model.file.path)
    are_experts = [any(map(ep_layers.find_layer, shapes)) for shapes in model.param_shapes]
    num_expert_ranks = [ep_layers.layers[0].num_ranks if is_of_experts else 1 for is_of_experts in are_experts]
    _check_expert_groups(ep_layers, model, num_expert_ranks, model.file.path)
    ranks_by_flat = [
        [np.flatnonzero(expert_ranks == number) for number in range(num)] if num > 1 else [np.arange(optim.world_size)]
        for num in num_expert_ranks
    ]
    visited_states: list[OptimStates] = []

    def check_partition_ranks(states: OptimStates) -> None:
        """``ds_zero_partition_groups`` list, for each sub-group, the ranks over which it is cut: those that hold the
        same experts, or all."""
        rank = len(visited_states)
        visited_states.append(states)
        groups = states.state_dict.get(PARTITION_GROUPS_ENTRY)
        for flat, rank_sets in enumerate(ranks_by_flat):
            (expected_ranks,) = (ranks.tolist() for ranks in rank_sets if rank in ranks)
            group = groups[flat] if isinstance(groups, list) and flat < len(groups) else None
            if not isinstance(group, dict) or group.get("partition_ranks") != expected_ranks:
                why = f"its {PARTITION_GROUPS_ENTRY} are not those of its experts"
                raise MalformedError(why, path=states.file.path)

    return ZeroManifestBuilder(
        source,
        ep_layers.add_all_experts(model),
        optim,
        files.rank_model_paths,
        read_partitions(source, files.optim_paths, optim, check_partition_ranks),
        groups=list_placements(model, optim, ranks_by_flat),
        members=(),
        skipped_entries=_AUTOEP_SKIPPED_ENTRIES,
    )


def _read_expert_ranks(source: Source, paths: Sequence[str], world_size: int) -> Ints:
    """The expert-parallel rank of each rank in stage 3, as its model file states it. Raises FormatError."""
    expert_ranks = []
    for path, file in zip(paths, source.map_files(DeepSpeedFile.open, paths), strict=True):
        layers = AutoEPLayers.of(file).layers
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

"""Runs with experts and without ZeRO, of ``deepspeed.moe`` layers or of AutoEP: one checkpoint with all experts.

Each expert-parallel rank has a file of its whole optimizer, which numbers its parameters. So every rank is read as a
checkpoint of stage 0 by its own optimizer, and the manifests are joined.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ckpt_tools.core.boxes import Shape
from ckpt_tools.core.manifest import EqualPair, Kind, Manifest, ParamGroup, StateKey, TensorEntry
from ckpt_tools.core.values import StoredTensor, as_dict
from ckpt_tools.errors import IncompleteError, MalformedError, UnsupportedError
from ckpt_tools.formats.deepspeed.common.files import DeepSpeedFile
from ckpt_tools.formats.deepspeed.common.fused_experts import DISTRIBUTION_ENTRIES, AutoEPLayers
from ckpt_tools.formats.deepspeed.common.model_file import check_model_parts
from ckpt_tools.formats.deepspeed.common.tensor_parallel import MergeRules, ParameterMerge
from ckpt_tools.formats.deepspeed.names import expert_optim_file_name, replace_rank
from ckpt_tools.formats.deepspeed.zero_reader.experts import (
    MoEExperts,
    count_local_experts,
    open_expert_layers,
    read_expert_weights,
)
from ckpt_tools.formats.deepspeed.zero_reader.joining import ManifestMerger, to_comparable_text
from ckpt_tools.formats.deepspeed.zero_reader.stage0 import (
    ExpertNames,
    SavedOptimizer,
    Stage0ManifestBuilder,
    open_stage0_model,
)
from ckpt_tools.formats.deepspeed.zero_reader.tag_files import ExpertFiles, TagFiles
from ckpt_tools.messages.wording import format_count
from ckpt_tools.stores.source import Source

# deepspeed.moe


def read_moe(source: Source, tag_files: TagFiles, files: ExpertFiles) -> Manifest:
    model = open_stage0_model(source, tag_files)
    check_model_parts(model, 1)
    layers = open_expert_layers(source, model, files)
    if model.file.content.get("optimizer") is not None and not files.optim_paths:
        raise IncompleteError(
            "the optimizer's file of this expert-parallel rank is missing",
            path=files.prefix + expert_optim_file_name(0),
        )
    optimizers = list(map(SavedOptimizer.of, source.map_files(DeepSpeedFile.open, files.optim_paths)))
    num_ranks = _count_expert_ranks(optimizers, files)
    experts = MoEExperts(layers, count_local_experts(layers, model, dict.fromkeys(layers, num_ranks)))
    whole_model = experts.add_all_experts(model)
    return _merge_ranks(
        [
            Stage0ManifestBuilder(
                whole_model,
                each,
                literal_prefix=f"rank{rank}.",
                optimizer_name=f"optimizer.expp_rank_{rank}",
                experts=ExpertNames(experts.list_names(rank), experts.list_names()),
            ).build_manifest()
            for rank, each in enumerate(optimizers or [SavedOptimizer(model.file)])
        ],
        experts,
        files.optim_paths[0] if files.optim_paths else model.file.path,
    )


def _count_expert_ranks(optimizers: Sequence[SavedOptimizer], files: ExpertFiles) -> int:
    """The number of expert-parallel ranks N. Raises UnsupportedError if a group of experts is not called ``ep_size_N``,
    or is of fewer ranks; IncompleteError if there are fewer files than ranks."""
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


def _merge_ranks(manifests: Sequence[Manifest], experts: MoEExperts, path: str) -> Manifest:
    """Joins the manifests of all expert-parallel ranks. A tensor that several have is read from the first of them.
    Raises MalformedError, with ``path``, if their param groups differ."""
    first = manifests[0]
    tensors: dict[StateKey, TensorEntry] = {}
    for manifest in reversed(manifests):
        tensors |= manifest.tensors
    return replace(
        first,
        tensors={key: tensors[key] for manifest in manifests for key in manifest.tensors},
        literals={name: data for manifest in manifests for name, data in manifest.literals.items()},
        groups=tuple(_merge_groups(manifests, experts, path)),
        extra=_merge_extra(manifests),
        notes=tuple(dict.fromkeys(note for manifest in manifests for note in manifest.notes)),
    )


def _merge_groups(manifests: Sequence[Manifest], experts: MoEExperts, path: str) -> Iterator[ParamGroup]:
    """Groups in the order of a model that has all experts."""
    for number, group in enumerate(manifests[0].groups):
        params = tuple(whole for _, whole in experts.expand_names(group.params))
        rank_groups = [each.groups[number] if number < len(each.groups) else None for each in manifests]
        rank_params = {name for other in rank_groups if other is not None for name in other.params}
        if rank_params != set(params) or any(
            other is None or to_comparable_text(other.options) != to_comparable_text(group.options)
            for other in rank_groups
        ):
            raise MalformedError(f"the expert-parallel ranks differ in param group {number}", path=path)
        yield replace(group, params=params)


def _merge_extra(manifests: Sequence[Manifest]) -> dict[str, Any]:
    """The entries of rank 0, with those of each rank's optimizer."""
    extra = dict(manifests[0].extra)
    if "optimizer" in extra:
        extra["optimizer"] = {f"expp_rank_{rank}": each.extra.get("optimizer") for rank, each in enumerate(manifests)}
    states: dict[str, Any] = {}
    for each in reversed(manifests):
        states |= as_dict(each.extra.get("deepspeed")).get("optimizer_state", {})
    return {**extra, "deepspeed": {**extra.get("deepspeed", {}), "optimizer_state": states}} if states else extra


# AutoEP


@dataclass(frozen=True, slots=True)
class AutoEPMergeRules(MergeRules):
    """Joins experts along their first dim; all else is a copy on every rank."""

    ep_layers: AutoEPLayers

    def plan_merge(self, name: str, shapes: Sequence[Shape]) -> ParameterMerge:
        if self.ep_layers.find_layer(name):
            return self.merge_along(name, shapes, 0)
        return self.merge_replicated(name, shapes)


def read_autoep(source: Source, tag_files: TagFiles, files: ExpertFiles, ep_layers: AutoEPLayers) -> Manifest:
    model = open_stage0_model(source, tag_files)
    num_ranks = ep_layers.layers[0].num_ranks
    if model.file.content.get("optimizer") is not None and len(files.optim_paths) != num_ranks:
        raise IncompleteError(
            f"the files of the optimizers of {format_count(num_ranks, 'expert-parallel rank')} are not all there",
            path=files.prefix + expert_optim_file_name(min(len(files.optim_paths), num_ranks - 1)),
        )
    saved_optimizers = map(SavedOptimizer.of, source.map_files(DeepSpeedFile.open, files.optim_paths))
    optimizers = list(saved_optimizers) or [SavedOptimizer(model.file)] * num_ranks
    model = replace(model, param_shapes=(_read_local_shapes(source, ep_layers, files),))
    parts = []
    for rank, each in enumerate(optimizers):
        expert_tables = read_expert_weights(source, ep_layers, model, files, rank)
        rank_model = replace(ep_layers.add_all_experts(model, expert_tables), param_shapes=())
        names = frozenset(expert_tables)
        parts.append(
            Stage0ManifestBuilder(
                rank_model,
                each,
                literal_prefix=f"rank{rank}.",
                skipped_entries=("optimizer", *DISTRIBUTION_ENTRIES),
                experts=ExpertNames(names, names),
                weight_tables=expert_tables,
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
    layers = [layer for layer in ep_layers.layers if (layer.moe_number, 0) in files.weight_paths]
    paths = [files.weight_paths[layer.moe_number, 0] for layer in layers]
    for layer, file in zip(layers, source.map_files(DeepSpeedFile.open, paths), strict=True):
        for name, value in file.content.items():
            if isinstance(name, str) and name.startswith(layer.expert_prefix) and isinstance(value, StoredTensor):
                shape_by_name[name.removesuffix(".0")] = (layer.num_local_experts, *value.shape)
    return shape_by_name

"""Runs with ``deepspeed.moe`` layers and without ZeRO: one checkpoint with the experts of all ranks.

Each expert-parallel rank has a file of its whole optimizer, which numbers its parameters.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ckpt_tools.core.boxes import Shape
from ckpt_tools.core.manifest import Manifest, ParamGroup, StateKey, TensorEntry
from ckpt_tools.errors import IncompleteError, MalformedError, UnsupportedError
from ckpt_tools.formats.deepspeed.common.files import DeepSpeedFile, ModelStates
from ckpt_tools.formats.deepspeed.common.model_file import check_model_parts
from ckpt_tools.formats.deepspeed.names import expert_optim_file_name, replace_rank, split_expert_name
from ckpt_tools.formats.deepspeed.zero_reader import stage0
from ckpt_tools.formats.deepspeed.zero_reader.experts import MoEExperts, count_local_experts, open_expert_layers
from ckpt_tools.formats.deepspeed.zero_reader.joining import to_comparable_text
from ckpt_tools.formats.deepspeed.zero_reader.tag_files import ExpertFiles, TagFiles
from ckpt_tools.state_tree.param_numbers import NumberedGroup, match_numbers
from ckpt_tools.stores.source import Source


def read(source: Source, tag_files: TagFiles, files: ExpertFiles) -> Manifest:
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


@dataclass(kw_only=True)
class ExpertRankManifestBuilder(stage0.Stage0ManifestBuilder, ABC):
    """Builds the manifest of the optimizer of one expert-parallel rank, ``rank``."""

    rank: int

    remedy = "resume the run and save it with ZeRO stage 1"

    def _match_numbers(self, parameters: Mapping[str, Shape]) -> dict[int, str] | None:
        """The name of each number. Groups of experts have only this rank's experts, and no other group has an expert.
        So the two kinds are matched apart: together, an expert's number could fit another parameter of its shape."""
        found: dict[int, str] = {}
        for is_expert in (False, True):
            groups = [
                NumberedGroup(tuple(group["params"]))
                for group in self.optimizer.groups
                if bool(group.get("moe")) == is_expert
            ]
            numbers = {number for group in groups for number in group.numbers}
            shapes = {number: shape for number, shape in self.optimizer.find_shapes().items() if number in numbers}
            own_names = [name for name in parameters if self._is_own_parameter(name, is_expert=is_expert)]
            matched = match_numbers(groups, shapes, {name: parameters[name] for name in own_names})
            if matched is None:
                return None
            found |= matched
        return found

    def _find_flat_members(self, parameters: Mapping[str, Shape]) -> list[dict[str, stage0.MasterSlice]]:
        raise UnsupportedError(
            "its fp32 masters are flat vectors without names; save with ZeRO stage 1",
            path=self.optimizer.file.path,
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
    """Joins the manifests of all expert-parallel ranks. A tensor that several have is read from the first of them.
    Raises MalformedError if their param groups differ."""
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
            why = f"the expert-parallel ranks differ in param group {number}"
            raise MalformedError(why, path=first.optimizer.file.path)
        yield replace(group, params=params)


def _merge_extra(manifests: Sequence[Manifest]) -> dict[str, Any]:
    """The entries of rank 0, with those of each rank's optimizer."""
    extra = dict(manifests[0].extra)
    if "optimizer" in extra:
        extra["optimizer"] = {f"expp_rank_{rank}": each.extra.get("optimizer") for rank, each in enumerate(manifests)}
    sections = [own for each in manifests if isinstance(own := each.extra.get("deepspeed"), dict)]
    states: dict[str, Any] = {}
    for section in reversed(sections):
        states |= section.get("optimizer_state", {})
    return {**extra, "deepspeed": {**extra.get("deepspeed", {}), "optimizer_state": states}} if states else extra

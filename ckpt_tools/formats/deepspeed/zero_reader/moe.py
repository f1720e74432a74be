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
from ckpt_tools.formats.deepspeed.common.files import File, ModelStates, OptimStates
from ckpt_tools.formats.deepspeed.common.model_file import check_parts, is_round_robin
from ckpt_tools.formats.deepspeed.common.partition import is_muon, original_order
from ckpt_tools.formats.deepspeed.names import expert_optim_name, of_rank, split_expert
from ckpt_tools.formats.deepspeed.zero_reader import locate, stage0
from ckpt_tools.formats.deepspeed.zero_reader.contents import Contents, Scalars
from ckpt_tools.formats.deepspeed.zero_reader.experts import Experts, local_counts, open_layers
from ckpt_tools.formats.deepspeed.zero_reader.flat import Pieces, cut_group, locate_group, partition_size
from ckpt_tools.formats.deepspeed.zero_reader.joining import comparable
from ckpt_tools.formats.deepspeed.zero_reader.locate import ExpertFiles, TagFiles
from ckpt_tools.formats.deepspeed.zero_reader.ranks import Mapped, Partitions, read_partitions, slice_mappings
from ckpt_tools.formats.state_dict.param_numbers import NumberedGroup, match_numbers
from ckpt_tools.stores.source import Source

MAPPINGS = "param_slice_mappings"


def read(source: Source, tags: Sequence[TagFiles], files: ExpertFiles) -> Manifest:
    """The whole model. Raises FormatError if a file is missing or damaged, or does not fit the others."""
    if len(tags) > 1:
        raise UnsupportedError(
            "it is of a run with experts that is also tensor parallel, which is not supported; save it without "
            "tensor parallelism",
            path=tags[1].models(0)[0],
        )
    if not tags[0].optim:
        return _without_zero(source, tags[0], files)
    optim = OptimStates.of(File.open(source, tags[0].optim[0]))
    if optim.stage > 2:
        raise UnsupportedError("DeepSpeed has no experts in ZeRO-3", path=optim.file.path)
    if files.optim:
        raise MalformedError("it is of a run without ZeRO, perhaps from an earlier save", path=files.optim[0])
    model = ModelStates.of(File.open(source, tags[0].models(optim.stage)[0]))
    check_parts(model, 1)
    check_ranks(tags[0], model, optim)
    return _contents(source, tags[0].optim, model, optim, files).manifest()


def check_ranks(files: TagFiles, model: ModelStates, optim: OptimStates) -> None:
    """Raises FormatError where the files are not those of all ranks, or the optimizer is one that is not read."""
    world_size, path = model.file.content.get("dp_world_size"), model.file.path
    if type(world_size) is not int or not 0 < world_size <= 1 << 24:
        raise MalformedError("it does not state the number of ranks (dp_world_size)", path=path)
    locate.check_count(files.optim, world_size)
    if len(optim.partition_counts) != len(optim.masters) or any(world_size % n for n in optim.partition_counts):
        raise MalformedError(
            f"its partition_count is {list(optim.partition_counts)}, but the run has "
            f"{format_count(world_size, 'rank')}",
            path=optim.file.path,
        )
    if any(is_muon(group.options) for group in optim.groups):
        raise UnsupportedError("it is of a run with experts and Muon, which is not supported", path=optim.file.path)


def _contents(
    source: Source, paths: tuple[str, ...], model: ModelStates, optim: OptimStates, files: ExpertFiles
) -> ExpertContents:
    partitions, said = mapped_partitions(source, paths, optim)
    layers = open_layers(source, model, files)
    ranks = {flat: len(paths) // parts for flat, parts in enumerate(optim.partition_counts)}
    experts = Experts(layers, local_counts(layers, model, _spread(model, ranks, optim.file.path)))
    whole = experts.whole(model)
    return ExpertContents(
        source, whole, optim, (model.file.path,), partitions, experts=experts, local=model, num_ranks=ranks, said=said
    )


def mapped_partitions(
    source: Source, paths: Sequence[str], optim: OptimStates
) -> tuple[Partitions, list[list[Mapped]]]:
    """All ranks, and their ``param_slice_mappings``. Raises FormatError as ``read_partitions`` does."""
    said: list[list[Mapped]] = []

    def visit(states: OptimStates) -> None:
        if MAPPINGS not in states.own:
            raise UnsupportedError(
                f"it has no {MAPPINGS} with the experts of each rank; load the run in DeepSpeed 0.8 or later "
                "and save it",
                path=states.file.path,
            )
        said.append(slice_mappings(states.file))

    return read_partitions(source, paths, optim, visit), said


def _spread(model: ModelStates, ranks: Mapping[int, int], path: str) -> dict[str, int]:
    """The number of ranks of each layer's experts, by the partitions of their groups."""
    found: dict[str, int] = {}
    for flat, shapes in enumerate(model.param_shapes):
        for name in shapes if flat in ranks else ():
            parts = split_expert(name)
            num_ranks = ranks[flat] if parts is None else found.setdefault(parts[0], ranks[flat])
            if num_ranks != ranks[flat] or (parts is None and num_ranks > 1):
                raise MalformedError(
                    f"its group {flat} of partitions is cut over {ranks[flat]} sets of ranks", path=path, key=name
                )
    return found


@dataclass(kw_only=True)
class ExpertContents(Contents):
    """A run with ZeRO-1 or -2. ``model`` is the whole one, ``local`` that of rank 0. ``num_ranks`` are the
    expert-parallel ranks of each flat, 1 if it has no experts. ``said`` are the ``param_slice_mappings`` of all
    ranks."""

    experts: Experts
    local: ModelStates
    num_ranks: Mapping[int, int]
    said: Sequence[Sequence[Mapped]]
    _others: dict[int, Scalars] = field(default_factory=dict)

    @cached_property
    def pieces(self) -> Mapping[str, Pieces]:
        self._check_groups(self.local.param_shapes)
        found: dict[str, Pieces] = {}
        for flat, shapes in enumerate(self.local.param_shapes):
            for rank in range(self.num_ranks[flat]):
                for name, pieces in self._located(flat, shapes, self._ranks(flat, rank)).items():
                    whole = self.experts.whole_name(name, rank)
                    found[whole] = found[whole].followed_by(pieces) if whole in found else pieces
        return {name: found[name] for shapes in self.model.param_shapes for name in shapes if name in found}

    def _located(self, flat: int, shapes: Mapping[str, Shape], ranks: Ints) -> dict[str, Pieces]:
        masters, paddings = self.partitions.masters.of_ranks(ranks), self.partitions.paddings[ranks]
        own = locate_group(flat, shapes, self._gaps(flat), masters, paddings)
        return {name: replace(pieces, ranks=ranks[pieces.ranks]) for name, pieces in own.items()}

    # Which rank has which experts

    def _ranks(self, flat: int, rank: int) -> Ints:
        """The data-parallel ranks of an expert-parallel one, in the order of their partitions."""
        return np.flatnonzero(self._expert_ranks(flat, is_data_first=self._is_data_first) == rank)

    def _expert_ranks(self, flat: int, *, is_data_first: bool) -> Ints:
        all_ranks = np.arange(len(self.said), dtype=np.int64)
        found: Ints = all_ranks // self._count(flat) if is_data_first else all_ranks % self.num_ranks[flat]
        return found

    def _count(self, flat: int) -> int:
        return len(self.said) // self.num_ranks[flat]

    @cached_property
    def _is_data_first(self) -> bool:
        """Whether ranks of the same experts are neighbours. Raises MalformedError where no order fits."""
        if (wrong := self._first_wrong(is_data_first=False)) is None:
            return False
        if self._first_wrong(is_data_first=True) is None:
            return True
        raise MalformedError(f"its {MAPPINGS} do not fit the partitions", path=self.partitions.masters.files[wrong])

    def _first_wrong(self, *, is_data_first: bool) -> int | None:
        for flat, shapes in enumerate(self.local.param_shapes):
            held = self._held(flat, {name: shapes[name] for name in self._given(flat)})
            expert_ranks = self._expert_ranks(flat, is_data_first=is_data_first)
            seen = [0] * self.num_ranks[flat]
            for rank, groups in enumerate(self.said):
                mine = int(expert_ranks[rank])
                position, seen[mine] = seen[mine], seen[mine] + 1
                found = groups[flat] if flat < len(groups) else {}
                if {name: at for name, at in found.items() if at[0]} != held[position]:
                    return rank
        return None

    def _held(self, flat: int, shapes: Mapping[str, Shape]) -> list[dict[str, tuple[int, int]]]:
        """The elements of a group in each partition, and their starts, by name."""
        masters, paddings = self.partitions.masters, self.partitions.paddings
        size = partition_size(flat, masters, paddings)
        held: list[dict[str, tuple[int, int]]] = [{} for _ in range(self._count(flat))]
        for name, pieces in cut_group(flat, shapes, self._gaps(flat), size, masters.files[0]).items():
            for position, _, numel, start in pieces.rows():
                if position >= len(held):
                    raise MalformedError(
                        f"group {flat} has more elements than its {len(held)} partitions", path=masters.files[0]
                    )
                held[position][name] = (numel, start)
        return held

    # What is not cut

    def _scalars_at(self, pieces: Pieces) -> Scalars:
        """The scalars of the first rank that has these experts."""
        flat = int(pieces.flats[0])
        expert_ranks = self._expert_ranks(flat, is_data_first=self._is_data_first)
        return self._scalars_from(int(np.flatnonzero(expert_ranks == expert_ranks[int(pieces.ranks[0])])[0]))

    def _scalars_from(self, rank: int) -> Scalars:
        """Those of a rank; ``scalars`` itself where they are equal."""
        if rank not in self._others:
            found = self._scalars_of_rank(rank) if rank else self.scalars
            self._others[rank] = self.scalars if self._are_equal(found, self.scalars) else found
        return self._others[rank]

    def _are_equal(self, one: Scalars, other: Scalars) -> bool:
        """Whether all scalars are equal, so that a value that all ranks have is read from one place."""
        return [[*slots] for slots in one] == [[*slots] for slots in other] and all(
            mine.dtype is theirs[slot].dtype and self._bytes(mine) == self._bytes(theirs[slot])
            for slots, theirs in zip(one, other, strict=True)
            for slot, mine in slots.items()
        )

    def _bytes(self, entry: TensorEntry) -> bytes:
        at = entry.shards.get_byte_range(0)
        return self.literals[at.file] if at.file in self.literals else self.source.read(at.file, at.start, at.stop)

    def _scalars_of_rank(self, rank: int) -> Scalars:
        optim = OptimStates.of(File.open(self.source, self.partitions.masters.files[rank]))
        if [comparable(group.options) for group in optim.groups] != [comparable(g.options) for g in self.optim.groups]:
            raise MalformedError("its param groups are not those of rank 0", path=optim.file.path)
        return self._scalars_of(optim, f"rank{rank}.")

    def _flat_members(self, flat: int) -> tuple[str, ...]:
        return tuple(whole for _, whole in self.experts.expanded(self._given(flat)))

    def _given(self, flat: int) -> tuple[str, ...]:
        """The parameters of rank 0 in the order in which the optimizer got them. ``param_slice_mappings`` are in this
        order too, even if the partitions are in that of ``round_robin_gradients``."""
        own = tuple(self.local.param_shapes[flat])
        if is_round_robin(self.local) and not self.optim.is_bf16_optimizer:
            return original_order(own, self._count(flat))
        return own


# Without ZeRO


def _without_zero(source: Source, tag: TagFiles, files: ExpertFiles) -> Manifest:
    file = stage0.open_whole(source, tag)
    model = ModelStates.without_zero(file)
    check_parts(model, 1)
    layers = open_layers(source, model, files)
    if file.content.get("optimizer") is not None and not files.optim:
        raise IncompleteError(
            "the optimizer's file of this expert-parallel rank is missing",
            path=files.prefix + expert_optim_name(0),
        )
    saved = [stage0.Saved.of(File.open(source, path)) for path in files.optim]
    num_ranks = _num_ranks(saved, files)
    experts = Experts(layers, local_counts(layers, model, dict.fromkeys(layers, num_ranks)))
    whole = experts.whole(model)
    return _joined(
        [
            ExpertRank(
                whole, each, part=f"rank{rank}.", optimizer=f"optimizer.expp_rank_{rank}", experts=experts, rank=rank
            )
            for rank, each in enumerate(saved or [stage0.Saved(file)])
        ]
    )


def _num_ranks(saved: Sequence[stage0.Saved], files: ExpertFiles) -> int:
    """The expert-parallel ranks, as groups of experts are called after them. Raises FormatError."""
    for path, part in zip(files.optim, saved, strict=True):
        for group in part.groups:
            if not group.get("moe"):
                continue
            size = str(group.get("name")).removeprefix("ep_size_")
            if not size.isdecimal() or len(size) > 9:
                raise UnsupportedError("its groups of experts are not called ep_size_N", path=path)
            if int(size) > len(saved):
                missing = of_rank(files.optim[0], len(saved))
                raise IncompleteError(f"the file of this rank, one of {size}, is missing", path=missing)
            if int(size) < len(saved):
                raise UnsupportedError(
                    f"there are {len(saved)} expert-parallel ranks, and groups of {size}; save with ZeRO stage 1",
                    path=path,
                )
    return max(1, len(saved))


@dataclass(kw_only=True)
class RankContents(stage0.Contents, ABC):
    """The optimizer of one expert-parallel rank."""

    rank: int

    remedy = "resume the run and save it with ZeRO stage 1"

    def _matched(self, parameters: Mapping[str, Shape]) -> dict[int, str] | None:
        """Groups of experts have only this rank's, and no other group has an expert."""
        found: dict[int, str] = {}
        for is_expert in (False, True):
            groups = [
                NumberedGroup(tuple(group["params"]))
                for group in self.saved.groups
                if bool(group.get("moe")) == is_expert
            ]
            numbers = {number for group in groups for number in group.numbers}
            shapes = {number: shape for number, shape in self.saved.shapes().items() if number in numbers}
            own = {name: shape for name, shape in parameters.items() if self._is_own(name, is_expert=is_expert)}
            matched = match_numbers(groups, shapes, own)
            if matched is None:
                return None
            found |= matched
        return found

    def _flat_members(self, parameters: Mapping[str, Shape]) -> list[dict[str, stage0.Piece]]:
        raise UnsupportedError(
            "its fp32 masters are flat vectors without names; save with ZeRO stage 1", path=self.saved.file.path
        )

    @abstractmethod
    def _is_own(self, name: str, *, is_expert: bool) -> bool:
        """Whether this rank has the parameter, as one of its experts or as one of all others."""


@dataclass(kw_only=True)
class ExpertRank(RankContents):
    experts: Experts

    def _is_own(self, name: str, *, is_expert: bool) -> bool:
        found = split_expert(name)
        if found is None or not is_expert:
            return found is None and not is_expert
        return found[1] // self.experts.num_local[found[0]] == self.rank


def _joined(parts: Sequence[ExpertRank]) -> Manifest:
    """The manifests of all expert-parallel ranks as one. Raises MalformedError."""
    manifests = [part.manifest() for part in parts]
    first = manifests[0]
    tensors: dict[StateKey, TensorEntry] = {}
    for manifest in reversed(manifests):
        tensors |= manifest.tensors
    return replace(
        first,
        tensors={key: tensors[key] for manifest in manifests for key in manifest.tensors},
        literals={name: data for manifest in manifests for name, data in manifest.literals.items()},
        groups=tuple(_joined_groups(manifests, parts[0])),
        extra=_joined_extra(manifests),
        notes=tuple(dict.fromkeys(note for manifest in manifests for note in manifest.notes)),
    )


def _joined_groups(manifests: Sequence[Manifest], first: ExpertRank) -> Iterator[ParamGroup]:
    """Groups in the order of a model that has all experts."""
    for number, group in enumerate(manifests[0].groups):
        params = tuple(whole for _, whole in first.experts.expanded(group.params))
        others = [each.groups[number] if number < len(each.groups) else None for each in manifests]
        found = {name for other in others if other is not None for name in other.params}
        if found != set(params) or any(
            other is None or comparable(other.options) != comparable(group.options) for other in others
        ):
            raise MalformedError(
                f"the expert-parallel ranks differ in param group {number}", path=first.saved.file.path
            )
        yield replace(group, params=params)


def _joined_extra(manifests: Sequence[Manifest]) -> dict[str, Any]:
    """The entries of rank 0, with those of each rank's optimizer."""
    extra = dict(manifests[0].extra)
    if "optimizer" in extra:
        extra["optimizer"] = {f"expp_rank_{rank}": each.extra.get("optimizer") for rank, each in enumerate(manifests)}
    states = [
        own.get("optimizer_state", {}) for each in manifests if isinstance(own := each.extra.get("deepspeed"), dict)
    ]
    kept = {name: value for state in reversed(states) for name, value in state.items()}
    return {**extra, "deepspeed": {**extra.get("deepspeed", {}), "optimizer_state": kept}} if kept else extra

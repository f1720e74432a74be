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
from ckpt_tools.core.values import StoredTensor, Value
from ckpt_tools.core.wording import format_count
from ckpt_tools.errors import IncompleteError, MalformedError, UnsupportedError
from ckpt_tools.formats.deepspeed.common.files import File, ModelStates, OptimStates
from ckpt_tools.formats.deepspeed.common.fused_experts import LEFT_OUT, Fused, FusedLayer
from ckpt_tools.formats.deepspeed.common.tensor_parallel import Join, Rules
from ckpt_tools.formats.deepspeed.names import expert_name, expert_optim_name
from ckpt_tools.formats.deepspeed.zero_reader import stage0
from ckpt_tools.formats.deepspeed.zero_reader.contents import Scalars
from ckpt_tools.formats.deepspeed.zero_reader.experts import Experts
from ckpt_tools.formats.deepspeed.zero_reader.flat import Pieces, locate_params
from ckpt_tools.formats.deepspeed.zero_reader.joining import Joining
from ckpt_tools.formats.deepspeed.zero_reader.locate import ExpertFiles, TagFiles
from ckpt_tools.formats.deepspeed.zero_reader.moe import ExpertContents, RankContents, check_ranks, mapped_partitions
from ckpt_tools.formats.deepspeed.zero_reader.ranks import read_partitions
from ckpt_tools.stores.source import Source

GROUPS = "ds_zero_partition_groups"
_FOLDED = "of a run with AutoEP and tensor parallelism, which is not supported; save it without tensor parallelism"


def _check_groups(fused: Fused, model: ModelStates, num_ranks: Mapping[int, int], path: str) -> None:
    """Raises MalformedError where a group of partitions is not cut over the ranks of its experts."""
    for flat, shapes in enumerate(model.param_shapes):
        wanted = {layer.num_ranks if (layer := fused.layer_of(name)) else 1 for name in shapes}
        if shapes and wanted != {num_ranks.get(flat)}:
            raise MalformedError(f"its group {flat} of partitions is not cut over the ranks of its experts", path=path)


@dataclass(kw_only=True)
class FusedContents(ExpertContents):
    """``weights`` are the experts that have files of their own, by name."""

    weights: Mapping[str, ShardTable]
    left_out: ClassVar[tuple[str, ...]] = ("optimizer", *LEFT_OUT)

    def _weight(self, name: str, value: StoredTensor) -> TensorEntry:
        if name not in self.weights:
            return super()._weight(name, value)
        table = self.weights[name]
        return TensorEntry(table.shape, table.dtype, Kind.PARAMETER, table)

    def _scalars_at(self, pieces: Pieces) -> Scalars:
        """The scalars of rank 0. Raises UnsupportedError where the ranks of other experts have others."""
        flat = int(pieces.flats[0])
        for rank in range(self.num_ranks[flat]):
            first = int(self._ranks(flat, rank)[0])
            if self._scalars_from(first) is not self.scalars:
                raise UnsupportedError(
                    "its step is not that of rank 0, which has other experts of the same tensors",
                    path=self.partitions.masters.files[first],
                )
        return self.scalars


@dataclass(kw_only=True)
class PartitionedContents(FusedContents):
    """Stage 3. ``expert_ranks`` are the expert-parallel ranks of all ranks."""

    expert_ranks: Ints
    fused: Fused

    @cached_property
    def pieces(self) -> Mapping[str, Pieces]:
        world_size = len(self.said)
        counts = [world_size // self.num_ranks[flat] for flat in range(len(self.optim.masters))]
        found = locate_params(self.local.param_shapes, self.partitions.masters, counts)
        return {
            name: reduce(Pieces.followed_by, self._of_ranks(name, found[name]))
            for shapes in self.local.param_shapes
            for name in shapes
            if name in found
        }

    def _of_ranks(self, name: str, pieces: Pieces) -> list[Pieces]:
        if self.fused.layer_of(name) is None:
            return [pieces]
        ranks = (self._ranks(int(pieces.flats[0]), rank) for rank in range(self.num_ranks[int(pieces.flats[0])]))
        return [replace(pieces, ranks=own[pieces.ranks]) for own in ranks]

    def _expert_ranks(self, flat: int, *, is_data_first: bool) -> Ints:
        return self.expert_ranks if self.num_ranks[flat] > 1 else np.zeros_like(self.expert_ranks)

    @cached_property
    def _is_data_first(self) -> bool:
        return False


def expert_weights(
    source: Source, fused: Fused, model: ModelStates, files: ExpertFiles, rank: int | None = None
) -> tuple[dict[str, ShardTable], dict[str, tuple[StoredTensor, File]]]:
    """The tensors of experts from their files, all or those of one expert-parallel rank, and the first expert's part of
    each. Raises FormatError if a file is missing or is not of its expert."""
    shapes = {**model.trainable, **model.frozen_shapes}
    names = fused.names(model)
    tables: dict[str, ShardTable] = {}
    first: dict[str, tuple[StoredTensor, File]] = {}
    wanted = {(layer.number, number) for layer in fused.layers for number in range(layer.num_experts)}
    if missing := wanted - files.weights.keys():
        raise IncompleteError("the file of this expert is missing", path=files.prefix + expert_name(*min(missing)))
    if more := files.weights.keys() - wanted:
        raise MalformedError(
            "there is no such expert; this file is perhaps from an earlier save", path=files.weights[min(more)]
        )
    for layer in fused.layers:
        own = [name for name in names if fused.layer_of(name) is layer]
        numbers = range(layer.num_experts)
        if rank is not None:
            numbers = numbers[rank * layer.num_local : (rank + 1) * layer.num_local]
        opened = [File.open(source, files.weights[layer.number, number]) for number in numbers]
        parts = [_parts(file, number, layer, own) for number, file in zip(numbers, opened, strict=True)]
        for name in own:
            shape = (len(numbers), *shapes[name][1:])
            tables[name] = _stacked(shape, [each[name] for each in parts], opened, name)
            first[name] = parts[0][name], opened[0]
    return tables, first


def _parts(file: File, number: int, layer: FusedLayer, names: Sequence[str]) -> dict[str, StoredTensor]:
    """The tensors of one expert, which are called ``experts.w1.3``."""
    found = {f"{name}.{number}": file.content.get(f"{name}.{number}") for name in names}
    parts = {name.rpartition(".")[0]: value for name, value in found.items() if isinstance(value, StoredTensor)}
    if file.content.keys() != found.keys() or len(parts) < len(names):
        raise MalformedError(f"it does not hold expert {number} of {layer.module} alone", path=file.path)
    return parts


def _stacked(shape: tuple[int, ...], parts: Sequence[StoredTensor], files: Sequence[File], name: str) -> ShardTable:
    shards = []
    for number, (part, file) in enumerate(zip(parts, files, strict=True)):
        if tuple(part.shape) != shape[1:] or part.dtype is not parts[0].dtype or not part.is_contiguous:
            raise MalformedError(f"its {name} is not as param_shapes states", path=file.path)
        start = file.start(part)
        box = Box((number, *(0,) * (len(shape) - 1)), (number + 1, *shape[1:]))
        shards.append(Shard(box, ByteRange(file.path, start, start + part.numel * part.dtype.item_bytes)))
    return ShardTable.build(shape, parts[0].dtype, shards)


def expert_ranks(source: Source, paths: Sequence[str], world_size: int) -> Ints:
    """The expert-parallel rank of each rank in stage 3, as its model file states it. Raises FormatError."""
    found = []
    for path in paths:
        layers = Fused.of(File.open(source, path)).layers
        ranks = {layer.rank for layer in layers}
        if len(ranks) != 1:
            raise MalformedError("its layers do not state one expert-parallel rank", path=path)
        found.append(ranks.pop())
    sizes = np.bincount(np.array(found, np.int64))
    if len(found) != world_size or len(set(sizes.tolist())) != 1:
        raise MalformedError(
            f"the experts are not spread evenly over {format_count(world_size, 'rank')}", path=paths[0]
        )
    return np.array(found, np.int64)


def read(source: Source, tags: Sequence[TagFiles], files: ExpertFiles, fused: Fused) -> Manifest:
    """A run in stage 1 or 2. Raises FormatError if a file is missing or damaged, or does not fit the others."""
    if len(tags) > 1:
        raise UnsupportedError(f"it is {_FOLDED}", path=tags[1].models(0)[0])
    if not tags[0].optim:
        return _without_zero(source, tags[0], files, fused)
    optim = OptimStates.of(File.open(source, tags[0].optim[0]))
    if optim.stage > 2 or files.optim:
        raise MalformedError(
            "it is of a run in stage 1 or 2, perhaps from an earlier save",
            path=min(files.weights.values(), default=fused.path),
        )
    model = ModelStates.of(File.open(source, tags[0].models(optim.stage)[0]))
    check_ranks(tags[0], model, optim)
    tables, values = expert_weights(source, fused, model, files)
    partitions, said = mapped_partitions(source, tags[0].optim, optim)
    num_ranks = {flat: len(tags[0].optim) // parts for flat, parts in enumerate(optim.partition_counts)}
    _check_groups(fused, model, num_ranks, optim.file.path)
    return FusedContents(
        source,
        fused.whole(model, values),
        optim,
        (model.file.path,),
        partitions,
        experts=Experts({}, {}),
        local=model,
        num_ranks=num_ranks,
        said=said,
        weights=tables,
    ).manifest()


@dataclass(kw_only=True)
class FusedRank(RankContents):
    """Without ZeRO: the weights of one expert-parallel rank, and its optimizer. ``weights`` are its experts."""

    fused: Fused
    weights: Mapping[str, ShardTable]
    left_out = FusedContents.left_out

    def _weights(self, ties: Mapping[str, str]) -> Iterator[tuple[StateKey, TensorEntry]]:
        for key, entry in super()._weights(ties):
            table = self.weights.get(key.fqn)
            yield key, entry if table is None else TensorEntry(table.shape, table.dtype, Kind.PARAMETER, table)

    def _is_own(self, name: str, *, is_expert: bool) -> bool:
        return (name in self.weights) == is_expert


@dataclass(frozen=True, slots=True)
class ExpertRules(Rules):
    """Experts are cut along their first dim, and all else is on every rank."""

    fused: Fused

    def join(self, name: str, shapes: Sequence[Shape]) -> Join:
        return self.along(name, shapes, 0) if self.fused.layer_of(name) else self.replicated(name, shapes)


def _without_zero(source: Source, tag: TagFiles, files: ExpertFiles, fused: Fused) -> Manifest:
    file = stage0.open_whole(source, tag)
    num_ranks = fused.layers[0].num_ranks
    if file.content.get("optimizer") is not None and len(files.optim) != num_ranks:
        raise IncompleteError(
            f"the files of the optimizers of {format_count(num_ranks, 'expert-parallel rank')} are not all there",
            path=files.prefix + expert_optim_name(min(len(files.optim), num_ranks - 1)),
        )
    saved = [stage0.Saved.of(File.open(source, path)) for path in files.optim] or [stage0.Saved(file)] * num_ranks
    model = replace(ModelStates.without_zero(file), param_shapes=(_local_shapes(source, fused, files),))
    parts = []
    for rank, each in enumerate(saved):
        tables, values = expert_weights(source, fused, model, files, rank)
        own = replace(fused.whole(model, values), param_shapes=())
        parts.append(FusedRank(own, each, part=f"rank{rank}.", rank=rank, fused=fused, weights=tables).manifest())
    joined = Joining(parts, ExpertRules({}, fused.path, fused), of="expert-parallel rank").manifest()
    literals = {name: data for part in parts for name, data in part.literals.items()}
    # The steps of experts are one number of one tensor.
    equal = [
        EqualPair(f"{key} of expert-parallel ranks 0 and {rank}", entry, part.tensors[key])
        for key, entry in parts[0].tensors.items()
        if entry.kind is Kind.STATE and not entry.shape and fused.layer_of(key.fqn)
        for rank, part in enumerate(parts[1:], 1)
    ]
    must_equal = (*joined.must_equal, *equal)
    return replace(joined, world_size=parts[0].world_size, literals=literals, must_equal=must_equal)


def _local_shapes(source: Source, fused: Fused, files: ExpertFiles) -> dict[str, Shape]:
    """The shapes of one rank's experts, which no file states without ZeRO, by the first expert of each layer."""
    found: dict[str, Shape] = {}
    for layer in fused.layers:
        path = files.weights.get((layer.number, 0))
        for name, value in (File.open(source, path).content if path else {}).items():
            if isinstance(name, str) and name.startswith(layer.prefix) and isinstance(value, StoredTensor):
                found[name.removesuffix(".0")] = (layer.num_local, *value.shape)
    return found


def partitioned(
    source: Source, files: TagFiles, model: ModelStates, optim: OptimStates, fused: Fused
) -> PartitionedContents:
    """A run in stage 3. Raises FormatError as ``read`` does."""
    if optim.stage < 3:
        raise IncompleteError("the files of its experts are missing", path=files.prefix + expert_name(0, 0))
    world_size = optim.world_size
    ranks = expert_ranks(source, files.rank_models, world_size)
    _check_shards(model, fused, optim.file.path, len(optim.masters))
    num_ranks = {
        flat: fused.layers[0].num_ranks if any(map(fused.layer_of, shapes)) else 1
        for flat, shapes in enumerate(model.param_shapes)
    }
    _check_groups(fused, model, num_ranks, model.file.path)
    seen: list[OptimStates] = []

    def visit(states: OptimStates) -> None:
        rank = len(seen)
        seen.append(states)
        for flat, num in num_ranks.items():
            same = np.flatnonzero(ranks == ranks[rank]) if num > 1 else np.arange(world_size)
            if _partition_ranks(states, flat) != same.tolist():
                raise MalformedError(f"its {GROUPS} are not those of its experts", path=states.file.path)

    partitions = read_partitions(source, files.optim, optim, visit)
    return PartitionedContents(
        source,
        fused.whole(model),
        optim,
        files.rank_models,
        partitions,
        experts=Experts({}, {}),
        local=model,
        num_ranks=num_ranks,
        said=[[]] * world_size,
        weights={},
        expert_ranks=ranks,
        fused=fused,
    )


def _check_shards(model: ModelStates, fused: Fused, path: str, num_flats: int) -> None:
    if len(model.param_shapes) != num_flats:
        raise MalformedError(
            f"it has {num_flats} partitions, but param_shapes has {len(model.param_shapes)}", path=path
        )
    if any(map(fused.layer_of, model.frozen_shapes)):
        raise UnsupportedError("its experts are frozen, which is not supported in stage 3", path=model.file.path)


def _partition_ranks(states: OptimStates, flat: int) -> Value:
    """The ranks over which a sub-group is cut."""
    groups = states.own.get(GROUPS)
    group = groups[flat] if isinstance(groups, list) and flat < len(groups) else None
    return group.get("partition_ranks") if isinstance(group, dict) else None

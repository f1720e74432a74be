"""``param_slice_mappings`` of the ranks' optimizer files in stages 1 and 2: the places that a rank states.

The shapes of parameters and the cut of their group say the same. So the mappings show which ranks hold what if nothing
else does: the experts of ``deepspeed.moe``, and the parameters of BF16_Optimizer in a pipeline.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ckpt_tools.core.boxes import Shape
from ckpt_tools.core.values import Opaque, are_naturals, format_brief
from ckpt_tools.errors import MalformedError, UnsupportedError
from ckpt_tools.formats.deepspeed.common.files import (
    MAX_PADDING,
    DeepSpeedFile,
    OptimStates,
    require_entry,
    unwrap_attributes,
)
from ckpt_tools.formats.deepspeed.zero_reader.placements import GroupPlacement, cut_placement, find_partition_numel
from ckpt_tools.formats.deepspeed.zero_reader.ranks import RankPartitions, read_partitions
from ckpt_tools.stores.source import Source

MAPPINGS_ENTRY = "param_slice_mappings"

SliceMapping = Mapping[str, tuple[int, int]]
"""Of each parameter of a group, by name, the number of its elements on a rank and their start in the rank's vector."""


def read_slice_mappings(file: DeepSpeedFile) -> list[SliceMapping]:
    """``param_slice_mappings`` of a rank's file, one mapping a group."""
    state_dict = require_entry(file.content, "optimizer_state_dict", dict, file.path)
    mappings: list[SliceMapping] = []
    for group in require_entry(state_dict, MAPPINGS_ENTRY, list, file.path):
        if not isinstance(group, dict):
            raise MalformedError("its param_slice_mappings are not dictionaries", path=file.path)
        addresses: dict[str, tuple[int, int]] = {}
        for name, address in group.items():
            if not isinstance(name, str):
                raise MalformedError(f"its param_slice_mappings have the key {format_brief(name)}", path=file.path)
            attributes: Any = unwrap_attributes(address) if isinstance(address, Opaque) else None
            numel_and_start: Any = isinstance(attributes, dict) and [attributes.get(key) for key in ("numel", "start")]
            if not are_naturals(numel_and_start) or max(numel_and_start) > MAX_PADDING:
                raise MalformedError("its param_slice_mappings have no addresses", path=file.path)
            addresses[name] = numel_and_start[0], numel_and_start[1]
        mappings.append(addresses)
    return mappings


def read_mapped_partitions(
    source: Source, paths: Sequence[str], optim: OptimStates
) -> tuple[RankPartitions, list[list[SliceMapping]]]:
    """The vectors of all ranks, and the mappings of each. Raises UnsupportedError if a file has none; FormatError as
    ``read_partitions`` does."""
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


def compute_flat_shapes(mappings_by_rank: Sequence[Sequence[SliceMapping]]) -> tuple[dict[str, Shape], ...]:
    """Flat shapes ``(numel,)`` of each group's parameters in their order, from the places that each rank states.

    A bf16 run without ZeRO has BF16_Optimizer's partitions and no param_shapes.
    """
    groups: list[dict[str, int]] = []
    for mappings in mappings_by_rank:
        for number, mapping in enumerate(mappings):
            if number == len(groups):
                groups.append({})
            for name, (numel, _) in sorted(mapping.items(), key=lambda item: item[1][1]):
                groups[number][name] = groups[number].get(name, 0) + numel
    return tuple({name: (numel,) for name, numel in group.items()} for group in groups)


def find_misfit(
    groups: Iterable[GroupPlacement], partitions: RankPartitions, mappings_by_rank: Sequence[Sequence[SliceMapping]]
) -> tuple[str, str] | None:
    """The file of the first rank whose mapping is not what cutting the groups gives for it, and a parameter in which
    they differ; None if all fit. ``groups`` are in the order of the optimizer, as the mappings are even if the
    partitions are in that of ``round_robin_gradients``. Raises MalformedError if the partitions are too few."""
    masters = partitions.masters
    misfits: list[tuple[int, int, str]] = []
    for group in groups:
        expected_mappings: list[dict[str, tuple[int, int]]] = [{} for _ in group.ranks]
        partition_numel = find_partition_numel(group.flat, masters, partitions.paddings)
        for name, intervals in cut_placement(group, partition_numel, masters.files[0]):
            for position, _, numel, start in intervals.iterate_rows():
                if position >= len(group.ranks):
                    why = f"group {group.flat} has more elements than its {len(group.ranks)} partitions"
                    raise MalformedError(why, path=masters.files[0])
                expected_mappings[position][name] = (numel, start)
        for rank, expected_mapping in zip(group.ranks.tolist(), expected_mappings, strict=True):
            stated_mapping = mappings_by_rank[rank][group.flat] if group.flat < len(mappings_by_rank[rank]) else {}
            held_parts = {name: place for name, place in stated_mapping.items() if place[0]}
            names = (name for name, _ in held_parts.items() ^ expected_mapping.items())
            misfits += [(group.flat, rank, name) for name in names]
    if not misfits:
        return None
    _, rank, name = min(misfits)
    return masters.files[rank], name

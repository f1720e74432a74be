"""Numbers of ranks that fit a checkpoint: the largest that is of use (a larger one is a mistake, such as a digit too
many), and entries that are for another number."""

from __future__ import annotations

import re
from typing import Any

from ckpt_tools.core.manifest import Kind, Manifest
from ckpt_tools.core.notes import Note, Outcome
from ckpt_tools.core.option_names import format_option
from ckpt_tools.core.wording import format_count
from ckpt_tools.errors import UsageError


def check_ranks_by_rows(manifest: Manifest, world_size: int) -> None:
    """For DCPs, which any number of ranks loads, and whose tensors are cut along their rows. Raises UsageError."""
    kinds = (Kind.PARAMETER, Kind.STATE)
    rows = [entry.shape[0] for entry in manifest.tensors.values() if entry.kind in kinds and entry.shape]
    _check_world_size(
        manifest, world_size, max(rows, default=1), "the most rows that a tensor has, along which tensors are cut"
    )


def check_ranks_by_elements(manifest: Manifest, world_size: int) -> None:
    """Raises UsageError for too many ranks of a format in which every rank loads its own file."""
    elements = [entry.numel for entry in manifest.select_kinds(Kind.PARAMETER).values()]
    _check_world_size(manifest, world_size, max(elements, default=1), "the elements of its largest parameter")


_RANK_KEY = re.compile(r"(?:dp_)?rank_?\d+")


def note_rank_states(manifest: Manifest, world_size: int) -> tuple[Note, ...]:
    """A note on each entry that has a state for every rank, and is carried to another number of ranks: torchtitan's
    ``dataloader`` by the names of ranks, Composer's list ``rng``."""
    source_ranks = manifest.world_size
    extra = {} if source_ranks in (None, world_size) else manifest.extra
    why = f"its states are of the source's ranks, not of {format_count(world_size, 'rank')}; it is carried as it is"
    num_states_by_entry = ((name, _count_rank_states(name, value, source_ranks)) for name, value in extra.items())
    return tuple(
        Note(Outcome.NOT_LOADED, name, why, number)
        for name, number in num_states_by_entry
        if number not in (0, world_size)
    )


def _count_rank_states(name: str, value: Any, num_ranks: int | None) -> int:
    if isinstance(value, list):
        return len(value) if name == "rng" and len(value) == num_ranks else 0
    return sum(_RANK_KEY.fullmatch(str(key)) is not None for key in value) if isinstance(value, dict) else 0


def _check_world_size(manifest: Manifest, world_size: int, max_useful: int, max_useful_reason: str) -> None:
    source_ranks = manifest.world_size or 1
    if world_size > max(max_useful, source_ranks, 1):
        limit = (
            f"{source_ranks:,}, the number of ranks of the source"
            if source_ranks > max_useful
            else f"{max_useful:,}, {max_useful_reason}"
        )
        raise UsageError(
            f"{format_option('world_size', world_size)}: the largest useful number of ranks for this checkpoint is "
            f"{limit}"
        )

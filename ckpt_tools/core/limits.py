"""Refuses what is out of proportion to a checkpoint: tensors far larger than what stores them, more ranks than are of
use (a mistake, such as a digit too many). And notes entries that are for another number of ranks.

A tensor of 4 bytes with strides of 0 can have 4 EB of elements, and so can an array without a chunk. What models
expand, such as a mask over a batch, is small beside their weights.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from ckpt_tools.core.manifest import Kind, Manifest, StateKey, TensorEntry
from ckpt_tools.core.notes import Note, Outcome
from ckpt_tools.core.option_names import format_option
from ckpt_tools.errors import UnsupportedError, UsageError
from ckpt_tools.messages.wording import format_count, format_size

MAX_EXPANSION: Final = 1024
"""Bytes of all tensors for each byte of the files: a second of reading for a megabyte."""

MAX_FREE_BYTES: Final = 1 << 30
"""So many bytes may come from any files."""


def check_expansion(tensors: Mapping[StateKey, TensorEntry], stored_bytes: int) -> None:
    """Raises UnsupportedError for more than ``MAX_EXPANSION`` times the ``stored_bytes`` of a source's files, if these
    are known."""
    total_bytes = sum(entry.num_bytes for entry in tensors.values())
    if stored_bytes and total_bytes > max(MAX_FREE_BYTES, MAX_EXPANSION * stored_bytes):
        key, entry = max(tensors.items(), key=lambda each: each[1].num_bytes)
        raise UnsupportedError(
            f"its tensors have {format_size(total_bytes)}, more than {MAX_EXPANSION:,} times as many as the files "
            f"have, which are {format_size(stored_bytes)}; the largest is {key} of {format_size(entry.num_bytes)}: it "
            f"is expanded from a few elements; leave it out with {format_option('exclude')}, or save it with "
            ".contiguous()"
        )


def check_ranks_by_rows(manifest: Manifest, world_size: int) -> None:
    """Raises UsageError for too many ranks of a DCP, which any number of ranks loads, and whose tensors are cut along
    their rows."""
    kinds = (Kind.PARAMETER, Kind.STATE)
    rows = [entry.shape[0] for entry in manifest.tensors.values() if entry.kind in kinds and entry.shape]
    reason = "the most rows that a tensor has, along which tensors are cut"
    _check_world_size(manifest, world_size, max(rows, default=1), reason)


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

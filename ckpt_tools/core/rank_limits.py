"""Numbers of ranks that fit a checkpoint: the largest that is of use (a larger one is a mistake, such as a digit too
many), and entries that are for another number."""

from __future__ import annotations

import re
from typing import Any

from ckpt_tools.core.manifest import Kind, Manifest
from ckpt_tools.core.notes import Note, Outcome
from ckpt_tools.core.option_names import option
from ckpt_tools.core.wording import count
from ckpt_tools.errors import UsageError


def check_rows(manifest: Manifest, world_size: int) -> None:
    """For DCPs, which any number of ranks loads, and whose tensors are cut along their rows. Raises UsageError."""
    kinds = (Kind.PARAMETER, Kind.STATE)
    rows = [entry.shape[0] for entry in manifest.tensors.values() if entry.kind in kinds and entry.shape]
    _check(manifest, world_size, max(rows, default=1), "the most rows that a tensor has, along which tensors are cut")


def check_elements(manifest: Manifest, world_size: int) -> None:
    """Raises UsageError for too many ranks of a format in which every rank loads its own file."""
    elements = [entry.numel for entry in manifest.of_kind(Kind.PARAMETER).values()]
    _check(manifest, world_size, max(elements, default=1), "the elements of its largest parameter")


_RANK = re.compile(r"(?:dp_)?rank_?\d+")


def rank_notes(manifest: Manifest, world_size: int) -> tuple[Note, ...]:
    """A note on each entry that has a state for every rank, and is carried to another number of ranks: torchtitan's
    ``dataloader`` by the names of ranks, Composer's list ``rng``."""
    before = manifest.world_size
    extra = {} if before in (None, world_size) else manifest.extra
    why = f"its states are of the source's ranks, not of {count(world_size, 'rank')}; it is carried as it is"
    numbers = ((name, _num_states(name, value, before)) for name, value in extra.items())
    return tuple(
        Note(Outcome.NOT_LOADED, name, why, number) for name, number in numbers if number not in (0, world_size)
    )


def _num_states(name: str, value: Any, num_ranks: int | None) -> int:
    if isinstance(value, list):
        return len(value) if name == "rng" and len(value) == num_ranks else 0
    return sum(_RANK.fullmatch(str(key)) is not None for key in value) if isinstance(value, dict) else 0


def _check(manifest: Manifest, world_size: int, most: int, what: str) -> None:
    own = manifest.world_size or 1
    if world_size > max(most, own, 1):
        limit = f"{own:,}, the number of ranks of the source" if own > most else f"{most:,}, {what}"
        raise UsageError(
            f"{option('world_size', world_size)}: the largest useful number of ranks for this checkpoint is {limit}"
        )

"""The largest number of ranks that is of use to a checkpoint. A larger one is a mistake, such as a digit too many."""

from __future__ import annotations

from ckpt_tools.core.manifest import Kind, Manifest
from ckpt_tools.core.option_names import option
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


def _check(manifest: Manifest, world_size: int, most: int, what: str) -> None:
    own = manifest.world_size or 1
    if world_size > max(most, own, 1):
        limit = f"{own:,}, the number of ranks of the source" if own > most else f"{most:,}, {what}"
        raise UsageError(
            f"{option('world_size', world_size)}: the largest useful number of ranks for this checkpoint is {limit}"
        )

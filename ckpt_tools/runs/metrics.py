"""Metrics of a checkpoint, and the best of a run, from the records of its trainers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress

from ckpt_tools.errors import FormatError
from ckpt_tools.trainers.all import TRAINERS
from ckpt_tools.trainers.saved import SavedCheckpoint

_COUNTER_NAMES = frozenset(("epoch", "step", "global_step", "total_flos", "learning_rate"))


def read_metrics(checkpoint: SavedCheckpoint) -> Mapping[str, float]:
    """Metrics by name. Of the same name, what the checkpoint itself says wins over the run. Raises StoreError."""
    metrics: dict[str, float] = {}
    for trainer in reversed(TRAINERS):
        try:
            recorded_items = [] if trainer.read_metrics is None else list(trainer.read_metrics(checkpoint))
        except FormatError:
            continue  # a record that cannot be read says nothing
        for name, value in recorded_items:
            is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            if isinstance(name, str) and name not in _COUNTER_NAMES and is_number:
                metrics[name] = float(value)
    return metrics


def find_recorded_best(members: Sequence[SavedCheckpoint]) -> Mapping[str, str]:
    """Names of the checkpoints that the newest record of a trainer calls the best, each with the reason to keep it.
    ``members`` are in order, the newest first. Raises StoreError."""
    keep_reasons: dict[str, str] = {}
    for read_best in (trainer.read_best for trainer in TRAINERS if trainer.read_best is not None):
        newest_record = None
        for member in members:
            with suppress(FormatError):  # a record that cannot be read says nothing
                newest_record = newest_record or read_best(member)
        if newest_record is not None:
            best_names = (member.name for member in members if member.base_name in newest_record.folder_names)
            keep_reasons |= dict.fromkeys(best_names, f"{newest_record.record_name} names it as the best")
    return keep_reasons

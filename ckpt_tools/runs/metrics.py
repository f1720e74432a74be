"""Metrics of a checkpoint, from the records of its trainers."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ckpt_tools.errors import FormatError
from ckpt_tools.trainers.all import TRAINERS
from ckpt_tools.trainers.saved import Saved

_COUNTS = frozenset(("epoch", "step", "global_step", "total_flos", "learning_rate"))


def metrics_of(saved: Saved) -> Mapping[str, float]:
    """Metrics by name. Of the same name, what the checkpoint itself says wins over the run. Raises StoreError."""
    found: dict[str, float] = {}
    for trainer in reversed(TRAINERS):
        try:
            said = () if trainer.metrics is None else trainer.metrics(saved)
            found |= {name: float(value) for name, value in said if _is_metric(name, value)}
        except FormatError:
            continue  # a record that cannot be read says nothing
    return found


def _is_metric(name: object, value: object) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return isinstance(name, str) and name not in _COUNTS and is_number

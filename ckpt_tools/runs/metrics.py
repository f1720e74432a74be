"""Metrics of a checkpoint, and the best of a run, from the records of its trainers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from ckpt_tools.errors import FormatError
from ckpt_tools.stores.source import Source
from ckpt_tools.trainers.all import TRAINERS
from ckpt_tools.trainers.record import Named
from ckpt_tools.trainers.run_folders import Member
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


def named_best(members: Sequence[Member], run: Source) -> Mapping[str, str]:
    """Names of the checkpoints that the newest record of a trainer calls the best, each with the reason to keep it.
    ``members`` are in order, the newest first. Raises StoreError."""
    found: dict[str, str] = {}
    for trainer in TRAINERS:
        if trainer.best is not None:
            records = (_record(trainer.best, member.saved(run)) for member in members)
            newest = next((each for each in records if each is not None), None)
            if newest is not None:
                best = (member.name for member in members if member.title in newest.titles)
                found |= dict.fromkeys(best, f"{newest.record} names it as the best")
    return found


def _record(best: Callable[[Saved], Named | None], saved: Saved) -> Named | None:
    try:
        return best(saved)
    except FormatError:
        return None  # a record that cannot be read says nothing


def _is_metric(name: object, value: object) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return isinstance(name, str) and name not in _COUNTS and is_number

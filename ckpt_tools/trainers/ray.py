"""Ray Train: checkpoints of any framework, and a record of the run beside them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckpt_tools.trainers.record import Metrics, Trainer
from ckpt_tools.trainers.saved import Saved

RECORD = "checkpoint_manager_snapshot.json"
"""Written after every worker has uploaded its part of a checkpoint."""


def _results(saved: Saved, path: str) -> list[Mapping[str, Any]] | None:
    found = saved.object_at(path).get("checkpoint_results")
    return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else None


def _problem(saved: Saved) -> str | None:
    """A run of ours on a disk renames a finished folder, which needs no record."""
    from ckpt_tools.stores.urls import is_remote

    path = saved.beside(RECORD)
    if path is None or not (saved.title.startswith("checkpoint_") or is_remote(saved.run.store.url)):
        return None
    results = _results(saved, path)
    if results is None or saved.title in {each.get("checkpoint_dir_name") for each in results}:
        return None
    return f"{RECORD} does not name it: the save did not finish"


def _metrics(saved: Saved) -> Metrics:
    path = saved.beside(RECORD)
    for each in (_results(saved, path) if path is not None else None) or ():
        metrics = each.get("metrics")
        if each.get("checkpoint_dir_name") == saved.title and isinstance(metrics, dict):
            yield from metrics.items()


RAY = Trainer(
    name="Ray Train",
    others=r"\.is_checkpoint|\.metadata\.json|\.tune_metadata",
    problem=_problem,
    metrics=_metrics,
)

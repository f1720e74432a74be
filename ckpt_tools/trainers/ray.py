"""Ray Train: checkpoints of any framework, and a record of the run beside them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckpt_tools.trainers.record import MetricItems, Trainer
from ckpt_tools.trainers.saved import SavedCheckpoint

SNAPSHOT_FILE = "checkpoint_manager_snapshot.json"
"""Written after every worker has uploaded its part of a checkpoint."""


def _read_results(checkpoint: SavedCheckpoint, path: str) -> list[Mapping[str, Any]] | None:
    results = checkpoint.read_json_object(path).get("checkpoint_results")
    return [each for each in results if isinstance(each, dict)] if isinstance(results, list) else None


def _find_problem(checkpoint: SavedCheckpoint) -> str | None:
    """Why the checkpoint is not complete by the record of the run. A run of ours on a disk renames a finished folder,
    which needs no record."""
    from ckpt_tools.arguments import is_remote

    path = checkpoint.find_sibling(SNAPSHOT_FILE)
    if path is None or not (checkpoint.base_name.startswith("checkpoint_") or is_remote(checkpoint.run.store.url)):
        return None
    results = _read_results(checkpoint, path)
    if results is None or checkpoint.base_name in {each.get("checkpoint_dir_name") for each in results}:
        return None
    return f"{SNAPSHOT_FILE} does not name it: the save did not finish"


def _read_metrics(checkpoint: SavedCheckpoint) -> MetricItems:
    path = checkpoint.find_sibling(SNAPSHOT_FILE)
    for each in (_read_results(checkpoint, path) if path is not None else None) or ():
        metrics = each.get("metrics")
        if each.get("checkpoint_dir_name") == checkpoint.base_name and isinstance(metrics, dict):
            yield from metrics.items()


RAY = Trainer(
    name="Ray Train",
    others=r"\.is_checkpoint|\.metadata\.json|\.tune_metadata",
    find_problem=_find_problem,
    read_metrics=_read_metrics,
)

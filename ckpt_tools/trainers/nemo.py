"""NeMo 2, and NeMo Automodel, whose model and optimizer are checkpoints of two formats.

Automodel writes ``model/`` through ``HuggingFaceStorageWriter`` and then ``optim/`` as a DCP ``{"optim", "sched"}``
(components/checkpoint/checkpointing.py, stateful_wrappers.py). ``reading.halves`` joins the two.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from ckpt_tools.trainers.halves import find_weights_beside_dcp
from ckpt_tools.trainers.record import MetricItems, Trainer
from ckpt_tools.trainers.saved import SavedCheckpoint

_LOSSES = "losses.json"
_SHARD = r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors"


def _find_problem(checkpoint: SavedCheckpoint) -> str | None:
    is_automodel = re.fullmatch(r"epoch_\d+_step_\d+", checkpoint.base_name) is not None
    has_model = is_automodel and any(re.fullmatch(f"model/{_SHARD}", path) for path in checkpoint.files)
    if not has_model or any(path.startswith("optim/") for path in checkpoint.files):
        return None
    return "no optim/, which is written after model/: the save did not finish"


def _read_metrics(checkpoint: SavedCheckpoint) -> MetricItems:
    if _LOSSES not in checkpoint.files:
        return ()
    return _flatten_metrics(checkpoint.read_json_object(checkpoint.path_in_run(_LOSSES)))


def _flatten_metrics(metrics: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in metrics.items():
        if isinstance(value, dict) and not prefix:
            yield from _flatten_metrics(value, f"{name}.")
        else:
            yield f"{prefix}{name}", value


NEMO = Trainer(name="NeMo", folders="weights", unfinished_marker="{title}-unfinished")

AUTOMODEL = Trainer(
    name="NeMo Automodel",
    others=rf"{_SHARD}|losses\.json|config\.yaml|consolidate\.sh",
    folders="model|optim|dataloader|rng|rank_?\\d+",
    find_halves=partial(find_weights_beside_dcp, weights_folder="model/", optimizer_folder="optim/"),
    find_problem=_find_problem,
    read_metrics=_read_metrics,
)

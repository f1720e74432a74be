"""NeMo 2, and NeMo Automodel, whose model and optimizer are checkpoints of two formats.

Automodel writes ``model/`` through ``HuggingFaceStorageWriter`` and then ``optim/`` as a DCP ``{"optim", "sched"}``
(components/checkpoint/checkpointing.py, stateful_wrappers.py). ``reading.halves`` joins the two.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from ckpt_tools.trainers.record import Metrics, Trainer
from ckpt_tools.trainers.saved import Saved

OPTIMIZER_HALF = "optim/.metadata"
"""The index of the optimizer of a model in the folder ``model`` beside it."""

_LOSSES = "losses.json"
_SHARD = r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors"


def _problem(saved: Saved) -> str | None:
    is_automodel = re.fullmatch(r"epoch_\d+_step_\d+", saved.title) is not None
    has_model = is_automodel and any(re.fullmatch(f"model/{_SHARD}", path) for path in saved.files)
    if not has_model or any(path.startswith("optim/") for path in saved.files):
        return None
    return "no optim/, which is written after model/: the save did not finish"


def _metrics(saved: Saved) -> Metrics:
    return _flat(saved.object_at(saved.path(_LOSSES))) if _LOSSES in saved.files else ()


def _flat(found: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in found.items():
        if isinstance(value, dict) and not prefix:
            yield from _flat(value, f"{name}.")
        else:
            yield f"{prefix}{name}", value


NEMO = Trainer(name="NeMo", folders="weights", unfinished="{title}-unfinished")

AUTOMODEL = Trainer(
    name="NeMo Automodel",
    others=rf"{_SHARD}|losses\.json|config\.yaml|consolidate\.sh",
    folders="model|optim|dataloader|rng|rank_?\\d+",
    problem=_problem,
    metrics=_metrics,
)

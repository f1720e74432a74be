"""Evaluation of the held-out samples in forward passes of ``--eval-batch-size``.

With another number of rows a matrix product may round differently, which may change a prediction. Images and texts of
this package are padded to whole passes, so that predictions of a run and of the file made from it are exactly equal.
Each rank computes whole passes, so results do not depend on the world size.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from ckpt_tools.errors import UsageError

from ..config.references import Reference, call_function, import_function, text_of
from ..config.train_config import TrainConfig
from ..data.datasets import TensorSamples
from ..data.loading import held_out_batches
from ..engines.base import Engine, Metrics
from ..models.losses import standard_metrics
from ..models.zoo import Loss

# 360 held-out digits are 12 passes, which 2, 3 and 4 ranks divide evenly; one takes about 15 ms.
CHUNK = 30
MAX_LISTED = 10_000
"""Most predictions that ``result.json`` lists."""

Value = TypeVar("Value")
PREDICTED = "predicted"
Logits = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Means of the metrics over all held-out samples. ``total`` is the number of predictions of classes, ``predicted``
    are all of them in dataset order, unless they are too many."""

    values: Mapping[str, float]
    total: int = 0
    predicted: tuple[int, ...] = ()

    @property
    def accuracy(self) -> float | None:
        return self.values.get("accuracy")

    @property
    def correct(self) -> int:
        return round((self.accuracy or 0.0) * self.total)


def plain_logits(model: nn.Module) -> Logits:
    """Forward pass of an unsharded model in evaluation mode."""
    return torch.no_grad()(model.eval().__call__)


def pad_rows(rows: Tensor, size: int = CHUNK) -> Tensor:
    """Rows padded to whole passes with copies of the last one."""
    missing = -len(rows) % size
    return torch.cat([rows, rows[-1:].expand(missing, *rows.shape[1:])]) if missing else rows


def choose_metrics(own: Reference | None, loss: Loss) -> Metrics:
    """The standard metrics, and those of the user's function. Raises ``UsageError`` if it cannot be imported."""
    if own is None:
        return partial(standard_metrics, loss=loss)
    function = import_function(own, "metrics")

    def compute_metrics(model: Callable[..., Any], batch: Any) -> Mapping[str, Tensor]:
        own_metrics = call_function(function, "metrics", model, batch)
        if not isinstance(own_metrics, Mapping) or not all(isinstance(each, Tensor) for each in own_metrics.values()):
            raise UsageError(f"--metrics {text_of(own)} gives something else than tensors by name")
        return {**standard_metrics(model, batch, loss), **own_metrics}

    return compute_metrics


def check_metric(name: str, value: Tensor, samples: int) -> None:
    """Raises ``UsageError`` if it is neither a mean nor a value for each sample."""
    if value.ndim and len(value) < samples:
        raise UsageError(f"the metric {name} has {len(value)} values for {samples} samples")


def rename_loss(held_out: Mapping[str, Value]) -> dict[str, Value]:
    """Metrics of an evaluation as a line of ``metrics.jsonl`` has them: its ``loss`` is that of training."""
    return {"held_out_loss" if name == "loss" else name: value for name, value in held_out.items()}


def check_keep_best(config: TrainConfig, held_out: Mapping[str, object]) -> None:
    """Raises ``UsageError`` if no checkpoint has the metric of ``--keep-best``."""
    if config.keep_best is None:
        return
    metric = re.sub(":(min|max)$", "", config.keep_best)
    known = sorted({"loss", *rename_loss(held_out)} - {PREDICTED})
    if metric not in known:
        raise UsageError(f"--keep-best {metric}: the metrics of this run are {', '.join(known)}")


@dataclass(frozen=True, slots=True)
class Evaluator:
    """Evaluates on all ranks of the default process group, with the same result on each. ``rank`` and ``world_size``
    select this rank's passes. Of ranks with the same ``rank``, which compute the same, one ``counts``."""

    dataset: Dataset[Any]
    metrics: Metrics
    size: int
    device: torch.device
    rank: int
    world_size: int
    counts: bool = True

    def __call__(self, engine: Engine) -> Evaluation:
        rows = self.compute_rows(engine.evaluate)
        for each in rows.values():
            torch.distributed.all_reduce(each)
        predicted = rows.pop(PREDICTED, None)
        values = {name: float(each.mean()) for name, each in rows.items()}
        if predicted is None:
            return Evaluation(values)
        listed = predicted.flatten().tolist() if predicted.numel() <= MAX_LISTED else []
        return Evaluation(values, predicted.numel(), tuple(listed))

    def compute_rows(self, evaluate: Callable[[Metrics, Any], Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Values of the samples of this rank's passes, float64 [n], and 0 elsewhere: the sum over ranks has them all. A
        forward pass of a sharded model is collective, so each rank makes the same number: a rank without a pass left
        repeats the first one."""
        total: int = len(self.dataset)  # type: ignore[arg-type]
        batch_at, passes = held_out_batches(self.dataset, self.size, self.device), -(-total // self.size)
        rows: dict[str, Tensor] = {}
        for mine in range(self.rank, self.rank + passes, self.world_size):
            batch, count = batch_at(mine if mine < passes else 0)
            if isinstance(self.dataset, TensorSamples):
                batch = tuple(pad_rows(each, self.size) for each in batch)
            values = evaluate(self.metrics, batch)
            if rows and rows.keys() != values.keys():
                raise UsageError(f"metrics are {', '.join(values)} of one batch, and {', '.join(rows)} of another")
            for name, value in values.items():
                check_metric(name, value, count)
                if name not in rows:
                    dtype = torch.int64 if name == PREDICTED else torch.float64
                    rows[name] = torch.zeros((total, *value.shape[1:]), dtype=dtype, device=self.device)
                if self.counts and mine < passes:
                    rows[name][mine * self.size :][:count] = value[:count] if value.ndim else value
        return rows

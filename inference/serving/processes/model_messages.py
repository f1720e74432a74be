"""Replies of the process of a service's models, whose own module is ``__main__`` there, and rows as they are sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from ...models.results import Array, ModelInput

if TYPE_CHECKING:
    from ...models.checkpoint_files import CheckpointFiles
    from ...models.images import ImageReading
    from ...models.predictor import ModelIdentity
    from ...models.results import TensorSpec


@dataclass(frozen=True, slots=True, eq=False)
class TaskFacts:
    """Facts of a task, as in :class:`.task.Task`, except the sizes of passes: each request may bring new ones."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    labels: tuple[str, ...] | None
    max_batch: int
    is_exact: bool
    reading: ImageReading | None
    max_bytes: int | None


def list_facts(task: Any) -> list[Any]:
    """The attributes of a task, or of its facts, in the order of ``TaskFacts``."""
    return [getattr(task, each.name) for each in fields(TaskFacts)]


@dataclass(frozen=True, slots=True)
class LoadedModelFacts:
    """Facts about a loaded model, as in :class:`.predictor.Predictor`."""

    identity: ModelIdentity
    task: TaskFacts
    files: CheckpointFiles | None


@dataclass(frozen=True, slots=True)
class UnexpectedFailure:
    """Unexpected error of a request, with its traceback."""

    traceback: str


def stack_rows(inputs: Sequence[ModelInput]) -> tuple[Array, ...] | None:
    """One array for each input tensor, which is sent faster; None if rows differ in shape or dtype."""
    rows = [each if isinstance(each, tuple) else (each,) for each in inputs]
    if len({tuple((part.shape, part.dtype) for part in row) for row in rows}) > 1:
        return None
    return tuple(map(np.stack, zip(*rows, strict=True)))

"""Messages between a service and its models' process. Each request gets one reply: its result, a ``CkptError`` or
``ImportError`` to raise, or ``Broken``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from ...common.name_options import Reading
    from ...models.predictor import Identity, Predictor
    from ...models.results import TensorSpec


@dataclass(frozen=True, slots=True)
class Load:
    """Load model ``number``, which stays loaded until this connection is closed."""

    number: int
    url: str
    name: str
    architecture: str | None
    reading: Reading
    device: str
    threads: int


@dataclass(frozen=True, slots=True)
class Loaded:
    """Facts about a loaded model, as in :class:`.predictor.Predictor`."""

    identity: Identity
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    labels: tuple[str, ...] | None
    max_batch: int
    is_exact: bool

    @classmethod
    def of(cls, predictor: Predictor) -> Loaded:
        task = predictor.task
        return cls(predictor.identity, task.inputs, task.outputs, task.labels, task.max_batch, task.is_exact)


@dataclass(frozen=True, slots=True)
class Predict:
    """Predict these inputs with model ``number``, in order."""

    number: int
    inputs: Sequence[np.ndarray]


@dataclass(frozen=True, slots=True)
class Decode:
    """Decode bytes to an input of model ``number``; errors call them ``name``."""

    number: int
    data: bytes
    name: str


@dataclass(frozen=True, slots=True)
class Broken:
    """Unexpected error of a request, with its traceback."""

    trace: str

"""What a service and the process of its models say to each other. Each question gets one answer: what was asked for, a
``CkptError`` or ``ImportError`` to be raised, or ``Broken``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from ...common.name_options import Reading
    from ...models.predictor import Identity, Predictor
    from ...models.tensor_specs import TensorSpec


@dataclass(frozen=True, slots=True)
class Load:
    """Load a model, which stays until this connection is closed. ``number`` names it."""

    number: int
    url: str
    name: str
    architecture: str | None
    reading: Reading
    device: str
    threads: int


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a service has to know of a model that it does not have itself: as :class:`.predictor.Predictor` says."""

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
    """Answer these inputs by the model ``number``, in order."""

    number: int
    inputs: Sequence[np.ndarray]


@dataclass(frozen=True, slots=True)
class Decode:
    """Make an input of the model ``number`` out of the bytes of a file, which an error calls ``name``."""

    number: int
    data: bytes
    name: str


@dataclass(frozen=True, slots=True)
class Broken:
    """What was asked for failed in a way that nobody foresaw."""

    trace: str

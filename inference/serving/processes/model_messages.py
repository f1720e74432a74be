"""Messages between a service and its models' process. Each request gets one reply: its result, a ``CkptError`` or
``ImportError`` to raise, or ``Broken``. Before the reply to ``Generate``, texts are sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ...models.results import Array, Item

if TYPE_CHECKING:
    from ...models.generation import Generation
    from ...models.images import ImageReading
    from ...models.options import ModelOptions
    from ...models.predictor import Identity, Predictor
    from ...models.results import TensorSpec
    from ...models.steady import CheckpointFiles


@dataclass(frozen=True, slots=True)
class Load:
    """Load model ``number``, which stays loaded until this connection is closed."""

    number: int
    url: str
    name: str
    options: ModelOptions
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
    reading: ImageReading | None
    max_bytes: int | None
    files: CheckpointFiles | None

    @classmethod
    def of(cls, predictor: Predictor) -> Loaded:
        task = predictor.task
        facts = task.inputs, task.outputs, task.labels, task.max_batch, task.is_exact, task.reading, task.max_bytes
        return cls(predictor.identity, *facts, predictor.files)


@dataclass(frozen=True, slots=True)
class Predict:
    """Predict inputs with model ``number``, in order: as one array for each input tensor, or if they differ in shape or
    dtype as they are."""

    number: int
    inputs: tuple[Array, ...] | Sequence[Item]
    is_joined: bool

    @classmethod
    def of(cls, number: int, inputs: Sequence[Item]) -> Predict:
        rows = [each if isinstance(each, tuple) else (each,) for each in inputs]
        if len({tuple((part.shape, part.dtype) for part in row) for row in rows}) > 1:
            return cls(number, inputs, is_joined=False)
        return cls(number, tuple(map(np.stack, zip(*rows, strict=True))), is_joined=True)

    def items(self) -> Sequence[Item]:
        if not self.is_joined:
            return self.inputs
        return list(self.inputs[0]) if len(self.inputs) == 1 else list(zip(*self.inputs, strict=True))


@dataclass(frozen=True, slots=True)
class Decode:
    """Decode bytes to an input of model ``number``; errors call them ``name``."""

    number: int
    data: bytes
    name: str


@dataclass(frozen=True, slots=True)
class Prepare:
    """Make an input of model ``number`` of the pixels of an image."""

    number: int
    pixels: Array


@dataclass(frozen=True, slots=True)
class Generate:
    """Generate a text with model ``number``. Pieces of it are sent, which may be empty, at least one a token; then the
    reply, None. The generation ends when the connection is closed."""

    number: int
    asked: Generation


@dataclass(frozen=True, slots=True)
class BatchSizes:
    """Sizes of the forward passes of model ``number``, by the shape of an input."""

    number: int


Request = Load | Predict | Generate | Decode | Prepare | BatchSizes


@dataclass(frozen=True, slots=True)
class Broken:
    """Unexpected error of a request, with its traceback."""

    trace: str

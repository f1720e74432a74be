"""The protocol of tasks (from bytes to predictions), and checks that tasks share; without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

import numpy as np

from ckpt_tools.errors import FormatError, UsageError

from .images import ImageReading
from .results import BATCH, Columns, ModelInput, TensorSpec, does_shape_fit

if TYPE_CHECKING:
    import torch
    from torch import nn

    from .architectures import Architecture
    from .options import ModelOptions
    from .passes import ForwardPasses

MAX_BATCH = 8  # inputs per forward pass of library models

TOKEN_BYTES = 16  # on average over a whole text; more than in any language and in indented code
MIN_TEXT_BYTES = 2**16  # limit of a text for the shortest models: spaces may vanish, and a word be one token
UNLIMITED_BYTES = 2**20  # limit of a text for a model that takes any number of tokens


class TextTooLongError(FormatError):
    """A text of more bytes than the model can take. It is not tokenized, which needs 300 times the memory."""


def choose_max_bytes(num_tokens: int | None) -> int:
    """The most bytes of a text for a model that takes ``num_tokens``; None if it does not say so."""
    return UNLIMITED_BYTES if num_tokens is None else max(MIN_TEXT_BYTES, TOKEN_BYTES * num_tokens)


def check_length(num_bytes: int, most: int | None, name: str) -> None:
    """Raises TextTooLongError."""
    if most is not None and num_bytes > most:
        raise TextTooLongError(f"{name} has {num_bytes:,} bytes; the model takes at most {most:,}")


def list_classifier_outputs(num_classes: int, num_features: int | None) -> tuple[TensorSpec, ...]:
    """Outputs of a classifier, or with ``num_features`` of one without its head."""
    if num_features is not None:
        return (TensorSpec("embedding", "FP32", (BATCH, num_features)),)
    return TensorSpec("label", "INT64", (BATCH,)), TensorSpec("probabilities", "FP32", (BATCH, num_classes))


@dataclass(frozen=True, slots=True)
class TaskOptions:
    """Options of a task, and the folder with ``config.json``."""

    architecture: Architecture
    folder: Path | None
    labels: tuple[str, ...] | None
    model: ModelOptions

    def make_passes(self, full_size: int = MAX_BATCH) -> ForwardPasses:
        """The forward passes of a task that has ``full_size`` inputs in each by default."""
        from .passes import ForwardPasses

        return ForwardPasses(self.model.max_batch or full_size, self.model.exact)


class Task(Protocol):
    """Maps bytes to inputs, and inputs to predictions. ``labels`` are the class names, if known. ``max_batch`` is
    the most inputs of a forward pass, and ``batch_sizes`` the sizes of passes by the shape of an input, for those
    that were predicted. If ``is_exact``, an answer has the same bits whatever else is in the batch. ``reading`` is
    how image files are decoded, and ``max_bytes`` the longest text that is taken; each None for other inputs."""

    @property
    def inputs(self) -> tuple[TensorSpec, ...]: ...
    @property
    def outputs(self) -> tuple[TensorSpec, ...]: ...
    @property
    def labels(self) -> tuple[str, ...] | None: ...
    @property
    def max_batch(self) -> int: ...
    @property
    def is_exact(self) -> bool: ...
    @property
    def batch_sizes(self) -> Mapping[str, tuple[int, ...]]: ...
    @property
    def reading(self) -> ImageReading | None: ...
    @property
    def max_bytes(self) -> int | None: ...

    def decode(self, data: bytes, name: str) -> ModelInput:
        """Decode one input, without the batch dimension. Raises FormatError, with ``name`` in it."""

    def prepare(self, pixels: np.ndarray) -> ModelInput:
        """The input of an image that ``reading`` decoded."""

    def predict(self, inputs: Sequence[ModelInput]) -> Columns:
        """Predict each input, at least one, in order. Raises FormatError for another shape or dtype."""


def check_inputs(inputs: Sequence[ModelInput], dtype: type[np.generic], shape: tuple[int, ...]) -> None:
    """Raises FormatError for another dtype or shape; -1 in ``shape`` is any size except 0."""
    for number, array in enumerate(inputs):
        if not isinstance(array, np.ndarray):
            raise FormatError(f"input {number} is {type(array).__name__}; the model takes arrays")
        if array.dtype != dtype or not does_shape_fit(array.shape, shape):
            raise FormatError(
                f"input {number} is {array.dtype} {list(array.shape)}; the model takes {np.dtype(dtype)} {list(shape)}"
            )


def check_labels(labels: tuple[str, ...] | None, num_classes: int) -> None:
    """Raises UsageError if their number is not ``num_classes``."""
    if labels is not None and len(labels) != num_classes:
        raise UsageError(f"there are {len(labels)} labels for the model's {num_classes} classes")


def decode_text(data: bytes, name: str) -> str:
    """Decode UTF-8. Raises FormatError."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise FormatError(f"{name} is not a text in UTF-8 (byte {error.start})") from error


class ModelSource(Protocol):
    """A module for the models of one library, or of the user's code."""

    def build_model(self, architecture: Architecture, folder: Path | None, dtype: torch.dtype | None) -> nn.Module:
        """The module on the CPU, with uninitialized parameters unless a function of the user's made it. ``folder`` has
        ``config.json``; without a ``dtype``, parameters have the architecture's own. Raises UsageError if there is no
        such model, or its package is missing. FormatError if ``config.json`` is not usable."""

    def make_task(self, model: nn.Module, options: TaskOptions) -> Task:
        """The task of the model. Raises UsageError if such models cannot be predicted with. FormatError if the files
        beside the weights do not say how an input is prepared."""


MODULES = {"ours": "training_models", "hf": "hugging_face", "torchvision": "torchvision_models", "timm": "timm_models"}
"""The module beside this one for the models of each library; ``users_code`` is for all others."""


def import_model_source(architecture: Architecture) -> ModelSource:
    return cast(ModelSource, import_module(f".{MODULES.get(architecture.library, 'users_code')}", __package__))

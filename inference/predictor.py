"""A model that answers: the noun between a checkpoint and whoever asks, which are the batch command and the service.

A :class:`Predictor` says which inputs it takes, which outputs it gives and which weights it has. What happens between
the two is its :class:`Task`: one for images that get a label, one for texts that get a label, one for texts that are
continued.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import ckpt_tools

from .loading import load_model
from .results import Prediction as Prediction
from .tensor_specs import TensorSpec as TensorSpec

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Identity:
    """Which weights answer.

    ``digest`` is of the names, dtypes, shapes and bytes of the loaded model: the same for every format that the weights
    came from. ``step`` and ``world_size`` are None if the checkpoint does not say them.
    """

    digest: str
    source: str
    format: str
    step: int | None
    world_size: int | None


class Task(Protocol):
    """What a model is for: from bytes to the input of a forward pass, and from its output to an answer.

    ``labels`` are the names of the classes, if they are known. ``max_batch`` is the number of inputs in each forward
    pass. If ``is_exact``, each pass has that number, so that an answer has the same bits in any company.
    """

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

    def decode(self, data: bytes, name: str) -> Tensor:
        """One input of the model, without the batch's dimension. Raises FormatError, with ``name`` in it."""
        ...

    def predict(self, inputs: Sequence[Tensor]) -> list[Prediction]:
        """An answer for each input, in order."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Predictor:
    """A loaded model under the name that it is served by."""

    name: str
    identity: Identity
    task: Task

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        return self.task.inputs

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        return self.task.outputs

    @property
    def labels(self) -> tuple[str, ...] | None:
        """The names of the classes in order, if they are known."""
        return self.task.labels

    @property
    def max_batch(self) -> int:
        """The number of inputs in a forward pass; fewer are filled up, more are cut into several passes."""
        return self.task.max_batch

    @property
    def is_exact(self) -> bool:
        """Whether an input gets the same bits in any company."""
        return self.task.is_exact

    def decode(self, data: bytes, name: str) -> Tensor:
        """One input of the model: of the bytes of an image file, or of a text in UTF-8.

        Raises:
            FormatError: the bytes are not such a thing. One sentence, which begins with ``name``.
        """
        return self.task.decode(data, name)

    def predict(self, inputs: Sequence[Tensor]) -> list[Prediction]:
        """An answer for each input, in order. An input is what ``decode`` gives, or a row of a tensor of ``inputs``.

        Raises:
            FormatError: an input has another shape or dtype than the model takes.
        """
        return self.task.predict(inputs)


def load_predictor(
    url: str | Path,
    *,
    name: str | None = None,
    architecture: str | None = None,
    labels: Sequence[str] | None = None,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    fast: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> Predictor:
    """The model of the checkpoint at ``url``, ready to answer.

    Args:
        url: A path, or a URL of a store: as for :func:`inference.loading.load_model`.
        name: What the model is called. Default: the last part of ``url``, without its suffix.
        architecture: As for ``load_model``. Default: what lies beside the weights says it.
        labels: The names of the classes in order. Default: those that come with the model, if there are any.
        dtype: Of the parameters. Default: the architecture's own.
        device: Where the model is to be.
        fast: Forward passes have as many inputs as there are. Answers may then differ in the last bits with the
            company that an input is predicted in.
        storage_options: How the store is reached (credentials, ``endpoint_url``). Only for URLs.

    Raises:
        UsageError: there is no such architecture. FormatError: the checkpoint cannot be read, or is of another model.
        CkptError: as ``ckpt_tools.load_into`` says.
    """
    model = load_model(url, architecture=architecture, dtype=dtype, device=device, storage_options=storage_options)
    identity = identity_of(model, url, storage_options)
    task = task_of(model, labels=labels, fast=fast)
    return Predictor(name or name_of(url), identity, task)


def task_of(model: nn.Module, *, labels: Sequence[str] | None, fast: bool) -> Task:
    from .our_images import OurImages

    return OurImages(model, labels=None if labels is None else tuple(labels), is_exact=not fast)


def identity_of(model: nn.Module, url: str | Path, storage_options: Mapping[str, Any] | None) -> Identity:
    summary = ckpt_tools.inspect(url, storage_options=storage_options)
    return Identity(digest_of(model), summary.source, summary.format, summary.step, summary.world_size)


def digest_of(model: nn.Module) -> str:
    """The BLAKE3 of all that the model saves, by name: each name, dtype and shape, and the elements' bytes."""
    import torch
    from blake3 import blake3

    found = blake3(max_threads=blake3.AUTO)
    for name, tensor in sorted(model.state_dict().items()):
        found.update(f"{name}\0{tensor.dtype}\0{list(tensor.shape)}\0".encode())
        found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return f"blake3:{found.hexdigest()}"


def name_of(url: str | Path) -> str:
    """The last part of a path or URL, without the suffix of a file of weights."""
    last = str(url).rstrip("/").rpartition("/")[2]
    stem, _, suffix = last.rpartition(".")
    return stem if stem and suffix in {"safetensors", "pt", "pth", "bin", "ckpt"} else last or "model"

"""From logits to predictions, as transformers' pipelines do it, and to the next token of a text."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from ckpt_tools.errors import FormatError

from .generation import GenerationRequest
from .results import Columns

if TYPE_CHECKING:
    from transformers import LogitsProcessor

Activation = Literal["softmax", "sigmoid"]


def classify_logits(logits: Tensor, activation: Activation = "softmax") -> Columns:
    """Label and probabilities for each row of float32 [n, classes]; a sigmoid gives independent ones."""
    if activation == "softmax":
        probabilities = torch.softmax(logits, dim=1)
    else:
        # Row by row: of many elements at once, vector instructions take some and not the rest, which rounds otherwise.
        probabilities = torch.stack([torch.sigmoid(row) for row in logits])
    return {"label": logits.argmax(1).numpy(), "probabilities": probabilities.numpy()}


def make_embeddings(features: Tensor) -> Columns:
    """An embedding for each row of float32 [n, features]."""
    return {"embedding": features.numpy()}


def choose_activation(config: Any) -> Activation:
    """The activation of a transformers configuration. Raises FormatError for a regression."""
    if config.problem_type == "regression":
        raise FormatError("the model is a regression, which has no classes to predict")
    return "sigmoid" if config.problem_type == "multi_label_classification" or config.num_labels == 1 else "softmax"


def read_config_labels(config: Any) -> tuple[str, ...] | None:
    """Class names of ``id2label``, if it has one for each class."""
    names = {int(number): str(label) for number, label in (config.id2label or {}).items()}
    return tuple(names[number] for number in range(len(names))) if set(names) == set(range(config.num_labels)) else None


def find_device(model: nn.Module) -> torch.device:
    return next((each.device for each in chain(model.parameters(), model.buffers())), torch.device("cpu"))


def find_dtype(model: nn.Module) -> torch.dtype:
    return next(model.parameters()).dtype


@dataclass(frozen=True, slots=True, eq=False)
class TokenSampler:
    """Draws a token by the scores of the next one, float [1, values]; its score becomes 0 and all others -inf. The
    random numbers are a request's own, which nothing else in the process changes. As in transformers, temperature comes
    before ``top_k``, and this before ``top_p``."""

    warpers: tuple[LogitsProcessor, ...]
    generator: torch.Generator

    @classmethod
    def from_request(cls, request: GenerationRequest, device: torch.device) -> TokenSampler | None:
        """None for a request without sampling. Without a seed, the numbers are new ones each time."""
        from transformers.generation import logits_process as library

        if not request.temperature:
            return None
        warpers = [library.TemperatureLogitsWarper(request.temperature)]
        if request.top_k is not None:
            warpers.append(library.TopKLogitsWarper(request.top_k))
        if request.top_p is not None:
            warpers.append(library.TopPLogitsWarper(request.top_p))
        generator = torch.Generator(device)
        if request.seed is None:
            generator.seed()
        else:
            generator.manual_seed(request.seed)
        return cls(tuple(warpers), generator)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        for warper in self.warpers:
            scores = warper(input_ids, scores)
        probabilities = scores.softmax(-1)
        if not probabilities.isfinite().all():
            raise RuntimeError("the model gives no probabilities; its logits are NaN or infinite")
        token = torch.multinomial(probabilities, 1, generator=self.generator)
        return torch.full_like(scores, -torch.inf).scatter_(1, token, 0.0)

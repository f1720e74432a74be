"""Drawing of tokens with a request's own random numbers, which nothing else in the process changes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .generation import Generation

if TYPE_CHECKING:
    from transformers import LogitsProcessor


@dataclass(frozen=True, slots=True, eq=False)
class Draw:
    """Draws a token by the scores of the next one, float [1, values]; its score becomes 0 and all others -inf. As in
    transformers, temperature comes before ``top_k``, and this before ``top_p``."""

    warpers: tuple[LogitsProcessor, ...]
    generator: torch.Generator

    @classmethod
    def of(cls, asked: Generation, device: torch.device) -> Draw | None:
        """None for a request without sampling. Without a seed, the numbers are new ones each time."""
        from transformers.generation import logits_process as library

        if not asked.temperature:
            return None
        warpers = [library.TemperatureLogitsWarper(asked.temperature)]
        if asked.top_k is not None:
            warpers.append(library.TopKLogitsWarper(asked.top_k))
        if asked.top_p is not None:
            warpers.append(library.TopPLogitsWarper(asked.top_p))
        generator = torch.Generator(device)
        if asked.seed is None:
            generator.seed()
        else:
            generator.manual_seed(asked.seed)
        return cls(tuple(warpers), generator)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        for warper in self.warpers:
            scores = warper(input_ids, scores)
        probabilities = scores.softmax(-1)
        if not probabilities.isfinite().all():
            raise RuntimeError("the model gives no probabilities; its logits are NaN or infinite")
        token = torch.multinomial(probabilities, 1, generator=self.generator)
        return torch.full_like(scores, -torch.inf).scatter_(1, token, 0.0)

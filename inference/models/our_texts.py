"""Task of the training package's language models: continue a text byte by byte."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from ckpt_tools.errors import FormatError

from ..common.training_package import language_model
from .results import Prediction
from .task import MAX_BATCH, check_inputs, device_of, in_passes, text_of
from .tensor_specs import BATCH, TensorSpec
from .texts import NEW_TOKENS, grouped


@dataclass(frozen=True, slots=True, eq=False)
class OurTexts:
    """Continues texts with the most probable byte each time, from the last ``CONTEXT`` bytes.

    Texts of one length are continued together. The experts of a mixture get the tokens of a whole batch at once, so
    ``has_experts`` gives each text a forward pass of its own.
    """

    model: nn.Module
    has_experts: bool = False
    new_bytes: int = NEW_TOKENS
    is_exact: bool = True

    inputs: ClassVar[tuple[TensorSpec, ...]] = (TensorSpec("text", "BYTES", (BATCH,)),)
    outputs: ClassVar[tuple[TensorSpec, ...]] = (TensorSpec("text", "BYTES", (BATCH,)),)
    labels: ClassVar[None] = None

    @property
    def max_batch(self) -> int:
        return 1 if self.has_experts else MAX_BATCH

    def decode(self, data: bytes, name: str) -> Tensor:
        """int64 [bytes]. Raises FormatError: not UTF-8, or empty."""
        if not text_of(data, name):
            raise FormatError(f"{name} is an empty text")
        return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(torch.int64)

    def predict(self, inputs: Sequence[Tensor]) -> list[Prediction]:
        check_inputs(inputs, torch.int64, (BATCH,))
        return grouped([each[-language_model.CONTEXT :] for each in inputs], len, self._continued)

    def _continued(self, inputs: Sequence[Tensor], length: int) -> Iterable[Prediction]:
        texts = torch.stack(list(inputs))
        written = in_passes(texts, self._written, max_batch=self.max_batch, is_exact=self.is_exact)[:, length:]
        # A text may end within a character.
        return [Prediction(text=bytes(row).decode(errors="replace")) for row in written.tolist()]

    @torch.inference_mode()
    def _written(self, texts: Tensor) -> Tensor:
        texts = texts.to(device_of(self.model))
        for _ in range(self.new_bytes):
            best = self.model(texts[:, -language_model.CONTEXT :])[:, -1].argmax(-1, keepdim=True)
            texts = torch.cat([texts, best], dim=1)
        return texts.cpu()

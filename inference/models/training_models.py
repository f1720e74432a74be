"""Tasks of the training package's models: classify a grey image of 28x28, continue a text byte by byte."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from ckpt_tools.errors import FormatError, UsageError

from ..common.training_package import data, evaluation, language_model, model_config, model_names, zoo
from .architectures import OURS, Architecture
from .config_folder import CONFIG, read_config
from .generation import EndOfTextError, FairLock, GenerationRequest, GrowingText, TextCallback
from .images import MAX_PIXELS, ImageReading
from .passes import BatchedTask, ForwardPasses
from .prediction import TokenSampler, classify_logits, find_device, make_embeddings
from .results import BATCH, BYTES, Array, Columns, ModelInput, TensorSpec, make_text_column, predict_by_group
from .task import Task, TaskOptions, check_inputs, check_labels, choose_max_bytes, decode_text, list_classifier_outputs
from .texts import NEW_TOKENS
from .uninitialized import SkipInitialisation

IMAGE_SHAPE = (model_names.IMAGE_SIZE, model_names.IMAGE_SIZE)


def build_model(architecture: Architecture, folder: Path | None, dtype: torch.dtype | None) -> nn.Module:
    if architecture.builtin_name not in model_names.MODELS:
        raise UsageError(f"--architecture {OURS}:{architecture.name}: training has no model of its own of this name")
    with SkipInitialisation():
        return zoo.build_own_model(architecture.builtin_name, **architecture.arguments).to(dtype=dtype)


def make_task(model: nn.Module, options: TaskOptions) -> Task:
    model_facts = model_names.MODELS[options.architecture.builtin_name]
    if model_facts.task == "text":
        passes = replace(options.make_passes(), full_size=1) if model_facts.experts else options.make_passes()
        return ByteGenerator(model, passes, options.model.max_new_tokens or NEW_TOKENS)
    config = read_config(options.folder)
    preparation, labels = config.get("image"), config.get("labels")
    if preparation is not None and preparation != model_config.PREPARATION:
        raise FormatError(
            f"{options.folder}/{CONFIG} says that images are prepared by {json.dumps(preparation)}; this version "
            f"prepares them by {json.dumps(model_config.PREPARATION)}"
        )
    class_names = tuple(map(str, labels)) if isinstance(labels, list) else None
    return GreyImageClassifier(model, options.labels or class_names, options.make_passes(evaluation.CHUNK))


@dataclass(frozen=True, slots=True, eq=False)
class GreyImageClassifier(BatchedTask):
    """Classifies 8-bit grey images, uint8 [28, 28], in forward passes of the shape that training evaluates with. With
    ``num_features`` the model has no head and gives embeddings of that size."""

    model: nn.Module
    labels: tuple[str, ...] | None = None
    passes: ForwardPasses = field(default_factory=lambda: ForwardPasses(evaluation.CHUNK))
    num_features: int | None = None
    max_pixels: int = MAX_PIXELS
    forward: evaluation.Logits = field(init=False)

    inputs: ClassVar[tuple[TensorSpec, ...]] = (TensorSpec("image", "UINT8", (BATCH, *IMAGE_SHAPE)),)

    def __post_init__(self) -> None:
        check_labels(self.labels, model_names.NUM_CLASSES)
        # Once: to set the mode of each of its modules takes as long as to predict two images.
        object.__setattr__(self, "forward", evaluation.plain_logits(self.model))

    @property
    def reading(self) -> ImageReading:
        return ImageReading("L", IMAGE_SHAPE, max_pixels=self.max_pixels, is_input=True)

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        return list_classifier_outputs(model_names.NUM_CLASSES, self.num_features)

    def decode(self, data: bytes, name: str) -> Array:
        return self.reading.decode_pixels(data, name)

    def prepare(self, pixels: Array) -> Array:
        return pixels

    def predict(self, inputs: Sequence[ModelInput]) -> Columns:
        check_inputs(inputs, np.uint8, IMAGE_SHAPE)
        logits = self.passes.run(torch.from_numpy(np.stack(inputs)), self._forward, _draw_pixels)
        return classify_logits(logits) if self.num_features is None else make_embeddings(logits)

    def _forward(self, pixels: Tensor) -> Tensor:
        weight = next(self.model.parameters())
        return self.forward(data.to_input(pixels).to(weight.device, weight.dtype)).float().cpu()


def _draw_pixels(num_images: int) -> Tensor:
    return torch.randint(256, (num_images, *IMAGE_SHAPE), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@dataclass(frozen=True, slots=True, eq=False)
class ByteGenerator(BatchedTask):
    """Continues texts with the most probable byte each time, from the last ``CONTEXT`` bytes. Texts of one length are
    continued together. The experts of a mixture get the tokens of a whole batch at once, so that each text has a
    forward pass of its own."""

    model: nn.Module
    passes: ForwardPasses
    new_bytes: int = NEW_TOKENS
    turns: FairLock = field(default_factory=FairLock)

    inputs: ClassVar[tuple[TensorSpec, ...]] = (TensorSpec("text", BYTES, (BATCH,)),)
    outputs: ClassVar[tuple[TensorSpec, ...]] = (TensorSpec("text", BYTES, (BATCH,)),)
    labels: ClassVar[None] = None

    @property
    def max_bytes(self) -> int:
        return choose_max_bytes(None)

    def decode(self, data: bytes, name: str) -> Array:
        """int64 [bytes]. Raises FormatError if not UTF-8, or empty."""
        if not decode_text(data, name):
            raise FormatError(f"{name} is an empty text")
        return np.frombuffer(data, np.uint8).astype(np.int64)

    def predict(self, inputs: Sequence[ModelInput]) -> Columns:
        check_inputs(inputs, np.int64, (BATCH,))
        return predict_by_group([each[-language_model.CONTEXT :] for each in inputs], len, self._continue_group)

    def generate(self, request: GenerationRequest, give: TextCallback) -> None:
        """Generate a text with forward passes of one row. A token is a byte, and ``repetition_penalty`` is for the last
        ``CONTEXT`` of them. Raises FormatError for a chat, or a prompt that ``decode`` refuses."""
        if not isinstance(request.prompt, str):
            raise FormatError("the model has no chat template, so it takes text_input, and no messages")
        prompt = self.decode(request.prompt.encode(), "text_input")[-language_model.CONTEXT :]
        tokens = torch.from_numpy(prompt[None]).to(find_device(self.model))
        text = GrowingText(request, _decode_bytes, give)
        processors = [
            each
            for each in (_make_repetition_penalty(request), TokenSampler.from_request(request, tokens.device))
            if each is not None
        ]
        with suppress(EndOfTextError):
            for _ in range(request.max_tokens or self.new_bytes):
                scores = self._compute_next_logits(tokens).float()
                for processor in processors:
                    scores = processor(tokens, scores)
                tokens = torch.cat([tokens, scores.argmax(-1, keepdim=True)], dim=1)[:, -language_model.CONTEXT :]
                text.add_token(int(tokens[0, -1]))
        text.finish()

    def _continue_group(self, inputs: Sequence[Array], length: int) -> Columns:
        def draw_rows(num_rows: int) -> Tensor:
            return torch.randint(128, (num_rows, length), generator=torch.Generator().manual_seed(0))

        rows = torch.from_numpy(np.stack(inputs))
        chunks = self.passes.split_rows(rows, lambda chunk: self._continue_chunk(chunk)[1], draw_rows)
        tokens = torch.cat([self._continue_chunk(chunk)[0][:num_kept] for chunk, num_kept in chunks])[:, length:]
        return {"text": make_text_column([_decode_bytes(row) for row in tokens.tolist()])}

    def _continue_chunk(self, chunk: Tensor) -> tuple[Tensor, Tensor]:
        """The continued bytes [n, t], and the logits of each step [n, steps, values]."""
        tokens, logits = chunk.to(find_device(self.model)), []
        for _ in range(self.new_bytes):
            logits.append(self._compute_next_logits(tokens))
            tokens = torch.cat([tokens, logits[-1].argmax(-1, keepdim=True)], dim=1)
        return tokens.cpu(), torch.stack(logits, 1)

    @torch.inference_mode()
    def _compute_next_logits(self, tokens: Tensor) -> Tensor:
        """Logits of the next byte, [n, values]."""
        with self.turns:
            logits: Tensor = self.model(tokens[:, -language_model.CONTEXT :])[:, -1]
            return logits


def _decode_bytes(tokens: Sequence[int]) -> str:
    return bytes(tokens).decode(errors="replace")  # A text may end within a character.


def _make_repetition_penalty(request: GenerationRequest) -> Any:
    if request.repetition_penalty is None:
        return None
    from transformers import RepetitionPenaltyLogitsProcessor

    return RepetitionPenaltyLogitsProcessor(request.repetition_penalty)

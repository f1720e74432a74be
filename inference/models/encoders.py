"""Encoders of transformers without a head (``BertModel``, ``ViTModel``), which give embeddings.

It is what the model pools itself. Of a model that does not pool, it is the mean over the tokens that are not padding.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ckpt_tools.errors import UsageError

from .image_labels import image_task
from .task import MAX_BATCH, Task, device_of
from .texts import TextLabels, Tokens

MASK = "attention_mask"


def encoder_of(model: Any, folder: Path, *, is_exact: bool) -> Task:
    """The task of an image or text encoder. Raises UsageError if it takes something else, or consists of several
    models. FormatError if the files beside the weights do not say how an input is prepared."""
    takes = model.main_input_name
    if model.config.is_encoder_decoder or model.config.sub_configs or takes not in ("input_ids", "pixel_values"):
        raise UsageError(
            f"a {type(model).__name__} is not an encoder of images alone or of texts alone, so it is not clear what an "
            "embedding is; load it with inference.load_model"
        )
    return _of_texts(model, folder, is_exact) if takes == "input_ids" else _of_images(model, folder, is_exact)


def _of_images(model: Any, folder: Path, is_exact: bool) -> Task:
    def embeddings(images: Tensor) -> Tensor:
        return _pooled(model(pixel_values=images), None)

    found = image_task(model, embeddings, folder, num_classes=0, labels=None, is_exact=is_exact)
    like = next(model.parameters())
    with torch.inference_mode():
        example = embeddings(torch.zeros(1, *found.shape, device=like.device, dtype=like.dtype))
    return replace(found, num_features=example.shape[1])


def _of_texts(model: Any, folder: Path, is_exact: bool) -> Task:
    tokens = Tokens.from_folder(model, folder)
    taken = signature(model.forward).parameters
    task = TextEncoder(model, replace(tokens, fields=tuple(f for f in tokens.fields if f in taken)), None, is_exact)
    (example,) = task._forward(task.decode(b"a", "a text").unsqueeze(0))
    return replace(task, num_features=len(example))


@dataclass(frozen=True, slots=True, eq=False)
class TextEncoder(TextLabels):
    """Embeds texts. Without a padding token or attention mask, one text at a time."""

    @property
    def max_batch(self) -> int:
        has_padding = self.tokens.tokenizer.pad_token_id is not None and MASK in self.tokens.fields
        return MAX_BATCH if has_padding else 1

    @torch.inference_mode()
    def _forward(self, batch: Tensor) -> Tensor:
        fields = self.tokens.named(batch.to(device_of(self.model)))
        return _pooled(self.model(**fields), fields.get(MASK)).float().cpu()


def _pooled(output: Any, mask: Tensor | None) -> Tensor:
    """Pooled output, float [n, features]. ``mask`` int64 [n, tokens] is 0 at padding."""
    pooled = getattr(output, "pooler_output", None)
    if pooled is not None:
        return pooled.flatten(1)
    hidden = output.last_hidden_state
    # A map [n, features, height, width] has its tokens in two dimensions.
    rows = hidden.flatten(2).transpose(1, 2) if hidden.dim() == 4 else hidden
    # One by one: a sum over several may take its parts in another order.
    kept = [row if mask is None else row[mask[number] > 0] for number, row in enumerate(rows)]
    return torch.stack([row.float().mean(0) for row in kept])

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
from .passes import Passes
from .prediction import device_of
from .task import Task
from .texts import MASK, TextLabels, Tokens


def encoder_of(model: Any, folder: Path, *, passes: Passes) -> Task:
    """The task of an image or text encoder. Raises UsageError if it takes something else, or consists of several
    models. FormatError if the files beside the weights do not say how an input is prepared."""
    takes = model.main_input_name
    if model.config.is_encoder_decoder or model.config.sub_configs or takes not in ("input_ids", "pixel_values"):
        raise UsageError(
            f"a {type(model).__name__} is not an encoder of images alone or of texts alone, so it is not clear what an "
            "embedding is; load it with inference.load_model"
        )
    return _of_texts(model, folder, passes) if takes == "input_ids" else _of_images(model, folder, passes)


def _of_images(model: Any, folder: Path, passes: Passes) -> Task:
    def embeddings(images: Tensor) -> Tensor:
        return _pool_output(model(pixel_values=images), None)

    found = image_task(model, embeddings, folder, num_classes=0, labels=None, passes=passes)
    like = next(model.parameters())
    with torch.inference_mode():
        example = embeddings(torch.zeros(1, *found.shape, device=like.device, dtype=like.dtype))
    return replace(found, num_features=example.shape[1])


def _of_texts(model: Any, folder: Path, passes: Passes) -> Task:
    tokens = Tokens.from_folder(model, folder)
    taken = signature(model.forward).parameters
    tokens = replace(tokens, fields=tuple(field for field in tokens.fields if field in taken))
    if not tokens.has_padding:
        passes = replace(passes, full=1)
    task = TextEncoder(model, tokens, None, passes)
    (example,) = task._forward(torch.from_numpy(task.decode(b"a", "a text")).unsqueeze(0))
    return replace(task, num_features=len(example))


@dataclass(frozen=True, slots=True, eq=False)
class TextEncoder(TextLabels):
    """Embeds texts. Without a padding token or attention mask, one text at a time."""

    @torch.inference_mode()
    def _forward(self, batch: Tensor) -> Tensor:
        fields = self.tokens.to_arguments(batch.to(device_of(self.model)))
        return _pool_output(self.model(**fields), fields.get(MASK)).float().cpu()


def _pool_output(output: Any, mask: Tensor | None) -> Tensor:
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

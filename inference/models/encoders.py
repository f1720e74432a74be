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

from .image_classifiers import make_image_task
from .passes import ForwardPasses
from .prediction import find_device
from .task import Task
from .texts import MASK, ModelTokenizer, TextClassifier


def make_encoder_task(model: Any, folder: Path, *, passes: ForwardPasses) -> Task:
    """The task of an image or text encoder. Raises UsageError if it takes something else, or consists of several
    models. FormatError if the files beside the weights do not say how an input is prepared."""
    input_name = model.main_input_name
    if model.config.is_encoder_decoder or model.config.sub_configs or input_name not in ("input_ids", "pixel_values"):
        raise UsageError(
            f"a {type(model).__name__} is not an encoder of images alone or of texts alone, so it is not clear what an "
            "embedding is; load it with inference.load_model"
        )
    make_encoder = _make_text_encoder if input_name == "input_ids" else _make_image_encoder
    return make_encoder(model, folder, passes)


def _make_image_encoder(model: Any, folder: Path, passes: ForwardPasses) -> Task:
    def embed_images(images: Tensor) -> Tensor:
        return _pool_output(model(pixel_values=images), None)

    task = make_image_task(model, embed_images, folder, num_classes=0, labels=None, passes=passes)
    weight = next(model.parameters())
    with torch.inference_mode():
        example = embed_images(torch.zeros(1, *task.shape, device=weight.device, dtype=weight.dtype))
    return replace(task, num_features=example.shape[1])


def _make_text_encoder(model: Any, folder: Path, passes: ForwardPasses) -> Task:
    tokenizer = ModelTokenizer.from_folder(model, folder)
    parameters = signature(model.forward).parameters
    tokenizer = replace(tokenizer, fields=tuple(field for field in tokenizer.fields if field in parameters))
    if not tokenizer.has_padding:
        passes = replace(passes, full_size=1)
    task = TextEncoder(model, tokenizer, None, passes)
    (example,) = task._forward(torch.from_numpy(task.decode(b"a", "a text")).unsqueeze(0))
    return replace(task, num_features=len(example))


@dataclass(frozen=True, slots=True, eq=False)
class TextEncoder(TextClassifier):
    """Embeds texts. Without a padding token or attention mask, one text at a time."""

    @torch.inference_mode()
    def _forward(self, batch: Tensor) -> Tensor:
        fields = self.tokenizer.to_arguments(batch.to(find_device(self.model)))
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
    token_rows = [row if mask is None else row[mask[number] > 0] for number, row in enumerate(rows)]
    return torch.stack([row.float().mean(0) for row in token_rows])

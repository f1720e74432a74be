"""From the bytes of an image to its pixels, and from logits to predictions, as transformers' pipelines do it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import IO, Any, Literal

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from ckpt_tools.errors import FormatError

from ..common.training_package import model_names
from .results import Prediction

# Far above any sensible picture of one digit; keeps a small file that unpacks to gigabytes from being decoded.
MAX_PIXELS = 64_000_000
# Pillow warns of images that it would still decode; here they are refused.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)


Activation = Literal["softmax", "sigmoid"]


def predictions_of(logits: Tensor) -> list[Prediction]:
    """Label and probabilities for each row of float32 [n, classes]."""
    rows = torch.softmax(logits, dim=1).tolist()
    return [Prediction(label, tuple(row)) for label, row in zip(logits.argmax(1).tolist(), rows, strict=True)]


def decode_image(file: IO[bytes], name: str) -> Tensor:
    """Decode an image file to grey, scaled to 28x28: uint8 [28, 28]. Raises as :func:`decoded`."""
    return decoded(file, name, _canonical)


def decoded(file: IO[bytes], name: str, prepare: Callable[[Image.Image], Tensor]) -> Tensor:
    """Decode an image file in any format of Pillow, and ``prepare`` it.

    Raises ``FormatError`` with ``name`` if the bytes are not an image, are truncated, or unpack to too many pixels.
    """
    try:
        with Image.open(file) as image:
            if image.width * image.height > MAX_PIXELS:
                raise FormatError(f"{name} has {image.width}x{image.height} pixels, more than {MAX_PIXELS} in all")
            return prepare(image)
    except FormatError:
        raise
    except UnidentifiedImageError as error:
        raise FormatError(f"{name} is not an image file that can be read") from error
    except Image.DecompressionBombError as error:
        raise FormatError(f"{name} unpacks to too many pixels") from error
    except Exception as error:
        # The decoders of Pillow raise whatever they stumble over: OSError, SyntaxError, struct.error, IndexError, ...
        raise FormatError(f"{name} is a damaged image file ({error})") from error


def _canonical(image: Image.Image) -> Tensor:
    grey = image.convert("L")
    if grey.size != (model_names.IMAGE_SIZE, model_names.IMAGE_SIZE):
        grey = grey.resize((model_names.IMAGE_SIZE, model_names.IMAGE_SIZE), Image.Resampling.BILINEAR)
    return torch.from_numpy(np.array(grey, dtype=np.uint8))


def embeddings_of(features: Tensor) -> list[Prediction]:
    """An embedding for each row of float32 [n, features]."""
    return [Prediction(embedding=tuple(row)) for row in features.tolist()]


def answers(logits: Tensor, activation: Activation) -> list[Prediction]:
    """Label and probabilities for each row of float32 [n, classes]; a sigmoid gives independent ones."""
    if activation == "softmax":
        return predictions_of(logits)
    # Row by row: of many elements at once, vector instructions take some and not the rest, which rounds otherwise.
    rows = [torch.sigmoid(row).tolist() for row in logits]
    return [Prediction(label, tuple(row)) for label, row in zip(logits.argmax(1).tolist(), rows, strict=True)]


def activation_of(config: Any) -> Activation:
    """The activation of a transformers configuration. Raises FormatError for a regression."""
    if config.problem_type == "regression":
        raise FormatError("the model is a regression, which has no classes to predict")
    return "sigmoid" if config.problem_type == "multi_label_classification" or config.num_labels == 1 else "softmax"


def labels_of_config(config: Any) -> tuple[str, ...] | None:
    """Class names of ``id2label``, if it has one for each class."""
    found = {int(number): str(label) for number, label in (config.id2label or {}).items()}
    return tuple(found[number] for number in range(len(found))) if set(found) == set(range(config.num_labels)) else None

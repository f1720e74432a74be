"""A row for each image: its prediction, or the reason why there is none."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from ckpt_tools.errors import FormatError

from .architectures import OURS
from .inputs import Inputs
from .loading import load_model
from .output import Row
from .prediction import predict
from .training_package import evaluation


def predict_chunks(model: str | Path, inputs: Inputs) -> Iterator[list[Row]]:
    """A row for each input, in order, a chunk at a time; no image of another chunk is held."""
    loaded = load_model(model, architecture=OURS)
    for start in range(0, len(inputs.names), evaluation.CHUNK):
        numbers = range(start, min(start + evaluation.CHUNK, len(inputs.names)))
        yield list(_predict_chunk(loaded, inputs, numbers))


def predict_rows(model: str | Path, inputs: Inputs) -> list[Row]:
    """All rows at once, for a small dataset."""
    return [row for chunk in predict_chunks(model, inputs) for row in chunk]


def _predict_chunk(model: nn.Module, inputs: Inputs, numbers: range) -> Iterator[Row]:
    """The images of a chunk that can be read are predicted together, the others become rows with their error."""
    read = [_read(inputs, number) for number in numbers]
    pixels = [each for each in read if not isinstance(each, str)]
    predictions = iter(predict(model, torch.stack(pixels)) if pixels else ())
    for number, each in zip(numbers, read, strict=True):
        name, truth = _text(inputs.names[number]), inputs.truth(number)
        if isinstance(each, str):
            yield Row(name, None, None, truth, each)
        else:
            prediction = next(predictions)
            yield Row(name, prediction.label, prediction.probabilities, truth, None)


def _read(inputs: Inputs, number: int) -> Tensor | str:
    try:
        return inputs.read(number)
    except FormatError as error:
        return _text(str(error))


def _text(name: str) -> str:
    """A file name may hold bytes that are not UTF-8, which neither JSON nor Parquet can: these as escapes."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")

"""Inputs and predictions as arrays of numpy, and their tensors in the terms of the Open Inference Protocol."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeVar

import ml_dtypes
import numpy as np

Array = np.ndarray[Any, Any]

ModelInput = Array | tuple[Array, ...]
"""One input of a model, without the batch dimension; a tuple for a model with several input tensors."""

Group = TypeVar("Group")

Columns = Mapping[str, Array]
"""Outputs by name for some rows, each [n, ...]; texts are an array of objects, and so are arrays of several shapes."""

BYTES = "BYTES"

ANSWER = "json"  # the output of a user's own ``encode``

DTYPES: Mapping[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    **{
        f"{sign}INT{bits}": np.dtype(f"<{'u' if sign else 'i'}{bits // 8}")
        for sign in ("", "U")
        for bits in (8, 16, 32, 64)
    },
    **{f"FP{bits}": np.dtype(f"<f{bits // 8}") for bits in (16, 32, 64)},
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
"""Element types in memory and in the binary extension: little-endian. ``BYTES`` elements have a length prefix."""


@dataclass(frozen=True, slots=True, eq=False)
class Prediction:
    """Row ``number`` of the outputs. A classifier has the outputs ``label`` and ``probabilities``, a language model has
    ``text``, an encoder ``embedding``; other models have outputs of their own. Equal if all outputs have the same
    bits."""

    columns: Columns
    number: int = 0

    @classmethod
    def from_outputs(cls, **outputs: Any) -> Prediction:
        """A prediction with these outputs. Floats become FP32, and texts objects."""
        return cls({name: _make_column([value]) for name, value in outputs.items()})

    def __getitem__(self, name: str) -> Any:
        """The output as an array or a scalar of numpy, or as a text. KeyError if the model has none of this name."""
        return self.columns[name][self.number]

    def _get_plain(self, name: str) -> Any:
        if name not in self.columns:
            return None
        value = self[name]
        return value.tolist() if isinstance(value, np.ndarray | np.generic) else value

    @property
    def label(self) -> int | None:
        """Number of the predicted class, of a classifier."""
        return self._get_plain("label")

    @property
    def probabilities(self) -> tuple[float, ...] | None:
        """Probability of each class, of a classifier."""
        probabilities = self._get_plain("probabilities")
        return None if probabilities is None else tuple(probabilities)

    @property
    def text(self) -> str | None:
        return self._get_plain("text")

    @property
    def embedding(self) -> tuple[float, ...] | None:
        embedding = self._get_plain("embedding")
        return None if embedding is None else tuple(embedding)

    def to_plain(self) -> Any:
        """The outputs as plain values of Python, nested lists for tensors; or what a user's own ``encode`` made of
        them."""
        if ANSWER in self.columns:
            return json.loads(self[ANSWER])
        return {name: self._get_plain(name) for name in self.columns}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Prediction) and self._get_bits() == other._get_bits()

    def __hash__(self) -> int:
        return hash(tuple(self._get_bits().items()))

    def __repr__(self) -> str:
        return f"Prediction({', '.join(f'{name}={self._get_plain(name)!r}' for name in self.columns)})"

    def __reduce__(self) -> tuple[Any, ...]:
        """Only this row, not those of the whole batch."""
        return Prediction, ({name: column[self.number : self.number + 1] for name, column in self.columns.items()},)

    def _get_bits(self) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
        rows = {name: np.asarray(self[name]) for name in self.columns}
        return {
            name: (str(row.dtype), row.shape, str(row).encode() if row.dtype == object else row.tobytes())
            for name, row in rows.items()
        }


def _make_column(values: Sequence[Any]) -> Array:
    if isinstance(values[0], str):
        return make_text_column(values)
    column = np.asarray(values)
    return column.astype(np.float32) if column.dtype.kind == "f" else column


def make_text_column(values: Sequence[str]) -> Array:
    """A column of texts."""
    column = np.empty(len(values), object)
    column[:] = values
    return column


def concatenate_rows(parts: Sequence[Array]) -> Array:
    """Rows of several arrays one after the other: an array of objects if their shapes differ."""
    if len(parts) == 1:
        return parts[0]
    if len({part.shape[1:] for part in parts}) == 1:
        return np.concatenate(parts)
    column = np.empty(sum(map(len, parts)), object)
    for number, row in enumerate(row for part in parts for row in part):
        column[number] = row
    return column


def predict_by_group(
    inputs: Sequence[Any], group_of: Callable[[Any], Group], predict: Callable[[Sequence[Any], Group], Columns]
) -> Columns:
    """Outputs in the order of the inputs; inputs of one group are predicted together."""
    numbers: dict[Group, list[int]] = {}
    for number, row in enumerate(inputs):
        numbers.setdefault(group_of(row), []).append(number)
    outputs = [predict([inputs[number] for number in members], group) for group, members in numbers.items()]
    order = np.argsort([number for members in numbers.values() for number in members])
    is_ordered = np.array_equal(order, np.arange(len(order)))
    columns = {name: concatenate_rows([each[name] for each in outputs]) for name in outputs[0]}
    return columns if is_ordered else {name: rows[order] for name, rows in columns.items()}


def split_predictions(columns: Columns) -> Iterator[Prediction]:
    """Each row of ``columns``."""
    return (Prediction(columns, number) for number in range(len(next(iter(columns.values())))))


BATCH = -1  # the batch dimension, or any size


def does_shape_fit(shape: Sequence[int], wanted: Sequence[int]) -> bool:
    """Whether ``shape`` is the ``wanted`` one, in which -1 is any size except 0."""
    return len(shape) == len(wanted) and all(
        size > 0 and wanted_size in (BATCH, size) for size, wanted_size in zip(shape, wanted, strict=True)
    )


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, datatype and shape; the first dimension is the batch. A ``BYTES`` input has one text in UTF-8 per element,
    which ``Predictor.decode`` turns into an input of ``Predictor.predict``."""

    name: str
    datatype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        assert self.shape[:1] == (BATCH,), self.shape
        assert self.datatype == BYTES or self.datatype in DTYPES, self.datatype

    @property
    def row_bytes(self) -> int | None:
        """Bytes of one row; None if rows differ in size."""
        if self.datatype == BYTES or BATCH in self.shape[1:]:
            return None
        return prod(self.shape[1:]) * DTYPES[self.datatype].itemsize

    def make_zeros(self) -> Array:
        """One row of zeros, with one element in each dimension of any size."""
        return np.zeros([max(1, size) for size in self.shape[1:]], DTYPES[self.datatype])

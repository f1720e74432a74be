"""A row for each input: its prediction, or the reason why there is none; and the columns that it is written in."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import lru_cache
from json.encoder import encode_basestring_ascii as quoted
from typing import TYPE_CHECKING, Any, Literal

from .results import Prediction

if TYPE_CHECKING:
    import pyarrow

Kind = Literal["label", "text", "embedding"]


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the output: a prediction, or the ``error`` for which there is none.

    ``truth`` is the number of the true class, None if it is unknown. ``fraction`` is how much of the input is done with
    this row; it is not written.
    """

    name: str
    prediction: Prediction | None
    truth: int | None
    error: str | None
    fraction: float = 0.0

    def __post_init__(self) -> None:
        assert (self.prediction is None) == (self.error is not None)

    @property
    def label(self) -> int | None:
        return None if self.prediction is None else self.prediction.label


@dataclass(frozen=True, slots=True)
class Columns:
    """What is written of a row, by what the model answers. ``top`` is the number of most probable classes."""

    kind: Kind
    labels: tuple[str, ...] | None
    top: int

    def of(self, row: Row) -> dict[str, Any]:
        """The row as it is written in JSON, and read back from it."""
        return {"name": row.name, **self._answer(row.prediction), "truth": row.truth, "error": row.error}

    def _answer(self, found: Prediction | None) -> dict[str, Any]:
        if self.kind == "text":
            return {"text": None if found is None else found.text}
        if self.kind == "embedding":
            return {"embedding": None if found is None else found.embedding}
        if found is None or found.probabilities is None:
            return {"label": None, "top": None, "probabilities": None}
        return {"label": found.label, "top": self._top(found), "probabilities": found.probabilities}

    def line(self, row: Row) -> str:
        """``of`` in JSON, character by character as ``json.dumps`` writes it, and a line break.

        Most of the time goes into the digits of probabilities, so those of classes are written once and used twice.
        """
        found = row.prediction
        if self.kind != "label" or found is None or found.probabilities is None:
            return json.dumps(self.of(row)) + "\n"
        # Python writes a list of finite numbers as JSON does.
        numbers = repr(list(found.probabilities))
        digits = numbers[1:-1].split(", ")
        labels = self.labels
        top = ", ".join([f"{_head(n, labels[n] if labels else None)}{digits[n]}}}" for n in self._best(found)])
        truth = "null" if row.truth is None else row.truth
        return (
            f'{{"name": {quoted(row.name)}, "label": {found.label}, "top": [{top}], "probabilities": {numbers}, '
            f'"truth": {truth}, "error": null}}\n'
        )

    def _top(self, found: Prediction) -> list[dict[str, Any]]:
        probabilities = found.probabilities or ()
        return [
            {"label": n, "name": self.labels[n] if self.labels else None, "probability": probabilities[n]}
            for n in self._best(found)
        ]

    def _best(self, found: Prediction) -> list[int]:
        """The most probable classes. The label is the first, also if another class has the same probability."""
        probabilities = found.probabilities or ()
        ordered = sorted(range(len(probabilities)), key=probabilities.__getitem__, reverse=True)
        if ordered[0] != found.label and found.label is not None:
            ordered.remove(found.label)
            ordered.insert(0, found.label)
        return ordered[: self.top]

    def schema(self) -> pyarrow.Schema:
        """Of a Parquet file with these columns."""
        import pyarrow as pa

        one = pa.struct({"label": pa.int64(), "name": pa.string(), "probability": pa.float64()})
        answer = {
            "label": {"label": pa.int64(), "top": pa.list_(one), "probabilities": pa.list_(pa.float64())},
            "text": {"text": pa.string()},
            "embedding": {"embedding": pa.list_(pa.float64())},
        }[self.kind]
        return pa.schema({"name": pa.string(), **answer, "truth": pa.int64(), "error": pa.string()})


@lru_cache(maxsize=4096)
def _head(number: int, name: str | None) -> str:
    """One of the most probable classes in JSON, up to its probability."""
    return f'{{"label": {number}, "name": {"null" if name is None else quoted(name)}, "probability": '


def is_finite(found: Prediction) -> bool:
    """A model whose weights are damaged answers with numbers that are none; JSON has no word for them."""
    return math.isfinite(sum(found.probabilities or found.embedding or ()))

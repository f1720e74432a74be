"""A row for each input: its prediction, or the reason why there is none; and the columns that it is written in."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ..models.results import Prediction

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

    def line(self, row: Row) -> bytes:
        """``of`` as a line of JSON. A reader of it gets the very floats."""
        # Here, so that without it the command ends with a sentence.
        import orjson

        try:
            return orjson.dumps(self.of(row), option=orjson.OPT_APPEND_NEWLINE)
        except orjson.JSONEncodeError:
            # A label or a text with half of a surrogate pair, which has no UTF-8. JSON has an escape for it.
            return json.dumps(self.of(row), separators=(",", ":")).encode() + b"\n"

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


def is_finite(found: Prediction) -> bool:
    """A model whose weights are damaged answers with numbers that are none; JSON has no word for them."""
    return math.isfinite(sum(found.probabilities or found.embedding or ()))

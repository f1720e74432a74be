"""Output rows: a prediction or an error for each input, and the columns they are written in."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ckpt_tools.process.credentials import mask_secrets

from ..models.results import ANSWER, Prediction

if TYPE_CHECKING:
    import pyarrow

AnswerKind = Literal["label", "text", "embedding", "outputs"]


@dataclass(frozen=True, slots=True)
class OutputRow:
    """One line of the output: a prediction, or the ``error`` why there is none. ``truth`` is the number of the true
    class, None if unknown. ``fraction`` is the share of the input done with this row; it is not written."""

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
class OutputColumns:
    """Columns of the output, by the ``kind`` of answer; ``top`` is the number of most probable classes."""

    kind: AnswerKind
    labels: tuple[str, ...] | None
    top: int

    def make_values(self, row: OutputRow) -> dict[str, Any]:
        error = row.error and mask_secrets(row.error)
        name = mask_secrets(row.name)
        return {"name": name, **self._make_answer(row.prediction), "truth": row.truth, "error": error}

    def _make_answer(self, prediction: Prediction | None) -> dict[str, Any]:
        if self.kind == "text":
            return {"text": None if prediction is None else prediction.text}
        if self.kind == "embedding":
            return {"embedding": None if prediction is None else prediction.embedding}
        if self.kind == "outputs":
            return {"outputs": None if prediction is None else prediction.to_plain()}
        if prediction is None or prediction.probabilities is None:
            return {"label": None, "top": None, "probabilities": None}
        top = self._list_top_classes(prediction)
        return {"label": prediction.label, "top": top, "probabilities": prediction.probabilities}

    def to_line(self, row: OutputRow) -> bytes:
        """``make_values`` as a line of JSON, from which floats are read back exactly."""
        # Here, so that without it the command ends with a sentence.
        import orjson

        try:
            return orjson.dumps(self.make_values(row), option=orjson.OPT_APPEND_NEWLINE)
        except orjson.JSONEncodeError:
            # A label or a text with half of a surrogate pair, which has no UTF-8. JSON has an escape for it.
            return json.dumps(self.make_values(row), separators=(",", ":")).encode() + b"\n"

    def parse_line(self, line: bytes) -> dict[str, Any]:
        """The columns of a line, for Parquet, where outputs of any form are a text in JSON."""
        columns: dict[str, Any] = json.loads(line)
        if columns.get("outputs") is not None:
            columns["outputs"] = json.dumps(columns["outputs"])
        return columns

    def _list_top_classes(self, prediction: Prediction) -> list[dict[str, Any]]:
        probabilities = prediction.probabilities or ()
        return [
            {"label": n, "name": self.labels[n] if self.labels else None, "probability": probabilities[n]}
            for n in self._rank_classes(prediction)
        ]

    def _rank_classes(self, prediction: Prediction) -> list[int]:
        """The most probable classes, the label first even if another class is equally probable."""
        probabilities = prediction.probabilities or ()
        ordered = sorted(range(len(probabilities)), key=probabilities.__getitem__, reverse=True)
        if ordered[0] != prediction.label and prediction.label is not None:
            ordered.remove(prediction.label)
            ordered.insert(0, prediction.label)
        return ordered[: self.top]

    def make_schema(self) -> pyarrow.Schema:
        import pyarrow as pa

        top_class = pa.struct({"label": pa.int64(), "name": pa.string(), "probability": pa.float64()})
        answer = {
            "label": {"label": pa.int64(), "top": pa.list_(top_class), "probabilities": pa.list_(pa.float64())},
            "text": {"text": pa.string()},
            "embedding": {"embedding": pa.list_(pa.float64())},
            "outputs": {"outputs": pa.string()},
        }[self.kind]
        return pa.schema({"name": pa.string(), **answer, "truth": pa.int64(), "error": pa.string()})


def is_finite(prediction: Prediction) -> bool:
    """Whether all numbers are finite; others have no representation in JSON. Damaged weights give them."""
    if ANSWER in prediction.columns:
        return True
    values = (np.asarray(prediction[name]) for name in prediction.columns)
    return all(each.dtype.kind not in "fV" or bool(np.isfinite(each.astype(np.float64)).all()) for each in values)

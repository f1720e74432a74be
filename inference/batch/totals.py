"""What was predicted so far, in numbers: of rows as they are written, so that rows of an earlier run count as well."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckpt_tools.errors import CkptError

from .rows import Row

NUM_NAMED = 3
"""A sentence names so many bad inputs; all of them stand in the output."""

NUM_BINS = 15
"""Of confidence, for the calibration. As many as most papers take."""


class BadInputsError(CkptError):
    """Everything was predicted but inputs that could not be read."""

    exit_code = 6


@dataclass(slots=True)
class Bin:
    """Predictions of about the same confidence."""

    num: int = 0
    num_correct: int = 0
    confidence: float = 0.0


@dataclass(slots=True)
class Tally:
    """``confusion`` counts pairs of a true and a predicted class. ``fraction`` is how much of the input is done."""

    num_rows: int = 0
    num_bad: int = 0
    bad: list[str] = field(default_factory=list)
    confusion: dict[tuple[int, int], int] = field(default_factory=dict)
    bins: list[Bin] = field(default_factory=lambda: [Bin() for _ in range(NUM_BINS)])

    def add(self, row: Row) -> None:
        found = row.prediction
        self._add(row.name, row.truth, row.error, row.label, None if found is None else found.probabilities)

    def add_written(self, row: Mapping[str, Any]) -> None:
        """A row as it was read back."""
        self._add(row["name"], row["truth"], row["error"], row.get("label"), row.get("probabilities"))

    def _add(
        self, name: str, truth: int | None, error: str | None, label: int | None, probabilities: Sequence[float] | None
    ) -> None:
        self.num_rows += 1
        if error is not None:
            self.num_bad += 1
            self.bad = [*self.bad, name][:NUM_NAMED]
        elif truth is not None and label is not None and probabilities is not None:
            self._compare(truth, label, probabilities[label])

    def _compare(self, truth: int, label: int, confidence: float) -> None:
        self.confusion[truth, label] = self.confusion.get((truth, label), 0) + 1
        found = self.bins[min(int(confidence * NUM_BINS), NUM_BINS - 1)]
        found.num += 1
        found.num_correct += truth == label
        found.confidence += confidence

    @property
    def num_known(self) -> int:
        """Predictions whose true label is known."""
        return sum(self.confusion.values())

    @property
    def num_correct(self) -> int:
        return sum(count for (truth, label), count in self.confusion.items() if truth == label)

    @property
    def calibration_error(self) -> float:
        """The expected calibration error: how far confidence and accuracy are apart, on average over predictions."""
        return sum(abs(found.num_correct - found.confidence) for found in self.bins) / max(1, self.num_known)

    def check_bad(self, out: object) -> None:
        """Raise BadInputsError if there is a row without a prediction."""
        if not self.num_bad:
            return
        more = self.num_bad - len(self.bad)
        names = ", ".join(self.bad) + (f" and {more:,} more" if more else "")
        raise BadInputsError(
            f"{self.num_bad:,} of {self.num_rows:,} inputs could not be predicted: {names}; their rows in {out} say why"
        )

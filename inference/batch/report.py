"""Report of predictions with known true labels: accuracy, confusion matrix and calibration."""

from __future__ import annotations

import json
import os
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ckpt_tools.errors import CkptError, DestinationExistsError, StoreError

from .rows import OutputRow

if TYPE_CHECKING:
    from matplotlib.figure import Figure

REPORT_FILES = ("report.json", "confusion.png", "calibration.png")

NUM_NAMED = 3  # bad inputs named in the error; all of them are in the output
NUM_BINS = 15  # confidence bins of the calibration, as in most papers
MAX_NUMBERED, MAX_NAMED, NAME_CHARS = 24, 60, 14
"""Most classes for which the confusion matrix shows counts, and names; and the length that names are cut to."""


class BadInputsError(CkptError):
    """Some inputs could not be read; all others were predicted."""

    exit_code = 6


@dataclass(slots=True)
class Tally:
    """Counts over written rows, those of a resumed run included. ``confusion`` counts pairs (true, predicted class).
    For each bin of confidence there is the number of predictions, of correct ones, and the sum of confidences."""

    num_rows: int = 0
    num_bad: int = 0
    bad_names: list[str] = field(default_factory=list)
    confusion: Counter[tuple[int, int]] = field(default_factory=Counter)
    bins: list[list[float]] = field(default_factory=lambda: [[0, 0, 0.0] for _ in range(NUM_BINS)])

    def add_row(self, row: OutputRow) -> None:
        prediction = row.prediction
        probabilities = None if prediction is None else prediction.probabilities
        self._count_row(row.name, row.truth, row.error, row.label, probabilities)

    def add_written(self, row: Mapping[str, Any]) -> None:
        """Add a row as read back from the output."""
        self._count_row(row["name"], row["truth"], row["error"], row.get("label"), row.get("probabilities"))

    def _count_row(
        self, name: str, truth: int | None, error: str | None, label: int | None, probabilities: Sequence[float] | None
    ) -> None:
        self.num_rows += 1
        if error is not None:
            self.num_bad += 1
            self.bad_names = [*self.bad_names, name][:NUM_NAMED]
        elif truth is not None and label is not None and probabilities is not None:
            self.confusion[truth, label] += 1
            confidence = probabilities[label]
            counts = self.bins[min(int(confidence * NUM_BINS), NUM_BINS - 1)]
            counts[0] += 1
            counts[1] += truth == label
            counts[2] += confidence

    @property
    def num_known(self) -> int:
        """Predictions whose true label is known."""
        return self.confusion.total()

    @property
    def num_correct(self) -> int:
        return sum(count for (truth, label), count in self.confusion.items() if truth == label)

    @property
    def calibration_error(self) -> float:
        """Expected calibration error: the mean over predictions of abs(accuracy - confidence) of their bin."""
        return sum(abs(correct - confidence) for _, correct, confidence in self.bins) / max(1, self.num_known)

    def refuse_bad_inputs(self, out: object) -> None:
        """Raise BadInputsError if there is a row without a prediction."""
        if not self.num_bad:
            return
        more = self.num_bad - len(self.bad_names)
        names = ", ".join(self.bad_names) + (f" and {more:,} more" if more else "")
        raise BadInputsError(
            f"{self.num_bad:,} of {self.num_rows:,} inputs could not be predicted: {names}; their rows in {out} say why"
        )


@dataclass(frozen=True, slots=True)
class ReportFolder:
    """The files ``REPORT_FILES`` in ``folder``, which is made; existing ones are only replaced if ``replaces``."""

    folder: Path
    replaces: bool

    def check_writable(self) -> None:
        """Raise if the files cannot be written, or matplotlib is missing. Writes nothing."""
        import matplotlib.figure  # noqa: F401

        parent = self.folder.parent
        if not parent.is_dir():
            raise StoreError(f"the folder of --report, {parent}, does not exist; make it first")
        if os.path.lexists(self.folder) and not self.folder.is_dir():
            raise DestinationExistsError(f"--report {self.folder} is a file")
        if not os.access(self.folder if self.folder.is_dir() else parent, os.W_OK | os.X_OK):
            raise StoreError(f"--report {self.folder} cannot be written to")
        for name in REPORT_FILES:
            if os.path.lexists(self.folder / name) and not self.replaces:
                raise DestinationExistsError(f"{self.folder / name} exists; --overwrite replaces it")

    def write(self, tally: Tally, labels: tuple[str, ...] | None) -> None:
        """Each file appears when it is complete."""
        names = name_classes(tally, labels)
        self.folder.mkdir(exist_ok=True)
        self._write_file("report.json", (json.dumps(summarize_tally(tally, names), indent=1) + "\n").encode())
        self._write_file("confusion.png", draw_confusion(tally, names))
        self._write_file("calibration.png", draw_calibration(tally))

    def _write_file(self, name: str, data: bytes) -> None:
        unfinished = self.folder / f".{name}.unfinished"
        unfinished.write_bytes(data)
        unfinished.replace(self.folder / name)


def name_classes(tally: Tally, labels: tuple[str, ...] | None) -> dict[int, str]:
    """Names of the classes that occur, by number, in order."""
    numbers = sorted({number for pair in tally.confusion for number in pair})
    return {number: labels[number] if labels else str(number) for number in numbers}


def summarize_tally(tally: Tally, names: dict[int, str]) -> dict[str, Any]:
    """The content of ``report.json``. A class never predicted has no precision, one that never occurs no recall."""
    occurring, predicted = Counter[int](), Counter[int]()
    for (truth, label), count in tally.confusion.items():
        occurring[truth] += count
        predicted[label] += count
    return {
        "rows": tally.num_rows,
        "errors": tally.num_bad,
        "with_truth": tally.num_known,
        "correct": tally.num_correct,
        "accuracy": _divide(tally.num_correct, tally.num_known),
        "expected_calibration_error": tally.calibration_error if tally.num_known else None,
        "calibration": [
            {
                "from": number / NUM_BINS,
                "to": (number + 1) / NUM_BINS,
                "predictions": num,
                "confidence": _divide(confidence, num),
                "accuracy": _divide(num_correct, num),
            }
            for number, (num, num_correct, confidence) in enumerate(tally.bins)
        ],
        "classes": [
            {
                "label": number,
                "name": name,
                "rows": occurring[number],
                "precision": _divide(tally.confusion[number, number], predicted[number]),
                "recall": _divide(tally.confusion[number, number], occurring[number]),
            }
            for number, name in names.items()
        ],
        "confusion": [
            {"truth": truth, "label": label, "count": count}
            for (truth, label), count in sorted(tally.confusion.items())
        ],
    }


def _divide(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def draw_confusion(tally: Tally, names: dict[int, str]) -> bytes:
    """PNG of the confusion matrix: rows are true classes, columns predicted ones, shaded by their share of the row."""
    from matplotlib.figure import Figure

    counts = np.array([[tally.confusion[truth, label] for label in names] for truth in names])
    figure = Figure(figsize=(9, 9), layout="constrained")
    axes = figure.subplots()
    axes.set(title=f"{tally.num_correct:,} of {tally.num_known:,} correct", xlabel="predicted", ylabel="true")
    if names:
        # The square root makes rare confusions visible.
        shares = np.sqrt(counts / np.maximum(1, counts.sum(1, keepdims=True)))
        axes.imshow(shares, "Blues", vmin=0, vmax=1)
    if len(names) <= MAX_NAMED:
        # A label may hold half of a surrogate pair.
        texts = [name.encode(errors="replace").decode() for name in names.values()]
        short = [text if len(text) <= NAME_CHARS else f"{text[: NAME_CHARS - 1]}…" for text in texts]
        axes.set_xticks(range(len(short)), short, rotation=90, parse_math=False)
        axes.set_yticks(range(len(short)), short, parse_math=False)
    if len(names) <= MAX_NUMBERED:
        for row, column in np.argwhere(counts):
            colour = "white" if shares[row, column] > 0.6 else "black"
            axes.text(column, row, str(counts[row, column]), ha="center", va="center", color=colour)
    return _render_png(figure)


def draw_calibration(tally: Tally) -> bytes:
    """PNG of accuracy by confidence, and the number of predictions of each confidence below it."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 7), layout="constrained")
    upper, lower = figure.subplots(2, sharex=True, height_ratios=(4, 1))
    centres = [(number + 0.5) / NUM_BINS for number in range(NUM_BINS)]
    upper.set(title=f"expected calibration error {tally.calibration_error:.4f}", ylabel="accuracy", ylim=(0, 1))
    num, num_correct, _ = np.array(tally.bins).T
    upper.bar(centres, num_correct / np.maximum(num, 1), 0.9 / NUM_BINS)
    upper.plot((0, 1), (0, 1), color="black", label="accuracy = confidence")
    upper.legend()
    lower.bar(centres, num, 0.9 / NUM_BINS, color="grey")
    lower.set(xlabel="confidence", ylabel="predictions", xlim=(0, 1))
    return _render_png(figure)


def _render_png(figure: Figure) -> bytes:
    file = BytesIO()
    with warnings.catch_warnings():
        # Of characters of a name that the font lacks.
        warnings.simplefilter("ignore")
        figure.savefig(file, format="png")
    return file.getvalue()

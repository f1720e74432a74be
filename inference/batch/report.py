"""How good the predictions are: accuracy, which classes are taken for which, and whether confidence can be believed."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpt_tools.errors import DestinationExistsError, StoreError

from .totals import NUM_BINS, Tally

FILES = ("report.json", "confusion.png", "calibration.png")


@dataclass(frozen=True, slots=True)
class Report:
    """Three files in ``folder``, which is made; files of these names are replaced only if asked."""

    folder: Path
    replaces: bool

    def check(self) -> None:
        """Raise if something stands in the way. Writes nothing."""
        parent = self.folder.parent
        if not parent.is_dir():
            raise StoreError(f"the folder of --report, {parent}, does not exist; make it first")
        if os.path.lexists(self.folder) and not self.folder.is_dir():
            raise DestinationExistsError(f"--report {self.folder} is a file")
        if not os.access(self.folder if self.folder.is_dir() else parent, os.W_OK | os.X_OK):
            raise StoreError(f"--report {self.folder} cannot be written to")
        for name in FILES:
            if os.path.lexists(self.folder / name) and not self.replaces:
                raise DestinationExistsError(f"{self.folder / name} exists; --overwrite replaces it")

    def write(self, tally: Tally, labels: tuple[str, ...] | None) -> None:
        """Each file appears when it is whole."""
        from .report_pictures import calibration_picture, confusion_picture

        names = names_of(tally, labels)
        self.folder.mkdir(exist_ok=True)
        self._put("report.json", (json.dumps(figures(tally, names), indent=1) + "\n").encode())
        self._put("confusion.png", confusion_picture(tally, names))
        self._put("calibration.png", calibration_picture(tally))

    def _put(self, name: str, data: bytes) -> None:
        unfinished = self.folder / f".{name}.unfinished"
        unfinished.write_bytes(data)
        unfinished.replace(self.folder / name)


def names_of(tally: Tally, labels: tuple[str, ...] | None) -> dict[int, str]:
    """The classes that occur, in order, by number."""
    found = sorted({number for pair in tally.confusion for number in pair})
    return {number: labels[number] if labels else str(number) for number in found}


def figures(tally: Tally, names: dict[int, str]) -> dict[str, Any]:
    """What ``report.json`` holds. A class that is never predicted has no precision, one that never occurs no recall."""
    return {
        "rows": tally.num_rows,
        "errors": tally.num_bad,
        "with_truth": tally.num_known,
        "correct": tally.num_correct,
        "accuracy": _ratio(tally.num_correct, tally.num_known),
        "expected_calibration_error": tally.calibration_error if tally.num_known else None,
        "calibration": [
            {
                "from": number / NUM_BINS,
                "to": (number + 1) / NUM_BINS,
                "predictions": found.num,
                "confidence": found.confidence / found.num if found.num else None,
                "accuracy": _ratio(found.num_correct, found.num),
            }
            for number, found in enumerate(tally.bins)
        ],
        "classes": [{"label": number, "name": name} | _of_class(tally, number) for number, name in names.items()],
        "confusion": [
            {"truth": truth, "label": label, "count": count}
            for (truth, label), count in sorted(tally.confusion.items())
        ],
    }


def _of_class(tally: Tally, number: int) -> dict[str, float | int | None]:
    pairs = tally.confusion.items()
    correct = tally.confusion.get((number, number), 0)
    occurs = sum(count for (truth, _), count in pairs if truth == number)
    predicted = sum(count for (_, label), count in pairs if label == number)
    return {"rows": occurs, "precision": _ratio(correct, predicted), "recall": _ratio(correct, occurs)}


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None

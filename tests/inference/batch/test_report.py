"""The numbers of a report, judged by scikit-learn and by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from sklearn import metrics
from sklearn.calibration import calibration_curve

from inference.batch.report import NUM_BINS, Tally, figures, names_of
from inference.batch.rows import Row
from inference.models.results import Prediction

NUM_CLASSES = 6
NEVER_PREDICTED, NEVER_TRUE = 4, 5

Numbers = NDArray[Any]


@pytest.fixture(scope="module")
def judged():
    """True classes, predicted classes and probabilities of 500 rows. One class is never predicted, one never occurs."""
    random = np.random.default_rng(3)
    logits = random.normal(size=(500, NUM_CLASSES)) * 2
    logits[:, NEVER_PREDICTED] = -30
    probabilities = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    truth = np.where(random.random(500) < 0.6, probabilities.argmax(1), random.integers(0, NUM_CLASSES, 500))
    truth[truth == NEVER_TRUE] = 0
    return truth, probabilities.argmax(1), probabilities


@pytest.fixture(scope="module")
def found(judged):
    """What the report says of them, and of three rows that must change nothing: two bad ones, one of unknown truth."""
    tally = Tally()
    for number, (truth, label, row) in enumerate(zip(*judged, strict=True)):
        tally.add(Row(str(number), Prediction.of(label=int(label), probabilities=row), int(truth), None))
    tally.add(Row("bad", None, 1, "is not an image file"))
    tally.add(Row("bad too", None, None, "is not an image file"))
    tally.add(Row("unknown", Prediction.of(label=0, probabilities=(1.0,) * NUM_CLASSES), None, None))
    return figures(tally, names_of(tally, ("a", "b", "c", "d", "e", "f")))


def test_the_accuracy_is_scikit_learns(judged, found):
    truth, label, _ = judged
    assert found["accuracy"] == metrics.accuracy_score(truth, label)
    assert (found["rows"], found["errors"], found["with_truth"]) == (503, 2, 500)
    assert found["correct"] == metrics.accuracy_score(truth, label, normalize=False)


def test_the_confusions_are_scikit_learns(judged, found):
    matrix = np.zeros((NUM_CLASSES, NUM_CLASSES), dtype=int)
    for each in found["confusion"]:
        matrix[each["truth"], each["label"]] = each["count"]
    assert matrix.tolist() == metrics.confusion_matrix(*judged[:2], labels=range(NUM_CLASSES)).tolist()


def test_precision_and_recall_are_scikit_learns(judged, found):
    """Where scikit-learn divides by zero, there is none."""
    expected = metrics.precision_recall_fscore_support(*judged[:2], labels=range(NUM_CLASSES), zero_division=np.nan)
    for number, (each, precision, recall, rows) in enumerate(
        zip(found["classes"], expected[0], expected[1], expected[3], strict=True)
    ):
        assert (each["label"], each["name"], each["rows"]) == (number, "abcdef"[number], rows)
        assert each["precision"] == (None if math.isnan(precision) else pytest.approx(precision, abs=1e-15))
        assert each["recall"] == (None if math.isnan(recall) else pytest.approx(recall, abs=1e-15))
    assert [each["label"] for each in found["classes"] if each["precision"] is None] == [NEVER_PREDICTED]
    assert [each["label"] for each in found["classes"] if each["recall"] is None] == [NEVER_TRUE]


def test_the_calibration_is_scikit_learns(judged, found):
    truth, label, probabilities = judged
    sure, right = probabilities.max(1), truth == label
    accuracies, confidences = calibration_curve(right, sure, n_bins=NUM_BINS)
    counts, edges = np.histogram(sure, NUM_BINS, range=(0, 1))
    filled = [each for each in found["calibration"] if each["predictions"]]
    assert [each["accuracy"] for each in filled] == pytest.approx(accuracies.tolist())
    assert [each["confidence"] for each in filled] == pytest.approx(confidences.tolist())
    assert [each["predictions"] for each in found["calibration"]] == counts.tolist()
    assert [each["from"] for each in found["calibration"]] == pytest.approx(edges[:-1].tolist())
    assert [each["to"] for each in found["calibration"]] == pytest.approx(edges[1:].tolist())
    error = (np.abs(accuracies - confidences) * counts[counts > 0]).sum() / len(truth)
    assert found["expected_calibration_error"] == pytest.approx(error)


def test_a_calibration_by_hand():
    """Six predictions of 0.95 and 1.0 share the last bin: 4 are right, and they are sure of 5.8. One of 0.6 is not."""
    tally = Tally()
    cases = [(0.95, True)] * 3 + [(0.95, False), (0.6, False), (1.0, True), (1.0, False)]
    for sure, is_right in cases:
        tally.add(Row("x", Prediction.of(label=0, probabilities=(sure, 1 - sure)), 0 if is_right else 1, None))
    found = figures(tally, names_of(tally, None))
    assert found["expected_calibration_error"] == pytest.approx((1.8 + 0.6) / 7)
    assert [each["predictions"] for each in found["calibration"]] == [0] * 9 + [1] + [0] * 4 + [6]
    assert found["calibration"][-1]["confidence"] == pytest.approx(5.8 / 6)
    assert found["calibration"][-1]["accuracy"] == pytest.approx(4 / 6)


def test_nothing_to_compare_has_no_numbers():
    found = figures(Tally(), {})
    assert (found["accuracy"], found["expected_calibration_error"], found["classes"]) == (None, None, [])

"""The text of a row, what is counted of it, and the numbers of a report, judged by scikit-learn."""

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics
from sklearn.calibration import calibration_curve

from inference.batch.report import NUM_BINS, Tally, name_classes, summarize_tally
from inference.batch.rows import OutputColumns, OutputRow
from inference.models.results import Prediction

pytestmark = pytest.mark.quick

PROBABILITIES = st.lists(st.floats(0, 1) | st.floats(0, 1, width=32) | st.just(0.25), min_size=1, max_size=12)


def is_line_of(columns: OutputColumns, row: OutputRow) -> bool:
    """Whether Python reads the very same values back, from one line."""
    line = columns.to_line(row)
    return (
        line.count(b"\n") == 1
        and line.endswith(b"\n")
        and json.dumps(json.loads(line)) == json.dumps(columns.make_values(row))
    )


@st.composite
def predictions(draw: st.DrawFn) -> Prediction:
    """The label is one of the most probable, not always the first of them."""
    found = draw(PROBABILITIES)
    label = draw(st.sampled_from([n for n, each in enumerate(found) if each == max(found)]))
    return Prediction.from_outputs(label=label, probabilities=tuple(found))


@settings(max_examples=30)
@given(st.text(), predictions(), st.none() | st.integers(0, 999), st.integers(1, 15), st.booleans())
def test_a_line_is_the_row_in_json(name, found, truth, top, has_labels):
    labels = tuple(f'"{number}" ä\n' for number in range(12)) if has_labels else None
    columns, row = OutputColumns("label", labels, top), OutputRow(name, found, truth, None)
    assert is_line_of(columns, row)


@settings(max_examples=30)
@given(predictions(), st.integers(1, 15))
def test_the_most_probable_come_first_and_of_equals_the_label_then_the_lower_number(found, top):
    best = [
        each["label"]
        for each in OutputColumns("label", None, top).make_values(OutputRow("a", found, None, None))["top"]
    ]
    of = found.probabilities or ()
    assert best == sorted(range(len(of)), key=lambda n: (-of[n], n != found.label, n))[:top]
    assert best[0] == found.label


# --- the report

NUM_CLASSES = 6
NEVER_PREDICTED, NEVER_TRUE = 4, 5


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
        prediction = Prediction.from_outputs(label=int(label), probabilities=row)
        tally.add_row(OutputRow(str(number), prediction, int(truth), None))
    tally.add_row(OutputRow("bad", None, 1, "is not an image file"))
    tally.add_row(OutputRow("bad too", None, None, "is not an image file"))
    certain = Prediction.from_outputs(label=0, probabilities=(1.0,) * NUM_CLASSES)
    tally.add_row(OutputRow("unknown", certain, None, None))
    return summarize_tally(tally, name_classes(tally, ("a", "b", "c", "d", "e", "f")))


def test_the_accuracy_and_the_confusions_are_scikit_learns(judged, found):
    truth, label, _ = judged
    assert found["accuracy"] == metrics.accuracy_score(truth, label)
    assert (found["rows"], found["errors"], found["with_truth"]) == (503, 2, 500)
    assert found["correct"] == metrics.accuracy_score(truth, label, normalize=False)
    matrix = np.zeros((NUM_CLASSES, NUM_CLASSES), dtype=int)
    for each in found["confusion"]:
        matrix[each["truth"], each["label"]] = each["count"]
    assert matrix.tolist() == metrics.confusion_matrix(truth, label, labels=range(NUM_CLASSES)).tolist()


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

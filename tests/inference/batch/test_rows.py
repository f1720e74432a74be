"""The text of a row, and what is counted of it."""

from __future__ import annotations

import json
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference.batch.inputs import Wanted, find_inputs
from inference.batch.items import Item, Pixels, content_of
from inference.batch.pipeline import decode_all
from inference.batch.report import Tally
from inference.batch.rows import Columns, Row
from inference.models.predictor import load_predictor
from inference.models.results import Prediction

pytestmark = pytest.mark.quick

PROBABILITIES = st.lists(st.floats(0, 1) | st.floats(0, 1, width=32) | st.just(0.25), min_size=1, max_size=12)


def is_line_of(columns: Columns, row: Row) -> bool:
    """Whether Python reads the very same values back, from one line."""
    line = columns.line(row)
    return (
        line.count(b"\n") == 1 and line.endswith(b"\n") and json.dumps(json.loads(line)) == json.dumps(columns.of(row))
    )


@st.composite
def predictions(draw: st.DrawFn) -> Prediction:
    """The label is one of the most probable, not always the first of them."""
    found = draw(PROBABILITIES)
    label = draw(st.sampled_from([n for n, each in enumerate(found) if each == max(found)]))
    return Prediction.of(label=label, probabilities=tuple(found))


@given(st.text(), predictions(), st.none() | st.integers(0, 999), st.integers(1, 15), st.booleans())
def test_a_line_is_the_row_in_json(name, found, truth, top, has_labels):
    labels = tuple(f'"{number}" ä\n' for number in range(12)) if has_labels else None
    columns, row = Columns("label", labels, top), Row(name, found, truth, None)
    assert is_line_of(columns, row)


@pytest.mark.parametrize(
    ("kind", "found", "error"),
    [
        ("label", None, "why"),
        ("text", Prediction.of(text="a"), None),
        ("embedding", Prediction.of(embedding=(0.1,)), None),
    ],
)
def test_a_line_of_another_kind_is_too(kind, found, error):
    columns, row = Columns(kind, None, 5), Row("a", found, None, error)  # type: ignore[arg-type]
    assert is_line_of(columns, row)


def test_half_of_a_surrogate_pair_is_written_as_its_escape():
    columns, row = Columns("label", ("\ud800",), 5), Row("a", Prediction.of(label=0, probabilities=(1.0,)), None, None)
    assert is_line_of(columns, row)
    assert b"\\ud800" in columns.line(row)


@given(predictions(), st.integers(1, 15))
def test_the_most_probable_come_first_and_of_equals_the_label_then_the_lower_number(found, top):
    best = [each["label"] for each in Columns("label", None, top).of(Row("a", found, None, None))["top"]]
    of = found.probabilities or ()
    assert best == sorted(range(len(of)), key=lambda n: (-of[n], n != found.label, n))[:top]
    assert best[0] == found.label


def test_a_row_counts_the_same_when_it_is_read_back():
    rows = [
        Row("a", Prediction.of(label=1, probabilities=(0.25, 0.75)), 1, None),
        Row("b", Prediction.of(label=0, probabilities=(0.5, 0.5)), 1, None),
        Row("c", Prediction.of(label=0, probabilities=(0.5, 0.5)), None, None),
        Row("d", None, 1, "why"),
    ]
    made, written, columns = Tally(), Tally(), Columns("label", None, 5)
    for row in rows:
        made.add(row)
        written.add_written(json.loads(columns.line(row)))
    assert made == written
    assert (made.num_rows, made.num_bad, made.num_known, made.num_correct) == (4, 1, 2, 1)


# --- pixels that are decoded already


def test_pixels_are_the_input_that_their_png_is_decoded_to(forms, digits):
    predictor = load_predictor(forms / "model.pt")
    items = list(find_inputs(Wanted("digits")).items())[:5]
    for (_, found, _), item in zip(decode_all(items, predictor), items, strict=True):
        data, name = content_of(item, takes_texts=False)
        assert data.startswith(b"\x89PNG")
        assert not isinstance(found, str)
        assert np.array_equal(found, predictor.decode(data, name))
        assert np.array_equal(found, digits.pixels[int(item.name)])


def test_pixels_of_another_size_go_the_way_of_an_image_file(forms):
    predictor = load_predictor(forms / "model.pt")
    large = Item("a", Pixels(np.full((56, 56), 7, np.uint8)), None, 1.0)
    [(_, found, _)] = decode_all([large], predictor)
    assert not isinstance(found, str)
    assert found.tolist() == [[7] * 28] * 28


def test_an_item_of_a_dataset_is_sent_to_another_machine_alone(digits):
    """Not with all images of its dataset."""
    item = next(find_inputs(Wanted("digits")).items())
    assert len(pickle.dumps(item)) < 28 * 28 + 1000

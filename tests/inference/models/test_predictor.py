from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

import ckpt_tools
from ckpt_tools.errors import FormatError, UsageError
from inference.models.predictor import Predictor, TensorSpec, load_predictor
from inference.models.results import Prediction
from tests.inference.conftest import FORMS

Weights = dict[str, Tensor]


@pytest.fixture(scope="module")
def predictor(forms):
    return load_predictor(forms / "model.safetensors", labels=[f"digit {number}" for number in range(10)])


def test_a_predictor_says_what_goes_in_and_what_comes_out(predictor):
    assert predictor.inputs == (TensorSpec("image", "UINT8", (-1, 28, 28)),)
    assert predictor.outputs == (TensorSpec("label", "INT64", (-1,)), TensorSpec("probabilities", "FP32", (-1, 10)))
    assert (predictor.name, predictor.max_batch, predictor.is_exact) == ("model", 30, True)
    assert predictor.labels is not None
    assert predictor.labels[3] == "digit 3"


def in_company(predictor: Predictor, images: Sequence[Tensor], number: int) -> list[Prediction]:
    """The answer for one image: alone, first, last, in the middle of few and of many."""
    image, others = images[number], [*images[:number], *images[number + 1 :]]
    orders = [([image], 0), ([image, *others], 0), ([*others[:29], image], 29), ([*others[:3], image, *others[3:9]], 3)]
    return [predictor.predict(order)[place] for order, place in orders]


def test_company_changes_no_bit_of_an_answer(predictor, digits):
    images = list(digits.pixels[:40])
    for number in (0, 7, 33):
        answers = in_company(predictor, images, number)
        assert answers == [answers[0]] * 4


def test_a_fast_predictor_says_that_it_is_not_exact(forms, digits, predictor):
    fast = load_predictor(forms / "model.pt", exact="off")
    assert not fast.is_exact
    images = list(digits.pixels[:33])
    for ours, exact in zip(fast.predict(images), predictor.predict(images), strict=True):
        assert ours.probabilities == pytest.approx(exact.probabilities, abs=1e-5)


def test_the_digest_is_of_the_weights_whatever_their_format(forms, tmp_path):
    ckpt_tools.convert(forms / "model.pt", tmp_path / "zero", to="zero3", world_size=3)
    found = [load_predictor(path).identity for path in (*(forms / form for form in FORMS), tmp_path / "zero")]
    assert {identity.digest for identity in found} == {found[0].digest}
    assert (found[-1].format, found[-1].world_size) == ("zero3", 3)
    assert found[-1].source == str(tmp_path / "zero")


def test_the_digest_tells_one_bit_apart(forms, weights, tmp_path):
    changed = {name: tensor.clone() for name, tensor in weights.items()}
    changed["encoder.ln.bias"].view(torch.int32)[0] ^= 1
    torch.save(changed, tmp_path / "changed.pt")
    of = [load_predictor(path).identity.digest for path in (forms / "model.pt", tmp_path / "changed.pt")]
    assert of[0] != of[1]


def test_no_input_has_no_answer(predictor):
    assert predictor.predict([]) == []


@pytest.mark.parametrize("wrong", [torch.zeros(28, 28), torch.zeros(28, 27, dtype=torch.uint8)])
def test_an_input_of_another_form_is_refused(wrong, predictor):
    with pytest.raises(FormatError, match=r"input 1 is .*; the model takes uint8 \[28, 28\]"):
        predictor.predict([torch.zeros(28, 28, dtype=torch.uint8), wrong])


def test_bytes_become_an_input(predictor, image_folder, digits):
    found = predictor.decode((image_folder / "000.png").read_bytes(), "000.png")
    assert np.array_equal(found, digits.pixels[0])
    with pytest.raises(FormatError, match=r"^x\.png is not an image file that can be read$"):
        predictor.decode(b"text", "x.png")


def test_labels_have_to_fit(forms):
    with pytest.raises(UsageError, match="3 labels for the model's 10 classes"):
        load_predictor(forms / "model.pt", labels=["a", "b", "c"])


def test_the_limit_of_pixels_can_be_set(forms, image_folder):
    data = (image_folder / "000.png").read_bytes()
    assert load_predictor(forms / "model.pt", max_pixels=784).decode(data, "a.png").shape == (28, 28)  # type: ignore[union-attr]
    with pytest.raises(FormatError, match=r"^a\.png has 28x28 pixels, more than 783 in all$"):
        load_predictor(forms / "model.pt", max_pixels=783).decode(data, "a.png")
    with pytest.raises(UsageError, match="at least one pixel"):
        load_predictor(forms / "model.pt", max_pixels=0)

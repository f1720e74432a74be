"""Predictors: what goes in and comes out, whose weights answer, and that neither company, nor the size of a forward
pass, nor the memory layout of an input changes a bit of an answer."""

import io
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from torch import Tensor, nn

import ckpt_tools
from inference.models.passes import ForwardPasses, find_agreeing_sizes
from inference.models.predictor import Predictor, TensorSpec, load_predictor
from inference.models.results import Prediction
from inference.models.tensors import TensorTask
from tests.inference.conftest import FORMS
from tests.inference.tiny_models import save_text_model
from training.models.image_models import build_model


def test_a_predictor_says_what_goes_in_and_what_comes_out(forms):
    predictor = load_predictor(forms / "model.pt", labels=[f"digit {number}" for number in range(10)])
    assert predictor.inputs == (TensorSpec("image", "UINT8", (-1, 28, 28)),)
    assert predictor.outputs == (TensorSpec("label", "INT64", (-1,)), TensorSpec("probabilities", "FP32", (-1, 10)))
    assert (predictor.name, predictor.max_batch, predictor.is_exact) == ("model", 30, True)
    assert predictor.labels is not None
    assert predictor.labels[3] == "digit 3"
    assert predictor.predict([]) == []


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


def test_the_digest_is_of_the_weights_whatever_their_format_and_tells_one_bit_apart(forms, weights, tmp_path):
    ckpt_tools.convert(forms / "model.pt", tmp_path / "zero", to="zero3", world_size=3)
    found = [load_predictor(path).identity for path in (*(forms / form for form in FORMS), tmp_path / "zero")]
    assert {identity.digest for identity in found} == {found[0].digest}
    assert (found[-1].format, found[-1].world_size) == ("zero3", 3)
    assert found[-1].source == str(tmp_path / "zero")
    changed = {name: tensor.clone() for name, tensor in weights.items()}
    changed["encoder.ln.bias"].view(torch.int32)[0] ^= 1
    torch.save(changed, tmp_path / "changed.pt")
    assert load_predictor(tmp_path / "changed.pt").identity.digest != found[0].digest


# --- sizes of forward passes: those that give the bits of the full pass are found and used, others are not


class Forward:
    """Twice each row; of passes of the sizes in ``odd``, the last row is one bit off."""

    def __init__(self, *odd: int) -> None:
        self.odd, self.sizes = odd, list[int]()

    def __call__(self, rows: Tensor) -> Tensor:
        self.sizes.append(len(rows))
        found = rows * 2.0
        if len(rows) in self.odd:
            found[-1].view(torch.int32)[0] ^= 1
        return found


def random(many: int) -> Tensor:
    return torch.ones(many, 3)


def rows(many: int) -> Tensor:
    return torch.arange(3.0 * many).reshape(many, 3)


@pytest.mark.parametrize(
    ("odd", "sizes"),
    [((), (1, 2, 4, 8, 16, 30)), ((1,), (2, 4, 8, 16, 30)), ((2, 16), (1, 4, 8, 30)), ((1, 2, 4, 8, 16), (30,))],
)
def test_sizes_with_other_bits_are_left_out(odd, sizes):
    assert find_agreeing_sizes(Forward(*odd), random(30)) == sizes


def test_a_nan_and_a_negative_zero_are_compared_by_their_bits():
    assert find_agreeing_sizes(lambda given: given * float("nan"), random(2)) == (1, 2)
    assert find_agreeing_sizes(lambda given: given * (0.0 if len(given) > 1 else -0.0), random(2)) == (2,)


@pytest.mark.parametrize(
    ("exact", "passes"),
    [("buckets", [2, 2, 4, 30, 30, 8]), ("full", [30] * 6), ("off", [1, 2, 3, 17, 30, 7])],
)
def test_a_pass_is_filled_to_the_next_size(exact, passes):
    chosen, forward = ForwardPasses(30, exact), Forward(1, 16)  # type: ignore[arg-type]
    chosen.run(rows(1), forward, random)
    forward.sizes.clear()
    for many in (1, 2, 3, 17, 37):
        assert torch.equal(chosen.run(rows(many), Forward(1, 16), random), rows(many) * 2) or exact == "off"
        chosen.run(rows(many), forward, random)
    assert forward.sizes == passes


def test_sizes_are_measured_for_each_shape():
    passes = ForwardPasses(4, "buckets")
    passes.run(torch.ones(1, 3), Forward(), random)
    passes.run(torch.ones(1, 2, 5), Forward(1), lambda many: torch.ones(many, 2, 5))
    assert passes.sizes == {"3": (1, 2, 4), "2x5": (2, 4)}


def test_a_model_that_refuses_random_rows_has_full_passes():
    def forward(given: Tensor) -> Tensor:
        if given.sum() > 0:
            raise ValueError("not these")
        return given

    passes = ForwardPasses(4, "buckets")
    passes.run(torch.zeros(1, 3), forward, random)
    assert passes.sizes == {"3": (4,)}


def test_answers_in_buckets_have_the_bits_of_full_passes(predictor, forms, digits):
    full, buckets = predictor, load_predictor(forms / "model.pt", exact="buckets")
    for many in (1, 3, 9, 31):
        images = list(digits.pixels[:many])
        assert buckets.predict(images) == full.predict(images)
    assert buckets.batch_sizes["28x28"][-1] == 30
    assert full.batch_sizes == {"28x28": (30,)}


# --- memory layouts: the service gets an input from another process, row by row

NET = """
from torch import nn

inputs = {"image": ("FP32", [-1, 3, 40, 24])}


def net():
    return nn.Sequential(nn.Conv2d(3, 32, 5, padding=2), nn.GELU(), nn.Conv2d(32, 8, 3), nn.AdaptiveAvgPool2d(1))
"""


def ours(folder: Path) -> Predictor:
    torch.save(build_model().state_dict(), folder / "m.pt")
    return load_predictor(folder / "m.pt")


def of_timm(folder: Path) -> Predictor:
    torch.save(timm.create_model("test_resnet", num_classes=5).state_dict(), folder / "m.pt")
    return load_predictor(folder / "m.pt", architecture="timm:test_resnet?num_classes=5")


def own(folder: Path) -> Predictor:
    (folder / "strided_net.py").write_text(NET)
    made = nn.Sequential(nn.Conv2d(3, 32, 5, padding=2), nn.GELU(), nn.Conv2d(32, 8, 3), nn.AdaptiveAvgPool2d(1))
    torch.save(made.state_dict(), folder / "m.pt")
    return load_predictor(folder / "m.pt", architecture=f"{folder}/strided_net.py:net")


KINDS: dict[str, Callable[[Path], Predictor]] = {
    "ours": ours,
    "timm": of_timm,
    "transformers-texts": lambda folder: load_predictor(save_text_model(folder)),
    "own": own,
}


def item_of(predictor: Predictor) -> np.ndarray:
    """An input as files of the batch command give it, or a row of a tensor."""
    spec = predictor.inputs[0]
    if spec.datatype == "BYTES":
        return np.asarray(predictor.decode(b"the film was very good", "a text"))
    pixels = np.random.default_rng(0).integers(256, size=(60, 50, 3), dtype=np.uint8)
    if isinstance(predictor.task, TensorTask):
        return np.random.default_rng(0).standard_normal(spec.shape[1:]).astype(np.float32)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return np.asarray(predictor.decode(stream.getvalue(), "an image"))


@pytest.mark.parametrize("kind", KINDS)
def test_the_layout_of_an_input_changes_no_bit(kind, tmp_path):
    torch.manual_seed(0)
    predictor = KINDS[kind](tmp_path)
    item = item_of(predictor)
    row_major = np.array(item, order="C")
    layouts = [item, np.array(item, order="F")]
    if item.ndim == 3:
        layouts.append(np.ascontiguousarray(item.transpose(1, 2, 0)).transpose(2, 0, 1))
        assert not layouts[-1].flags.c_contiguous
    [expected] = predictor.predict([row_major])
    for layout in layouts:
        for found in (predictor.predict([layout])[0], predictor.predict([row_major, layout])[1]):
            for name, values in expected.columns.items():
                assert np.asarray(found[name]).tobytes() == np.asarray(values).tobytes(), (layout.strides, name)

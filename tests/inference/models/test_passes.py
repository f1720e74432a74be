"""Sizes of forward passes: those that give the bits of the full pass are found and used, others are not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ckpt_tools.errors import UsageError
from inference.models.passes import Passes, agreeing
from inference.models.predictor import load_predictor

pytestmark = pytest.mark.quick


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
    assert agreeing(Forward(*odd), random(30)) == sizes


def test_a_nan_and_a_negative_zero_are_compared_by_their_bits():
    assert agreeing(lambda given: given * float("nan"), random(2)) == (1, 2)
    assert agreeing(lambda given: given * (0.0 if len(given) > 1 else -0.0), random(2)) == (2,)


@pytest.mark.parametrize(
    ("exact", "passes"),
    [("buckets", [2, 2, 4, 30, 30, 8]), ("full", [30] * 6), ("off", [1, 2, 3, 17, 30, 7])],
)
def test_a_pass_is_filled_to_the_next_size(exact, passes):
    chosen, forward = Passes(30, exact), Forward(1, 16)  # type: ignore[arg-type]
    chosen.run(rows(1), forward, random)
    forward.sizes.clear()
    for many in (1, 2, 3, 17, 37):
        assert torch.equal(chosen.run(rows(many), Forward(1, 16), random), rows(many) * 2) or exact == "off"
        chosen.run(rows(many), forward, random)
    assert forward.sizes == passes


def test_sizes_are_measured_for_each_shape():
    passes = Passes(4, "buckets")
    passes.run(torch.ones(1, 3), Forward(), random)
    passes.run(torch.ones(1, 2, 5), Forward(1), lambda many: torch.ones(many, 2, 5))
    assert passes.sizes == {"3": (1, 2, 4), "2x5": (2, 4)}


def test_a_model_that_refuses_random_rows_has_full_passes():
    def forward(given: Tensor) -> Tensor:
        if given.sum() > 0:
            raise ValueError("not these")
        return given

    passes = Passes(4, "buckets")
    passes.run(torch.zeros(1, 3), forward, random)
    assert passes.sizes == {"3": (4,)}


def test_answers_in_buckets_have_the_bits_of_full_passes(forms, digits):
    full, buckets = (load_predictor(forms / "model.pt", exact=each) for each in ("full", "buckets"))
    for many in (1, 2, 3, 5, 9, 17, 29, 31):
        images = list(digits.pixels[:many])
        assert buckets.predict(images) == full.predict(images)
    assert buckets.batch_sizes["28x28"][-1] == 30
    assert full.batch_sizes == {"28x28": (30,)}


def test_another_largest_pass(forms):
    predictor = load_predictor(forms / "model.pt", exact="buckets", max_batch=6)
    assert (predictor.max_batch, predictor.batch_sizes["28x28"][-1]) == (6, 6)
    with pytest.raises(UsageError, match="at least one row, not 0"):
        load_predictor(forms / "model.pt", max_batch=0)
    with pytest.raises(UsageError, match="exact is buckets, full or off, not sometimes"):
        load_predictor(forms / "model.pt", exact="sometimes")  # type: ignore[arg-type]

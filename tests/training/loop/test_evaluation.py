from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

from ckpt_tools.errors import UsageError
from tests.training.predictions import all_logits
from training.data.datasets import Samples
from training.loop.evaluation import CHUNK, PREDICTED, Evaluation, Evaluator, metrics_of, padded
from training.models.losses import standard_loss, standard_metrics

CPU = torch.device("cpu")


def numbered_images(count: int) -> Samples:
    """Image ``i`` is grey level ``i`` and has the label ``i % 10``."""
    numbers = torch.arange(count)
    return Samples(numbers.to(torch.uint8)[:, None, None].expand(count, 28, 28).contiguous(), numbers % 10)


def last_digit_logits(images: Tensor) -> Tensor:
    """A model that is right about :func:`numbered_images`, except that it takes every 0 for a 1."""
    assert images.shape == (CHUNK, 1, 28, 28)
    digits = (images[:, 0, 0, 0].add(1).mul(127.5).round().long() % 10).clamp(min=1)
    return torch.nn.functional.one_hot(digits, 10).float()


class Numbers(Dataset[Any]):
    """Samples of a user's: the number itself."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, float]:
        return {"x": float(index)}


def parts_of(dataset: Dataset[Any], model: Callable[..., Any], loss: Any, world_size: int) -> list[dict[str, Tensor]]:
    """Rows of each rank; all ranks make the same number of forward passes."""
    parts, num_passes = [], []
    for rank in range(world_size):
        passes: list[Any] = []

        def evaluated(metrics: Any, batch: Any, passes: list[Any] = passes) -> Mapping[str, Tensor]:
            passes.append(batch)
            return metrics(model, batch)

        parts.append(Evaluator(dataset, metrics_of(None, loss), CHUNK, CPU, rank, world_size).rows(evaluated))
        num_passes.append(len(passes))
    assert len(set(num_passes)) == 1, "ranks would wait for each other for ever"
    return parts


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("count", [1, CHUNK, CHUNK + 7, 4 * CHUNK, 360])
def test_every_sample_counts_once_over_ranks(world_size, count):
    parts = parts_of(numbered_images(count), last_digit_logits, standard_loss, world_size)
    found = {name: torch.stack([part[name] for part in parts]).sum(0) for name in parts[0]}
    expected = [max(number % 256 % 10, 1) for number in range(count)]
    assert found[PREDICTED].tolist() == expected
    assert found["accuracy"].tolist() == [float(one == number % 10) for number, one in enumerate(expected)]


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_loss_of_the_users_is_a_mean_over_samples(world_size):
    """The last pass is smaller, and counts as many samples as it has."""
    count = CHUNK + 7
    parts = parts_of(Numbers(count), torch.nn.Identity(), lambda model, batch: model(batch["x"]).mean(), world_size)
    assert float(torch.stack([part["loss"] for part in parts]).sum(0).mean()) == pytest.approx((count - 1) / 2)


def test_of_ranks_that_compute_the_same_one_counts():
    metrics = partial(standard_metrics, loss=standard_loss)
    rows = Evaluator(numbered_images(3), metrics, CHUNK, CPU, 0, 1, counts=False).rows(
        lambda found, batch: found(last_digit_logits, batch)
    )
    assert not rows[PREDICTED].any()


@pytest.mark.parametrize("count", [1, CHUNK, CHUNK + 1, 3 * CHUNK])
def test_logits_come_in_order_without_padding(count):
    images = numbered_images(count)
    predicted = all_logits(last_digit_logits, images.pixels).argmax(1)
    assert predicted.tolist() == [max(number % 10, 1) for number in range(count)]


def test_padding_repeats_the_last_image():
    chunk = numbered_images(3).pixels
    assert padded(chunk)[:, 0, 0].tolist() == [0, 1, *[2] * (CHUNK - 2)]


def test_accuracy_is_correct_over_total():
    assert Evaluation({"accuracy": 0.75}, 4, (1, 2, 3, 4)).correct == 3
    assert Evaluation({"loss": 1.0}).accuracy is None


def metrics_of_the_user(model: Any, batch: Any) -> dict[str, Tensor]:
    return {"double": 2 * model(batch["x"])}


def test_own_metrics_come_beside_the_loss():
    found = metrics_of(metrics_of_the_user, lambda model, batch: batch["x"].mean())(
        torch.nn.Identity(), {"x": torch.arange(3.0)}
    )
    assert {name: value.tolist() for name, value in found.items()} == {"loss": 1.0, "double": [0.0, 2.0, 4.0]}
    wrong = metrics_of(lambda model, batch: 1.0, lambda model, batch: batch.mean())
    with pytest.raises(UsageError, match="gives something else than tensors by name"):
        wrong(torch.nn.Identity(), torch.arange(3.0))

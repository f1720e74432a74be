from __future__ import annotations

import pytest
import torch
from torch import Tensor

from training.data.datasets import LabelledImages
from training.loop.evaluation import CHUNK, Evaluation, all_logits, evaluation_of, padded, rank_predictions


def numbered_images(count: int) -> LabelledImages:
    """Image ``i`` is grey level ``i`` and has the label ``i % 10``."""
    numbers = torch.arange(count)
    return LabelledImages(numbers.to(torch.uint8)[:, None, None].expand(count, 28, 28).contiguous(), numbers % 10)


def last_digit_logits(images: Tensor) -> Tensor:
    """A model that is right about :func:`numbered_images`, except that it takes every 0 for a 1."""
    assert images.shape == (CHUNK, 1, 28, 28)
    digits = (images[:, 0, 0, 0].add(1).mul(127.5).round().long() % 10).clamp(min=1)
    return torch.nn.functional.one_hot(digits, 10).float()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("count", [1, CHUNK, CHUNK + 7, 4 * CHUNK, 360])
def test_every_sample_counts_once_over_ranks(world_size: int, count: int) -> None:
    parts, num_passes = [], []
    for rank in range(world_size):
        passes: list[Tensor] = []

        def counted(images: Tensor, passes: list[Tensor] = passes) -> Tensor:
            passes.append(images)
            return last_digit_logits(images)

        pixels = numbered_images(count).pixels
        parts.append(rank_predictions(counted, pixels, torch.device("cpu"), rank=rank, world_size=world_size))
        num_passes.append(len(passes))
    assert torch.stack(parts).sum(0).tolist() == [max(number % 256 % 10, 1) for number in range(count)]
    assert len(set(num_passes)) == 1, "ranks would wait for each other for ever"


@pytest.mark.parametrize("count", [1, CHUNK, CHUNK + 1, 3 * CHUNK])
def test_logits_come_in_order_without_padding(count: int) -> None:
    images = numbered_images(count)
    predicted = all_logits(last_digit_logits, images.pixels).argmax(1)
    assert predicted.tolist() == [max(number % 10, 1) for number in range(count)]


def test_padding_repeats_the_last_image() -> None:
    chunk = numbered_images(3).pixels
    assert padded(chunk)[:, 0, 0].tolist() == [0, 1, *[2] * (CHUNK - 2)]


def test_accuracy_is_correct_over_total() -> None:
    found = evaluation_of(torch.tensor([1, 2, 3, 4]), torch.tensor([1, 2, 0, 4]))
    assert found == Evaluation(3, 4, (1, 2, 3, 4))
    assert found.accuracy == 0.75

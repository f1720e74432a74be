from __future__ import annotations

import struct

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from torchvision.datasets import FashionMNIST

from ckpt_tools.errors import StoreError, UsageError
from training.data.datasets import DIGITS_HELD_OUT, DIGITS_SPLIT_SEED, Part, _upscale, load_dataset, to_input
from training.data.loading import epoch_order, rank_batches


def test_digits_split_is_fixed_and_complete():
    train, held_out = (load_dataset("digits", part, None) for part in ("train", "held-out"))
    assert (len(train), len(held_out)) == (1437, 360)
    assert held_out.labels[:12].tolist() == load_dataset("digits", "held-out", None).labels[:12].tolist()


def test_digits_are_those_of_scikit_learn_bit_for_bit():
    """Their file is read without its module."""
    source = load_digits()
    order = np.random.RandomState(DIGITS_SPLIT_SEED).permutation(len(source.target))
    parts: dict[Part, NDArray[np.int64]] = {"held-out": order[:DIGITS_HELD_OUT], "train": order[DIGITS_HELD_OUT:]}
    for part, chosen in parts.items():
        found = load_dataset("digits", part, None)
        assert torch.equal(found.labels, torch.from_numpy(source.target[chosen]))
        assert torch.equal(found.pixels, _upscale(torch.from_numpy(source.images[chosen])))


def test_no_image_is_in_both_parts():
    train, held_out = (load_dataset("digits", part, None).pixels.flatten(1) for part in ("train", "held-out"))
    known = {bytes(row.tolist()) for row in train}
    assert not known & {bytes(row.tolist()) for row in held_out}


def test_upscaling_keeps_black_white_and_the_mean():
    pixels = load_dataset("digits", "train", None).pixels
    assert (int(pixels.min()), int(pixels.max())) == (0, 255)
    source = torch.from_numpy(load_digits().images).mean() * 255 / 16
    assert float(pixels.double().mean()) == pytest.approx(float(source), rel=0.02)


def test_input_is_in_minus_one_to_one():
    pixels = torch.zeros(2, 28, 28, dtype=torch.uint8)
    pixels[1] = 255
    values = to_input(pixels)
    assert values.shape == (2, 1, 28, 28)
    assert values.dtype == torch.float32
    assert values[0].unique().tolist() == [-1.0]
    assert values[1].unique().tolist() == [1.0]


def test_order_depends_on_epoch_and_seed_alone():
    assert epoch_order(50, 3, 7).tolist() == epoch_order(50, 3, 7).tolist()
    assert epoch_order(50, 3, 7).tolist() != epoch_order(50, 4, 7).tolist()
    assert sorted(epoch_order(50, 3, 7).tolist()) == list(range(50))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_ranks_share_out_the_same_global_batches_at_every_world_size(world_size):
    order = epoch_order(100, 0, 0)
    shares = [list(rank_batches(order, 12, rank, world_size)) for rank in range(world_size)]
    batches = [torch.cat(parts).tolist() for parts in zip(*shares, strict=True)]
    assert batches == [order[start : start + 12].tolist() for start in range(0, 96, 12)]
    assert {len(batch) for share in shares for batch in share} == {12 // world_size}


def test_fashion_mnist_needs_a_root():
    with pytest.raises(UsageError, match="needs --data-root"):
        load_dataset("fashion-mnist", "train", None)


def test_fashion_mnist_that_cannot_be_downloaded_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(FashionMNIST, "mirrors", ["http://127.0.0.1:9/"])
    with pytest.raises(
        StoreError, match=r"could not be downloaded .*; copy its four \.gz files into .* or use"
    ) as error:
        load_dataset("fashion-mnist", "train", tmp_path)
    assert "\n" not in str(error.value)


def test_fashion_mnist_is_read_where_it_lies(tmp_path):
    raw = tmp_path / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    for prefix, count in (("train", 5), ("t10k", 3)):
        pixels = bytes(value % 256 for value in range(count * 784))
        (raw / f"{prefix}-images-idx3-ubyte").write_bytes(struct.pack(">4i", 2051, count, 28, 28) + pixels)
        (raw / f"{prefix}-labels-idx1-ubyte").write_bytes(struct.pack(">2i", 2049, count) + bytes(range(count)))
    train, held_out = (load_dataset("fashion-mnist", part, tmp_path) for part in ("train", "held-out"))
    assert train.labels.tolist() == [0, 1, 2, 3, 4]
    assert held_out.labels.tolist() == [0, 1, 2]
    assert train.pixels[0, 0, :3].tolist() == [0, 1, 2]

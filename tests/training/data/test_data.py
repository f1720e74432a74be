"""Datasets, a user's own images and a user's own dataset: the same samples in the same order at any world size, resumed
or not, loaded here or by a process of their own."""

import json
import random
import struct
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from numpy.typing import NDArray
from PIL import Image
from sklearn.datasets import load_digits
from torch.utils.data import Dataset, IterableDataset

from inference.batch import __main__ as batch
from tests.training.jobs import result_of, tiny_config, train_each
from training.__main__ import main
from training.config.model_names import NUM_CLASSES
from training.config.train_config import TrainConfig
from training.data.datasets import DIGITS_HELD_OUT, DIGITS_SPLIT_SEED, Part, _upscale_digits, load_dataset
from training.data.loading import Batches, EpochPosition, epoch_order, rank_batches


def test_digits_are_those_of_scikit_learn_bit_for_bit():
    """Their file is read without its module."""
    source = load_digits()
    order = np.random.RandomState(DIGITS_SPLIT_SEED).permutation(len(source.target))
    parts: dict[Part, NDArray[np.int64]] = {"held-out": order[:DIGITS_HELD_OUT], "train": order[DIGITS_HELD_OUT:]}
    for part, chosen in parts.items():
        found = load_dataset("digits", part, None)
        assert len(found) == {"train": 1437, "held-out": 360}[part]
        assert torch.equal(found.labels, torch.from_numpy(source.target[chosen]))
        assert torch.equal(found.pixels, _upscale_digits(torch.from_numpy(source.images[chosen])))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_ranks_share_out_the_same_global_batches_at_every_world_size(world_size):
    order = epoch_order(100, 0, 0)
    shares = [list(rank_batches(order, 12, rank, world_size)) for rank in range(world_size)]
    batches = [torch.cat(parts).tolist() for parts in zip(*shares, strict=True)]
    assert batches == [order[start : start + 12].tolist() for start in range(0, 96, 12)]
    assert {len(batch) for share in shares for batch in share} == {12 // world_size}


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


CLASSES = ("ant", "bee", "cat")


def folder_of(root: Path, part: str, name: str, count: int, level: int) -> None:
    """Colour images of 40x36 whose grey is about ``level``, with a pattern of their own."""
    folder = root / part / name
    folder.mkdir(parents=True)
    for number in range(count):
        noise = torch.randint(-9, 10, (36, 40, 3), generator=torch.Generator().manual_seed(number))
        Image.fromarray((noise + level).to(torch.uint8).numpy()).save(folder / f"{number:02d}.png")


@pytest.fixture
def root(tmp_path):
    root = tmp_path / "images"
    for part, count in (("train", 12), ("held-out", 3)):
        for number, name in enumerate(CLASSES):
            folder_of(root, part, name, count, 40 + 80 * number)
    return root


def test_a_run_predicts_the_classes_of_the_folder(root, tmp_path):
    """As inference does on the same files, with the same names."""
    config = tiny_config(tmp_path / "run", strategy="ddp", model="cnn", dataset="image-folder", data_root=root, until=1)
    train_each(config)
    run = result_of(config)
    assert (run.total, len(run.history[0].losses)) == (3 * len(CLASSES), 2)
    args = [f"--model={run.checkpoint}", f"--input={root / 'held-out'}", f"--output={tmp_path / 'rows.jsonl'}"]
    done = CliRunner().invoke(batch.main, args)
    assert done.exit_code == 0, done.output
    lines = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    rows = sorted(lines, key=lambda row: row["name"])
    labels = (*CLASSES, *map(str, range(len(CLASSES), NUM_CLASSES)))
    assert [row["top"][0]["name"] for row in rows] == [labels[n] for n in run.predicted]


def test_an_image_that_cannot_be_read_is_refused_before_the_run(root, tmp_path):
    (root / "train/bee/03.png").write_bytes((root / "train/bee/03.png").read_bytes()[:200])
    args = ["--strategy=ddp", "--dataset=image-folder", f"--data-root={root}", f"--out={tmp_path / 'run'}"]
    done = CliRunner().invoke(main, [*args, "--launcher=torchrun", "--batch-size=16"])
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1), done.output
    assert "train/bee/03.png cannot be read as an image: " in done.stderr
    assert not (tmp_path / "run").exists()


CPU = torch.device("cpu")
SIZE, STEPS = 8, 4


def drawn() -> list[float]:
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]


class Numbers(Dataset[Any]):
    """Each sample is its number, and what three generators give for it."""

    def __len__(self) -> int:
        return SIZE * STEPS + 3

    def __getitem__(self, index: int) -> list[float]:
        return [float(index), *drawn()]

    @staticmethod
    def collate_fn(samples: list[list[float]]) -> dict[str, torch.Tensor]:
        return {"rows": torch.tensor(samples, dtype=torch.float64)}


class Endless(IterableDataset[Any]):
    """The same without an end and without a state."""

    collate_fn = staticmethod(Numbers.collate_fn)
    epoch = 0
    at = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[float]]:
        number = 0
        while True:
            yield [self.epoch * 1000.0 + number, *drawn()]
            number += 1


class WithState(Endless):
    """The same with a state: the samples before it are not read again."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def __iter__(self) -> Iterator[list[float]]:
        while True:
            self.at += 1
            self.read.append(self.at)
            yield [self.epoch * 1000.0 + self.at - 1, *drawn()]

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def config_of(**values: Any) -> TrainConfig:
    steps = {} if values.get("dataset") is Numbers else {"epoch_steps": STEPS}
    return TrainConfig(out=Path("/run"), strategy="ddp", batch_size=SIZE, num_workers=4, **(steps | values))


def rows_of(
    dataset: Any, config: TrainConfig, start: EpochPosition, rank: int = 0, world_size: int = 1
) -> list[tuple[list[list[float]], str | None]]:
    """Rows of each batch of this rank to the end of an epoch, with the state after it."""
    batches = Batches(config, dataset, rank, world_size, CPU).iterate_epoch(start)
    return [(batch["rows"].tolist(), state) for batch, state in islice(batches, STEPS - start.batch)]


@pytest.mark.parametrize("kind", [Numbers, Endless, WithState])
@pytest.mark.parametrize(("world_size", "loader_workers"), [(1, 1), (2, 0), (4, 0)])
def test_samples_and_their_random_numbers_do_not_depend_on_the_workers(kind, world_size, loader_workers):
    config = config_of(dataset=kind, loader_workers=loader_workers)
    for epoch in (0, 1):
        whole = [rows for rows, _ in rows_of(kind(), config_of(dataset=kind), EpochPosition(epoch))]
        ranks = [rows_of(kind(), config, EpochPosition(epoch), rank, world_size) for rank in range(world_size)]
        assert [[row for rows, _ in parts for row in rows] for parts in zip(*ranks, strict=True)] == whole
        assert len({row[0] for rows in whole for row in rows}) == SIZE * STEPS


@pytest.mark.parametrize("kind", [Numbers, Endless, WithState])
@pytest.mark.parametrize("loader_workers", [0, 1])
def test_an_epoch_goes_on_with_the_next_batch(kind, loader_workers):
    config = config_of(dataset=kind, loader_workers=loader_workers)
    whole = rows_of(kind(), config, EpochPosition(1))
    state = whole[1][1]
    assert (state is None) == (kind is not WithState)
    assert rows_of(kind(), config, EpochPosition(1, 2, state)) == whole[2:]


def test_a_stream_with_a_state_begins_there():
    dataset = WithState()
    rows_of(dataset, config_of(dataset=WithState), EpochPosition(0, 3, '{"at": 24}'))
    assert dataset.read == [*range(25, 33)]

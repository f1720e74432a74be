"""Samples of a user's dataset: the same ones in the same order at any world size, resumed or not, loaded here or by a
process of their own."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from ckpt_tools.errors import UsageError
from training.config.train_config import TrainConfig
from training.data.loading import Batches, Position, dataset_of, state_of

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
    dataset: Any, config: TrainConfig, start: Position, rank: int = 0, world_size: int = 1
) -> list[tuple[list[list[float]], str | None]]:
    """Rows of each batch of this rank to the end of an epoch, with the state after it."""
    batches = Batches(config, dataset, rank, world_size, CPU).epoch(start)
    return [(batch["rows"].tolist(), state) for batch, state in islice(batches, STEPS - start.batch)]


@pytest.mark.parametrize("kind", [Numbers, Endless, WithState])
@pytest.mark.parametrize(("world_size", "loader_workers"), [(1, 1), (2, 0), (4, 0)])
def test_samples_and_their_random_numbers_do_not_depend_on_the_workers(kind, world_size, loader_workers):
    config = config_of(dataset=kind, loader_workers=loader_workers)
    for epoch in (0, 1):
        whole = [rows for rows, _ in rows_of(kind(), config_of(dataset=kind), Position(epoch))]
        ranks = [rows_of(kind(), config, Position(epoch), rank, world_size) for rank in range(world_size)]
        assert [[row for rows, _ in parts for row in rows] for parts in zip(*ranks, strict=True)] == whole
        assert len({row[0] for rows in whole for row in rows}) == SIZE * STEPS


@pytest.mark.parametrize("kind", [Numbers, Endless, WithState])
@pytest.mark.parametrize("loader_workers", [0, 1])
def test_an_epoch_goes_on_with_the_next_batch(kind, loader_workers):
    config = config_of(dataset=kind, loader_workers=loader_workers)
    whole = rows_of(kind(), config, Position(1))
    state = whole[1][1]
    assert (state is None) == (kind is not WithState)
    assert rows_of(kind(), config, Position(1, 2, state)) == whole[2:]


def test_a_stream_with_a_state_begins_there():
    dataset = WithState()
    rows_of(dataset, config_of(dataset=WithState), Position(0, 3, '{"at": 24}'))
    assert dataset.read == [*range(25, 33)]


def test_each_epoch_begins_with_the_first_state():
    """Whether the process that reads has read an epoch before or not."""
    batches = Batches(config_of(dataset=WithState), WithState(), 0, 1, CPU)
    for epoch in (0, 1):
        first, _ = next(batches.epoch(Position(epoch)))
        assert first["rows"][:, 0].tolist() == [epoch * 1000.0 + number for number in range(SIZE)]


class HalfAState(Endless):
    def state_dict(self) -> dict[str, Any]:
        return {"at": object()}


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"dataset": lambda part: HalfAState()}, "both state_dict and load_state_dict, or neither"),
        ({"dataset": lambda part: Endless(), "loader_workers": 2}, "--loader-workers is at most 1"),
        ({"dataset": lambda part: Endless(), "num_samples": 8}, "--num-samples is for a dataset with a length"),
        ({"dataset": lambda part: None}, "gives NoneType for train"),
        ({"dataset": lambda part: Numbers(), "dataset_arg": ("size=3",)}, "unexpected keyword argument 'size'"),
    ],
)
def test_a_dataset_that_cannot_be_used_is_refused(values, sentence):
    with pytest.raises(UsageError, match=sentence):
        dataset_of(config_of(**values), "train")


def test_a_held_out_part_is_no_stream_and_may_be_missing():
    with pytest.raises(UsageError, match="held-out samples are a Dataset with a length"):
        dataset_of(config_of(dataset=lambda part: Endless()), "held-out")
    assert dataset_of(config_of(dataset=lambda part: None), "held-out") is None


def test_a_state_is_json():
    with pytest.raises(UsageError, match=r"state_dict\(\) of the dataset holds something else"):
        state_of(HalfAState())


@pytest.mark.parametrize(("samples", "sentence"), [(31, "needs more than the 31"), (None, None), (32, None)])
def test_an_epoch_has_as_many_steps_as_the_samples_fill(samples, sentence):
    config = config_of(dataset=Endless)
    if sentence is None:
        assert config.steps_per_epoch(samples) == STEPS
        return
    with pytest.raises(UsageError, match=sentence):
        config.steps_per_epoch(samples)

"""Batches of a run: the datasets of ``--dataset``, and a ``DataLoader`` over this worker's part of each global batch.

Global batches hold the same samples at every world size, so mean losses are comparable. Their order depends on seed and
epoch alone; random numbers that a dataset draws for a sample, on seed, epoch and sample.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from hashlib import blake2b
from itertools import count, islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, default_collate

from ckpt_tools.errors import UsageError

from ..config.model_names import folder_of
from ..config.references import call_function, check_arguments, is_function, parse_arguments, text_of
from ..config.train_config import TrainConfig
from .datasets import Part, TensorSamples, load_dataset

Collate = Callable[[list[Any]], Any]


def make_dataset(config: TrainConfig, part: Part) -> Dataset[Any] | None:
    """One part of the dataset. A function of the user's gets the name of the part, and may have no held-out one.
    Raises ``UsageError``."""
    if not is_function(config.dataset):
        arguments = parse_arguments(config.dataset_arg, "dataset-arg")
        check_arguments(load_dataset, 4, arguments, "dataset-arg")
        place: Any = (text_of(config.dataset), part, config.data_root, folder_of(config.model))
        samples = load_dataset(*place, **arguments)
        return samples.take_first(config.num_samples) if part == "train" else samples
    dataset: Any = call_function(config.dataset, "dataset", part, **parse_arguments(config.dataset_arg, "dataset-arg"))
    if dataset is None and part == "held-out":
        return None
    if isinstance(dataset, IterableDataset):
        _check_iterable(config, dataset, part)
    elif not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise UsageError(
            f"--dataset {text_of(config.dataset)} gives {type(dataset).__name__} for {part}, and a Dataset with a "
            "length or an IterableDataset is needed"
        )
    elif config.num_samples is not None and part == "train":
        return Subset(dataset, range(min(config.num_samples, len(dataset))))
    checked: Dataset[Any] = dataset
    return checked


def _check_iterable(config: TrainConfig, dataset: object, part: Part) -> None:
    if part == "held-out":
        raise UsageError("held-out samples are a Dataset with a length, and not an IterableDataset")
    if config.num_samples is not None:
        raise UsageError("--num-samples is for a dataset with a length; an IterableDataset has --epoch-steps")
    if hasattr(dataset, "state_dict") != hasattr(dataset, "load_state_dict"):
        raise UsageError("an IterableDataset has both state_dict and load_state_dict, or neither")
    if config.loader_workers > 1:
        raise UsageError("--loader-workers is at most 1 for an IterableDataset, whose samples have one order")


def count_samples(dataset: Dataset[Any]) -> int | None:
    """Number of samples; None if the dataset has no length."""
    return len(dataset) if hasattr(dataset, "__len__") else None


def epoch_order(num_samples: int, epoch: int, seed: int) -> Tensor:
    """Order of the samples in an epoch, int64 [num_samples]. It depends on epoch and seed only."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    return torch.randperm(num_samples, generator=generator)


def rank_batches(order: Tensor, batch_size: int, rank: int, world_size: int) -> Iterator[Tensor]:
    """This rank's slice of each full global batch of ``order``, int64 [batch_size / world_size]. The last, partial
    batch is left out."""
    for batch in order.split(batch_size):
        if len(batch) == batch_size:
            yield batch.tensor_split(world_size)[rank]


@dataclass(frozen=True, slots=True)
class EpochPosition:
    """The first batch of an epoch that is wanted, and the state of an iterable dataset there, if it has one."""

    epoch: int
    batch: int = 0
    state: str | None = None


@dataclass(frozen=True, eq=False)
class Batches:
    """Batches of this rank, which is one of ``world_size`` with different samples."""

    config: TrainConfig
    dataset: Dataset[Any]
    rank: int
    world_size: int
    device: torch.device

    @cached_property
    def first_state(self) -> str | None:
        """State of an iterable dataset before its first sample, in which each epoch begins."""
        return dump_state(self.dataset)

    def iterate_epoch(self, start: EpochPosition) -> Iterator[tuple[Any, str | None]]:
        """Batches on the device, and the state of the dataset after each."""
        is_stream = isinstance(self.dataset, IterableDataset)
        order = None if is_stream else self._list_batches(start)
        loader = DataLoader(
            BatchedStream(self, start) if is_stream else BatchedDataset(self.dataset, self.config.seed, start.epoch),
            batch_sampler=order,
            batch_size=None if is_stream else 1,
            collate_fn=_return_batch,
            num_workers=self.config.loader_workers,
            pin_memory=self.device.type == "cuda",
        )
        return ((to_device(batch, self.device), state) for batch, state in loader)

    def _list_batches(self, start: EpochPosition) -> list[list[int]]:
        """Numbers of the samples of each batch that is left of the epoch."""
        length = count_samples(self.dataset)
        assert length is not None
        whole = epoch_order(length, start.epoch + 1, self.config.seed)
        rows = rank_batches(whole, self.config.batch_size, self.rank, self.world_size)
        return [row.tolist() for row in islice(rows, start.batch, None)]


def _return_batch(batch: Any) -> Any:
    return batch


class BatchedDataset(Dataset[Any]):
    """Whole batches of a dataset, in the process that loads them. Of the user's own, each sample has random numbers of
    its own."""

    def __init__(self, dataset: Any, seed: int, epoch: int) -> None:
        self._dataset, self._seed, self._epoch = dataset, seed, epoch
        self._collate = find_collate(dataset)

    def __getitems__(self, indices: list[int]) -> tuple[Any, None]:
        if isinstance(self._dataset, TensorSamples):
            return self._dataset.__getitems__(indices), None
        return self._collate([self._load_sample(each) for each in indices]), None

    def _load_sample(self, index: int) -> Any:
        seed_generators(self._seed, self._epoch, index)
        return self._dataset[index]


def find_collate(dataset: Any) -> Collate:
    """The dataset's own ``collate_fn``, or torch's."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    collate: Collate = getattr(dataset, "collate_fn", default_collate)
    return collate


class BatchedStream(IterableDataset[Any]):
    """A share of each global batch of an iterable dataset, and the dataset's state after it. Every rank reads all
    samples, so that a run may continue at any world size. Each sample has random numbers of its own."""

    def __init__(self, batches: Batches, start: EpochPosition) -> None:
        self._dataset, self._seed, self._size = batches.dataset, batches.config.seed, batches.config.batch_size
        share = self._size // batches.world_size
        self._rows = slice(batches.rank * share, (batches.rank + 1) * share)
        self._start, self._first_state = start, batches.first_state

    def __iter__(self) -> Iterator[tuple[Any, str | None]]:
        samples, collate = self._iterate_samples(self._restore_state()), find_collate(self._dataset)
        while len(batch := list(islice(samples, self._size))) == self._size:
            yield collate(batch[self._rows]), dump_state(self._dataset)

    def _restore_state(self) -> int:
        """Set the dataset's epoch and state; the number of its first sample."""
        dataset: Any = self._dataset
        if self._first_state is not None:
            dataset.load_state_dict(json.loads(self._first_state))
        if hasattr(dataset, "set_epoch"):
            dataset.set_epoch(self._start.epoch)
        if self._start.state is None or not hasattr(dataset, "load_state_dict"):
            return 0
        dataset.load_state_dict(json.loads(self._start.state))
        return self._start.batch * self._size

    def _iterate_samples(self, first: int) -> Iterator[Any]:
        """Samples from the position on; a dataset that cannot begin there has to give those before it too."""
        seed_generators(self._seed, self._start.epoch, 0)
        samples = iter(self._dataset)
        for number in count(first):
            seed_generators(self._seed, self._start.epoch, number)
            try:
                sample = next(samples)
            except StopIteration:
                return
            if number >= self._start.batch * self._size:
                yield sample


def dump_state(dataset: Any) -> str | None:
    """State of an iterable dataset as JSON, which every checkpoint format keeps. Raises ``UsageError``."""
    state = dataset.state_dict() if hasattr(dataset, "state_dict") else None
    try:
        return None if state is None else json.dumps(state)
    except (TypeError, ValueError) as error:
        raise UsageError(f"state_dict() of the dataset holds something else than JSON has: {error}") from error


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch on the device. From pinned memory the host does not wait for the copy."""
    return tree_map_only(Tensor, partial(Tensor.to, device=device, non_blocking=True), batch)


def held_out_batches(dataset: Any, size: int, device: torch.device) -> Callable[[int], tuple[Any, int]]:
    """Function that gives the batch of a number, on the device, and its samples; the last one may be smaller."""

    def batch_at(number: int) -> tuple[Any, int]:
        source = BatchedDataset(dataset, 0, 0)
        indices = list(range(number * size, min((number + 1) * size, len(dataset))))
        return to_device(source.__getitems__(indices)[0], device), len(indices)

    return batch_at


def seed_generators(seed: int, first: int, second: int) -> None:
    """Seed all generators from three numbers, such as the run's seed, the step and the rank's share of the samples.
    Ranks that compute each layer together need the same ones."""
    mixed = int.from_bytes(blake2b(f"{seed} {first} {second}".encode(), digest_size=8).digest())
    random.seed(mixed)
    np.random.seed([mixed & 0xFFFFFFFF, mixed >> 32])
    torch.default_generator.manual_seed(mixed)  # torch.manual_seed takes 90 us
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(mixed)

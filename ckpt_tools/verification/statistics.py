"""Statistics of tensors: their elements are read block by block, within a memory budget.

Integers and bool are counted and summed exactly. Floating-point elements are widened to float64, which holds each of
them, and summed in it. A tensor is read from start to end by one thread, so that its sums are the same in every run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckpt_tools.core.boxes import Box
from ckpt_tools.core.manifest import Manifest, StateKey, TensorEntry
from ckpt_tools.core.option_names import option
from ckpt_tools.core.progress import Meter, Progress
from ckpt_tools.core.summary import TensorStats
from ckpt_tools.core.wording import size
from ckpt_tools.errors import MemoryBudgetError
from ckpt_tools.planning.plan import BASE_BYTES, reading_bytes
from ckpt_tools.stores.source import Store
from ckpt_tools.transfer.buffers import page_aligned
from ckpt_tools.transfer.runners.threads import ThreadRunner
from ckpt_tools.transfer.tensor_reader import TensorReader
from ckpt_tools.verification.deviation import numbers

MAX_BLOCK_BYTES = 1 << 20
MIN_BLOCK_BYTES = 64 << 10

MEASURED_ELEMENTS = 1 << 14
"""Elements that are widened and measured at a time."""

MEASURING_BYTES = 1 << 20
"""Memory of these elements as float64 or complex128, and of what is computed of them."""

BUFFERS = 3
"""A block, its elements before a cast, and what is read to be placed strided."""

SAMPLED_BLOCKS = 16
"""Blocks of a sample, evenly apart. The first and the last are those of the tensor."""

SAFE_EXPONENT = 500
"""Squares of numbers up to two to this power, and the sums of squares, are far from the ends of float64."""


@dataclass(frozen=True, slots=True)
class Measuring:
    """The size of blocks and the number of threads that fit a memory budget; ``sample`` measures some blocks alone."""

    block_bytes: int
    num_workers: int
    sample: bool = False

    @classmethod
    def within(
        cls, memory_bytes: int, manifest: Manifest, *, num_workers: int, is_limit: bool, sample: bool
    ) -> Measuring:
        """Raises MemoryBudgetError if not even the smallest blocks in one thread fit, and the budget is a limit."""
        base = max(BASE_BYTES, reading_bytes(manifest)) + manifest.decoding_bytes
        block = MAX_BLOCK_BYTES
        while base + num_workers * _worker_bytes(block) > memory_bytes:
            if block > MIN_BLOCK_BYTES:
                block //= 2
            elif num_workers > 1:
                num_workers -= 1
            elif is_limit:
                least = size(base + _worker_bytes(block), at_least=True)
                raise MemoryBudgetError(
                    f"the statistics of this checkpoint need at least {least} of memory, and the budget is "
                    f"{size(memory_bytes)}; raise {option('memory')}"
                )
            else:
                break
        return cls(block, num_workers, sample)


def _worker_bytes(block_bytes: int) -> int:
    return BUFFERS * block_bytes + MEASURING_BYTES


def statistics(
    store: Store, tensors: Iterable[tuple[StateKey, TensorEntry]], how: Measuring, on_progress: Progress
) -> tuple[TensorStats, ...]:
    """The statistics of each tensor, in order.

    Raises:
        CkptError: elements cannot be read.
    """
    wanted = list(enumerate(tensors))
    reader = TensorReader(store, how.block_bytes)
    meter = Meter(on_progress, sum(_num_read(entry, how) * entry.dtype.item_bytes for _, (_, entry) in wanted))
    found: dict[int, TensorStats] = {}

    def measured(item: tuple[int, tuple[StateKey, TensorEntry]]) -> tuple[int, TensorStats]:
        position, (key, entry) = item
        return position, _stats(reader, key, entry, how)

    for position, stats in ThreadRunner(how.num_workers).run(measured, wanted):
        found[position] = stats
        entry = wanted[position][1][1]
        meter.add(stats.num_read * entry.dtype.item_bytes)
    reader.finish()
    return tuple(found[position] for position, _ in wanted)


def _stats(reader: TensorReader, key: StateKey, entry: TensorEntry, how: Measuring) -> TensorStats:
    is_measured = entry.dtype.num_values == 1
    sums = _Sums(is_ordered=not entry.dtype.value.startswith("complex"))
    num_read = 0
    for elements in _blocks(reader, entry, how) if is_measured else ():
        num_read += len(elements) // entry.dtype.item_bytes
        rows = elements.reshape(-1, entry.dtype.item_bytes)
        for first in range(0, len(rows), MEASURED_ELEMENTS):
            sums.add(numbers(rows[first : first + MEASURED_ELEMENTS], entry.dtype))
    of_tensor = key.fqn, key.slot, entry.shape, entry.dtype.value, num_read
    if not is_measured:
        return TensorStats(*of_tensor)
    mean = sums.mean if sums.is_ordered else None
    return TensorStats(*of_tensor, sums.least, sums.most, mean, sums.norm, sums.num_zeros, sums.num_nan, sums.num_inf)


def _starts(entry: TensorEntry, how: Measuring) -> tuple[list[int] | range, int]:
    """Starts of the blocks, and the size of a block, both in elements."""
    step = how.block_bytes // entry.dtype.item_bytes
    starts = range(0, entry.numel, step)
    if not how.sample or len(starts) <= SAMPLED_BLOCKS:
        return starts, step
    last = len(starts) - 1
    return [starts[number * last // (SAMPLED_BLOCKS - 1)] for number in range(SAMPLED_BLOCKS)], step


def _num_read(entry: TensorEntry, how: Measuring) -> int:
    starts, step = _starts(entry, how)
    return sum(min(step, entry.numel - start) for start in starts) if entry.dtype.num_values == 1 else 0


def _blocks(reader: TensorReader, entry: TensorEntry, how: Measuring) -> Iterator[NDArray[np.uint8]]:
    """The elements as bytes. A block is overwritten by the next."""
    item = entry.dtype.item_bytes
    starts, step = _starts(entry, how)
    buffer = page_aligned(min(entry.num_bytes, step * item))
    for start in starts:
        stop = min(start + step, entry.numel)
        block = buffer[: (stop - start) * item]
        reader.read(entry, Box.whole(entry.shape), entry.shape, start, stop, block.data)
        yield block


@dataclass(slots=True)
class _Sums:
    """Counts and sums of the elements so far. NaN and infinite elements are counted, and in nothing else."""

    is_ordered: bool
    num_zeros: int = 0
    num_nan: int = 0
    num_inf: int = 0
    num_finite: int = 0
    least: int | float | None = None
    most: int | float | None = None
    norm: float = 0.0
    _total: int = 0
    _mean: float = 0.0
    _is_exact: bool = field(default=True)

    def add(self, elements: NDArray[Any]) -> None:
        self._is_exact = elements.dtype.kind in "iu"
        finite = elements if self._is_exact else self._without_others(elements)
        if not len(finite):
            return
        self.num_zeros += len(finite) - int(np.count_nonzero(finite))
        before, self.num_finite = self.num_finite, self.num_finite + len(finite)
        if not self.is_ordered:
            parts = finite.view(np.float64)
            self.norm = math.hypot(self.norm, _scaled(parts, _exponent(parts), _norm))
            return
        lowest, highest = finite.min().item(), finite.max().item()
        self.least = lowest if self.least is None else min(self.least, lowest)
        self.most = highest if self.most is None else max(self.most, highest)
        if self._is_exact:
            # The sum of 64-bit integers, by halves: a block's sum of each half fits.
            self._total += (int((finite >> 32).sum()) << 32) + int((finite & 0xFFFFFFFF).sum())
            self.norm = math.hypot(self.norm, _norm(finite.astype(np.float64)))
        else:
            exponent = _exponent(finite)
            self.norm = math.hypot(self.norm, _scaled(finite, exponent, _norm))
            share = len(finite) / self.num_finite
            mean = _scaled(finite, exponent, lambda block: float(block.sum()) / len(block))
            self._mean = self._mean * (before / self.num_finite) + mean * share

    @property
    def mean(self) -> float | None:
        if not self.num_finite:
            return None
        return self._total / self.num_finite if self._is_exact else self._mean

    def _without_others(self, elements: NDArray[Any]) -> NDArray[Any]:
        is_finite = np.isfinite(elements)
        num_others = len(elements) - int(np.count_nonzero(is_finite))
        if not num_others:
            return elements
        num_nan = int(np.count_nonzero(np.isnan(elements)))
        self.num_nan += num_nan
        self.num_inf += num_others - num_nan
        return np.asarray(elements[is_finite])


def _exponent(elements: NDArray[np.float64]) -> int:
    """Exponent of two to scale by. Squares and sums of what is scaled stay in the range of float64."""
    exponent = math.frexp(max(abs(elements.min().item()), abs(elements.max().item())))[1]
    return exponent if abs(exponent) > SAFE_EXPONENT else 0


def _scaled(elements: NDArray[np.float64], exponent: int, of: Callable[[NDArray[np.float64]], float]) -> float:
    if not exponent:
        return of(elements)
    try:
        return math.ldexp(of(np.ldexp(elements, -exponent)), exponent)
    except OverflowError:
        return math.inf


def _norm(elements: NDArray[np.float64]) -> float:
    return math.sqrt(float(np.square(elements).sum()))

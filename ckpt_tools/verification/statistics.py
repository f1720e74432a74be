"""Statistics of tensors: their elements are read block by block, within a memory budget.

Integers and bool are counted and summed exactly. Floating-point elements are widened to float64, which holds each of
them, and summed in it. A tensor is read from start to end by one thread, so that its sums are the same in every run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ckpt_tools.core.boxes import Box
from ckpt_tools.core.manifest import Manifest, StateKey, TensorEntry
from ckpt_tools.core.option_names import format_option
from ckpt_tools.core.summary import TensorStats
from ckpt_tools.errors import MemoryBudgetError
from ckpt_tools.messages.progress import ProgressCallback, ProgressMeter
from ckpt_tools.messages.wording import format_size
from ckpt_tools.planning.plan import BASE_BYTES, estimate_reading_bytes
from ckpt_tools.stores.local.direct import bypass_cache_if_large
from ckpt_tools.stores.source import Store
from ckpt_tools.transfer.buffers import allocate_page_aligned
from ckpt_tools.transfer.runners.threads import ThreadRunner
from ckpt_tools.transfer.tensor_reader import TensorReader
from ckpt_tools.verification.deviation import widen_elements

MAX_BLOCK_BYTES = 1 << 20
MIN_BLOCK_BYTES = 64 << 10

MEASURED_ELEMENTS = 1 << 14
"""Elements that are widened and measured at a time."""

MEASURING_BYTES = 1 << 20
"""Memory of these elements as float64 or complex128, and of what is computed of them."""

BUFFERS_PER_WORKER = 3
"""A block, its elements before a cast, and what is read to be placed strided."""

SAMPLED_BLOCKS = 16
"""Blocks of a sample, evenly apart. The first and the last are those of the tensor."""

SAFE_EXPONENT = 500
"""Squares of numbers up to two to this power, and the sums of squares, are far from the ends of float64."""


@dataclass(frozen=True, slots=True)
class StatisticsPlan:
    """The size of blocks and the number of threads that fit a memory budget; ``sample`` measures some blocks alone.
    With ``hashes`` what is read is hashed too."""

    block_bytes: int
    num_workers: int
    sample: bool = False
    hashes: bool = False

    @classmethod
    def fit_to_memory(
        cls, memory_bytes: int, manifest: Manifest, *, num_workers: int, is_limit: bool, sample: bool
    ) -> StatisticsPlan:
        """Raises MemoryBudgetError if not even the smallest blocks in one thread fit, and the budget is a limit."""
        base_bytes = max(BASE_BYTES, estimate_reading_bytes(manifest)) + manifest.decoding_bytes
        block_bytes = MAX_BLOCK_BYTES
        while base_bytes + num_workers * _count_worker_bytes(block_bytes) > memory_bytes:
            if block_bytes > MIN_BLOCK_BYTES:
                block_bytes //= 2
            elif num_workers > 1:
                num_workers -= 1
            elif is_limit:
                least_size = format_size(base_bytes + _count_worker_bytes(block_bytes), at_least=True)
                raise MemoryBudgetError(
                    f"the statistics of this checkpoint need at least {least_size} of memory, and the budget is "
                    f"{format_size(memory_bytes)}; raise {format_option('memory')}"
                )
            else:
                break
        return cls(block_bytes, num_workers, sample)


def _count_worker_bytes(block_bytes: int) -> int:
    return BUFFERS_PER_WORKER * block_bytes + MEASURING_BYTES


class MeasuredRegion(NamedTuple):
    """A measured ``box`` of a tensor: all of it or one of its rows."""

    key: StateKey
    entry: TensorEntry
    box: Box

    @property
    def item_bytes(self) -> int:
        return self.entry.dtype.item_bytes


class Measurement(NamedTuple):
    """The statistics of a region, and the hash of its bytes (XXH3-128); empty without ``StatisticsPlan.hashes``."""

    stats: TensorStats
    digest: bytes


def compute_statistics(
    store: Store, tensors: Iterable[tuple[StateKey, TensorEntry]], plan: StatisticsPlan, on_progress: ProgressCallback
) -> tuple[TensorStats, ...]:
    """The statistics of each tensor, in order.

    Raises:
        CkptError: elements cannot be read.
    """
    regions = [MeasuredRegion(key, entry, Box.whole(entry.shape)) for key, entry in tensors]
    return tuple(each.stats for each in measure_regions(store, regions, plan, on_progress))


def measure_regions(
    store: Store, regions: Sequence[MeasuredRegion], plan: StatisticsPlan, on_progress: ProgressCallback
) -> list[Measurement]:
    """The statistics of each region, in order. Raises as ``compute_statistics``."""
    reader = TensorReader(store, plan.block_bytes)
    num_bytes = sum(_count_read_elements(each, plan) * each.item_bytes for each in regions)
    bypass_cache_if_large(store, num_bytes)
    meter = ProgressMeter(on_progress, num_bytes)
    measurements: dict[int, Measurement] = {}

    def measure_item(item: tuple[int, MeasuredRegion]) -> tuple[int, Measurement]:
        position, region = item
        return position, _measure_region(reader, region, plan)

    for position, measurement in ThreadRunner(plan.num_workers).run(measure_item, list(enumerate(regions))):
        measurements[position] = measurement
        meter.add_bytes(measurement.stats.num_read * regions[position].item_bytes)
    reader.check_remaining_records()
    return [measurements[position] for position in range(len(regions))]


def _measure_region(reader: TensorReader, region: MeasuredRegion, plan: StatisticsPlan) -> Measurement:
    key, dtype = region.key, region.entry.dtype
    is_measured = dtype.num_values == 1
    sums = _RunningStatistics(is_ordered=not dtype.value.startswith("complex"))
    num_read, hasher = 0, _make_hasher() if plan.hashes else None
    for elements in _read_blocks(reader, region, plan) if is_measured else ():
        num_read += len(elements) // dtype.item_bytes
        if hasher is not None:
            hasher.update(elements.data)
        rows = elements.reshape(-1, dtype.item_bytes)
        for start in range(0, len(rows), MEASURED_ELEMENTS):
            sums.add_elements(widen_elements(rows[start : start + MEASURED_ELEMENTS], dtype))
    digest = b"" if hasher is None else hasher.digest()
    fields = key.fqn, key.slot, region.box.shape, dtype.value, num_read
    if not is_measured:
        return Measurement(TensorStats(*fields), digest)
    mean = sums.mean if sums.is_ordered else None
    stats = TensorStats(
        *fields, sums.minimum, sums.maximum, mean, sums.norm, sums.num_zeros, sums.num_nan, sums.num_inf
    )
    return Measurement(stats, digest)


def _make_hasher() -> Any:
    from xxhash import xxh3_128

    return xxh3_128()


def _choose_block_starts(region: MeasuredRegion, plan: StatisticsPlan) -> tuple[list[int] | range, int]:
    """Starts of the blocks, and the size of a block, both in elements."""
    block_numel = plan.block_bytes // region.item_bytes
    starts = range(0, region.box.numel, block_numel)
    if not plan.sample or len(starts) <= SAMPLED_BLOCKS:
        return starts, block_numel
    last_block = len(starts) - 1
    return [starts[number * last_block // (SAMPLED_BLOCKS - 1)] for number in range(SAMPLED_BLOCKS)], block_numel


def _count_read_elements(region: MeasuredRegion, plan: StatisticsPlan) -> int:
    starts, block_numel = _choose_block_starts(region, plan)
    is_measured = region.entry.dtype.num_values == 1
    return sum(min(block_numel, region.box.numel - start) for start in starts) if is_measured else 0


def _read_blocks(reader: TensorReader, region: MeasuredRegion, plan: StatisticsPlan) -> Iterator[NDArray[np.uint8]]:
    """The elements as bytes. A block is overwritten by the next."""
    numel, item_bytes = region.box.numel, region.item_bytes
    starts, block_numel = _choose_block_starts(region, plan)
    buffer = allocate_page_aligned(min(numel, block_numel) * item_bytes)
    for start in starts:
        stop = min(start + block_numel, numel)
        block = buffer[: (stop - start) * item_bytes]
        reader.read(region.entry, region.box, region.entry.shape, start, stop, block.data)
        yield block


@dataclass(slots=True)
class _RunningStatistics:
    """Counts and sums of the elements so far. NaN and infinite elements are counted, and in nothing else."""

    is_ordered: bool
    num_zeros: int = 0
    num_nan: int = 0
    num_inf: int = 0
    num_finite: int = 0
    minimum: int | float | None = None
    maximum: int | float | None = None
    norm: float = 0.0
    _total: int = 0
    _mean: float = 0.0
    _is_exact: bool = field(default=True)

    def add_elements(self, elements: NDArray[Any]) -> None:
        self._is_exact = elements.dtype.kind in "iu"
        finite = elements if self._is_exact else self._drop_non_finite(elements)
        if not len(finite):
            return
        self.num_zeros += len(finite) - int(np.count_nonzero(finite))
        num_before, self.num_finite = self.num_finite, self.num_finite + len(finite)
        if not self.is_ordered:
            components = finite.view(np.float64)
            self.norm = math.hypot(self.norm, _apply_scaled(components, _choose_exponent(components), _compute_norm))
            return
        lowest, highest = finite.min().item(), finite.max().item()
        self.minimum = lowest if self.minimum is None else min(self.minimum, lowest)
        self.maximum = highest if self.maximum is None else max(self.maximum, highest)
        if self._is_exact:
            # The sum of 64-bit integers, by halves: a block's sum of each half fits.
            self._total += (int((finite >> 32).sum()) << 32) + int((finite & 0xFFFFFFFF).sum())
            self.norm = math.hypot(self.norm, _compute_norm(finite.astype(np.float64)))
        else:
            # Mean and norm are updated block by block, so that no sum overflows, for n elements before and m in the
            # block:
            #     mean' = mean * n / (n + m) + block_mean * m / (n + m)        norm' = hypot(norm, block_norm)
            # Blocks of very large or very small elements are scaled by a power of two first, which is exact.
            exponent = _choose_exponent(finite)
            self.norm = math.hypot(self.norm, _apply_scaled(finite, exponent, _compute_norm))
            block_share = len(finite) / self.num_finite
            block_mean = _apply_scaled(finite, exponent, lambda block: float(block.sum()) / len(block))
            self._mean = self._mean * (num_before / self.num_finite) + block_mean * block_share

    @property
    def mean(self) -> float | None:
        if not self.num_finite:
            return None
        return self._total / self.num_finite if self._is_exact else self._mean

    def _drop_non_finite(self, elements: NDArray[Any]) -> NDArray[Any]:
        is_finite = np.isfinite(elements)
        num_non_finite = len(elements) - int(np.count_nonzero(is_finite))
        if not num_non_finite:
            return elements
        num_nan = int(np.count_nonzero(np.isnan(elements)))
        self.num_nan += num_nan
        self.num_inf += num_non_finite - num_nan
        return np.asarray(elements[is_finite])


def _choose_exponent(elements: NDArray[np.float64]) -> int:
    """Exponent of two to scale by. Squares and sums of what is scaled stay in the range of float64."""
    exponent = math.frexp(max(abs(elements.min().item()), abs(elements.max().item())))[1]
    return exponent if abs(exponent) > SAFE_EXPONENT else 0


def _apply_scaled(
    elements: NDArray[np.float64], exponent: int, function: Callable[[NDArray[np.float64]], float]
) -> float:
    """The result of ``function``, which scales with the elements, computed on elements scaled by a power of
    two."""
    if not exponent:
        return function(elements)
    try:
        return math.ldexp(function(np.ldexp(elements, -exponent)), exponent)
    except OverflowError:
        return math.inf


def _compute_norm(elements: NDArray[np.float64]) -> float:
    return math.sqrt(float(np.square(elements).sum()))

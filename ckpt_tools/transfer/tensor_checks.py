"""Compares tensors of a source with each other: those that become one, such as tied weights, and the model's own copy
of each weight with its fp32 master.

The copy is a cast of the master, unless something is wrong. They differ where weights were set after DeepSpeed had
copied them into its masters, and where DeepSpeed's ZenFlow updates some columns of a weight only, and the master later.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ckpt_tools.core.boxes import Box
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.manifest import MASTER, WEIGHT, Manifest, StateKey, TensorEntry
from ckpt_tools.core.notes import Note, Outcome
from ckpt_tools.errors import DifferenceError
from ckpt_tools.messages.wording import format_count
from ckpt_tools.stores.source import Store
from ckpt_tools.transfer.tensor_reader import TensorReader

BLOCK_BYTES = 1 << 20
"""Bytes of each of two tensors that are compared at once."""

BLOCK_ELEMENTS = 1 << 16
"""Elements that are compared at once: 256 KiB of a master."""

SAMPLE_ELEMENTS = 1 << 12
"""Elements of each weight that a conversion compares: a few pages, so that it costs next to nothing."""

_INTEGER_TYPES = {DType.BFLOAT16: np.int16, DType.FLOAT16: np.int16, DType.FLOAT32: np.int32}

NUM_THREADS = 8
"""Threads that read: a request to a distant store takes 10 to 30 ms."""


def check_required_equal(manifest: Manifest, store: Store) -> None:
    """Raises DifferenceError for the first pair of ``must_equal`` whose bits differ."""
    if not manifest.must_equal:
        return
    reader = TensorReader(store, BLOCK_BYTES, compares_records=False)
    for pair in manifest.must_equal:
        if not _has_equal_bits(reader, pair.first, pair.second):
            advice = f"; {pair.advice}" if pair.advice else ""
            raise DifferenceError(f"{pair.what}: their bits differ, and must be the same{advice}")


def _has_equal_bits(reader: TensorReader, first: TensorEntry, second: TensorEntry) -> bool:
    if first.numel != second.numel or first.dtype is not second.dtype:
        return False
    block_elements = BLOCK_BYTES // first.dtype.item_bytes
    for start in range(0, first.numel, block_elements):
        stop = min(start + block_elements, first.numel)
        blocks = [_read_elements_as(reader, entry, entry.dtype, start, stop) for entry in (first, second)]
        if not np.array_equal(blocks[0], blocks[1]):
            return False
    return True


def _find_weight_master_pairs(manifest: Manifest) -> dict[str, tuple[TensorEntry, TensorEntry]]:
    """The weight and the master of each parameter that has both, without weights that are read from their master, as
    those of ZeRO-3 are."""
    master_entries = ((key.fqn, entry) for key, entry in manifest.tensors.items() if key.slot == MASTER)
    pairs = ((name, manifest.tensors.get(StateKey(name, WEIGHT)), master) for name, master in master_entries)
    return {
        name: (weight, master)
        for name, weight, master in pairs
        if weight is not None
        and weight.dtype in _INTEGER_TYPES
        and weight.is_as_stored
        and weight.shape == master.shape
        and weight.shards is not master.shards
    }


def note_differing_copies(manifest: Manifest, store: Store, copy_taken: str, *, is_sample: bool) -> tuple[Note, ...]:
    """A note if copies differ by more than rounding, which is to the nearest number or the one beside it. With
    ``is_sample``, only the first ``SAMPLE_ELEMENTS`` elements of each are read. ``copy_taken`` is for the note: which
    of the two is used."""
    reader = TensorReader(store, BLOCK_ELEMENTS * 4, compares_records=False)
    weight_master_pairs = _find_weight_master_pairs(manifest)

    def largest_deviation(copy: tuple[str, tuple[TensorEntry, TensorEntry]]) -> tuple[float, str]:
        name, (weight, master) = copy
        num_compared = min(weight.numel, SAMPLE_ELEMENTS) if is_sample else weight.numel
        ranges = (
            (start, min(start + BLOCK_ELEMENTS, num_compared)) for start in range(0, num_compared, BLOCK_ELEMENTS)
        )
        return max((_max_deviation(reader, weight, master, *each) for each in ranges), default=0.0), name

    with ThreadPoolExecutor(NUM_THREADS) as threads:
        differing = [each for each in threads.map(largest_deviation, weight_master_pairs.items()) if each[0]]
    if not differing:
        return ()
    value, name = max(differing)
    sample_remark = f" among the first {SAMPLE_ELEMENTS:,} elements of each" if is_sample else ""
    why = (
        f"the model's copy differs from its fp32 master by more than rounding, by up to {value:.3g}{sample_remark}, "
        f"in {name}"
    )
    what = f"{format_count(len(differing), 'weight')} of {len(weight_master_pairs):,}"
    return (Note(Outcome.KEPT, what, f"{why}; {copy_taken}", len(differing)),)


def _max_deviation(reader: TensorReader, weight: TensorEntry, master: TensorEntry, start: int, stop: int) -> float:
    """The largest difference among elements ``start`` to ``stop`` that is more than rounding; 0 where there is none."""
    bits = [
        _read_elements_as(reader, each, weight.dtype, start, stop).view(_INTEGER_TYPES[weight.dtype])
        for each in (weight, master)
    ]
    if np.array_equal(bits[0], bits[1]):
        return 0.0
    # Floats of one sign are ordered as their bits are as integers, negative ones in reverse. With those turned around,
    # neighbouring numbers of any dtype differ by 1.
    sign = np.iinfo(bits[0].dtype).min
    ordinal_values = [np.where(each < 0, int(sign) - each.astype(np.int64), each) for each in bits]
    differs_beyond_rounding = np.abs(ordinal_values[0] - ordinal_values[1]) > 1
    if not differs_beyond_rounding.any():
        return 0.0
    values = [
        _read_elements_as(reader, each, DType.FLOAT32, start, stop).view(np.float32)[differs_beyond_rounding]
        for each in (weight, master)
    ]
    deviations = np.abs(values[0].astype(np.float64) - values[1])
    return float(np.nan_to_num(deviations, nan=np.inf).max())


def _read_elements_as(
    reader: TensorReader, entry: TensorEntry, dtype: DType, start: int, stop: int
) -> NDArray[np.uint8]:
    """The bytes of elements ``[start, stop)`` of the row-major order of a tensor, cast to ``dtype``."""
    flat = (entry.numel,)
    out = np.empty((stop - start) * dtype.item_bytes, np.uint8)
    reader.read(replace(entry, dtype=dtype), Box.whole(flat), flat, start, stop, out.data)
    return out

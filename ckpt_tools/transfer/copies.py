"""Compares the model's own copy of each weight with its fp32 master: a cast of the master, unless something is wrong.

They differ where weights were set after DeepSpeed had copied them into its masters, and where DeepSpeed's ZenFlow
updates some columns of a weight only, and the master later.
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
from ckpt_tools.core.wording import format_count
from ckpt_tools.stores.source import Store
from ckpt_tools.transfer.tensor_reader import TensorReader

BLOCK = 1 << 16
"""Elements that are compared at once: 256 KiB of a master."""

SAMPLE = 1 << 12
"""Elements of each weight that a conversion compares: a few pages, so that it costs next to nothing."""

_BITS = {DType.BFLOAT16: np.int16, DType.FLOAT16: np.int16, DType.FLOAT32: np.int32}

THREADS = 8
"""Threads that read: a request to a distant store takes 10 to 30 ms."""


def _copies(manifest: Manifest) -> dict[str, tuple[TensorEntry, TensorEntry]]:
    """The weight and the master of each parameter that has both, without weights that are read from their master, as
    those of ZeRO-3 are."""
    masters = ((key.fqn, entry) for key, entry in manifest.tensors.items() if key.slot == MASTER)
    pairs = ((name, manifest.tensors.get(StateKey(name, WEIGHT)), master) for name, master in masters)
    return {
        name: (weight, master)
        for name, weight, master in pairs
        if weight is not None
        and weight.dtype in _BITS
        and weight.is_as_stored
        and weight.shape == master.shape
        and weight.shards is not master.shards
    }


def note_of_copies(manifest: Manifest, store: Store, written: str, *, is_sample: bool) -> tuple[Note, ...]:
    """A note if copies differ by more than rounding, which is to the nearest number or the one beside it. ``is_sample``
    reads the first ``SAMPLE`` elements of each alone. ``written`` says which copy is taken."""
    reader, copies = TensorReader(store, BLOCK * 4, compares_records=False), _copies(manifest)

    def largest(copy: tuple[str, tuple[TensorEntry, TensorEntry]]) -> tuple[float, str]:
        name, (weight, master) = copy
        num_compared = min(weight.numel, SAMPLE) if is_sample else weight.numel
        ranges = ((start, min(start + BLOCK, num_compared)) for start in range(0, num_compared, BLOCK))
        return max((_deviation(reader, weight, master, *each) for each in ranges), default=0.0), name

    with ThreadPoolExecutor(THREADS) as threads:
        found = [each for each in threads.map(largest, copies.items()) if each[0]]
    if not found:
        return ()
    value, name = max(found)
    among = f" among the first {SAMPLE:,} elements of each" if is_sample else ""
    why = f"the model's copy differs from its fp32 master by more than rounding, by up to {value:.3g}{among}, in {name}"
    what = f"{format_count(len(found), 'weight')} of {len(copies):,}"
    return (Note(Outcome.KEPT, what, f"{why}; {written}", len(found)),)


def _deviation(reader: TensorReader, weight: TensorEntry, master: TensorEntry, start: int, stop: int) -> float:
    """The largest difference among elements ``start`` to ``stop`` that is more than rounding; 0 where there is none."""
    bits = [_read(reader, each, weight.dtype, start, stop).view(_BITS[weight.dtype]) for each in (weight, master)]
    if np.array_equal(bits[0], bits[1]):
        return 0.0
    sign = np.iinfo(bits[0].dtype).min
    order = [np.where(each < 0, int(sign) - each.astype(np.int64), each) for each in bits]
    is_more = np.abs(order[0] - order[1]) > 1
    if not is_more.any():
        return 0.0
    values = [_read(reader, each, DType.FLOAT32, start, stop).view(np.float32)[is_more] for each in (weight, master)]
    deviations = np.abs(values[0].astype(np.float64) - values[1])
    return float(np.nan_to_num(deviations, nan=np.inf).max())


def _read(reader: TensorReader, entry: TensorEntry, dtype: DType, start: int, stop: int) -> NDArray[np.uint8]:
    flat = (entry.numel,)
    out = np.empty((stop - start) * dtype.item_bytes, np.uint8)
    reader.read(replace(entry, dtype=dtype), Box.whole(flat), flat, start, stop, out.data)
    return out

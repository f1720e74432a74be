"""Compares the pairs of a manifest that become one tensor, such as tied weights, before anything is written."""

from __future__ import annotations

from ckpt_tools.core.boxes import Box
from ckpt_tools.core.manifest import Manifest, TensorEntry
from ckpt_tools.errors import DifferenceError
from ckpt_tools.stores.source import Store
from ckpt_tools.transfer.tensor_reader import TensorReader

BLOCK_BYTES = 1 << 20


def check_equal(manifest: Manifest, store: Store) -> None:
    """Raises DifferenceError for the first pair of ``must_equal`` whose bits differ."""
    if not manifest.must_equal:
        return
    reader = TensorReader(store, BLOCK_BYTES, compares_records=False)
    for pair in manifest.must_equal:
        if not _is_equal(reader, pair.first, pair.second):
            advice = f"; {pair.advice}" if pair.advice else ""
            raise DifferenceError(f"{pair.what}: their bits differ, and must be the same{advice}")


def _is_equal(reader: TensorReader, one: TensorEntry, other: TensorEntry) -> bool:
    if one.numel != other.numel or one.dtype is not other.dtype:
        return False
    step = BLOCK_BYTES // one.dtype.item_bytes
    return all(
        _block(reader, one, start, min(start + step, one.numel))
        == _block(reader, other, start, min(start + step, one.numel))
        for start in range(0, one.numel, step)
    )


def _block(reader: TensorReader, entry: TensorEntry, start: int, stop: int) -> bytearray:
    block = bytearray((stop - start) * entry.dtype.item_bytes)
    flat = (entry.numel,)
    reader.read(entry, Box.whole(flat), flat, start, stop, memoryview(block))
    return block

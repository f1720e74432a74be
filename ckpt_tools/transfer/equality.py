"""Compares the pairs of a manifest that become one tensor, such as tied weights, before anything is written."""

from __future__ import annotations

from ckpt_tools.core.boxes import Box
from ckpt_tools.core.manifest import Manifest, TensorEntry
from ckpt_tools.errors import DifferenceError
from ckpt_tools.stores.source import Store
from ckpt_tools.transfer.tensor_reader import TensorReader

BLOCK_BYTES = 1 << 20


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
    return all(
        _read_block(reader, first, start, min(start + block_elements, first.numel))
        == _read_block(reader, second, start, min(start + block_elements, first.numel))
        for start in range(0, first.numel, block_elements)
    )


def _read_block(reader: TensorReader, entry: TensorEntry, start: int, stop: int) -> bytearray:
    block = bytearray((stop - start) * entry.dtype.item_bytes)
    flat = (entry.numel,)
    reader.read(entry, Box.whole(flat), flat, start, stop, memoryview(block))
    return block

"""Elements of a checkpoint into the memory of torch tensors: any dtype, any device, any strides.

Where a tensor is a contiguous piece of the host's memory the store reads straight into it. Others are filled through a
buffer, block by block. torch is imported by the caller, which has a tensor.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ckpt_tools.core.boxes import Box
from ckpt_tools.core.casts import CASTABLE
from ckpt_tools.core.dtypes import DType, from_torch
from ckpt_tools.core.manifest import TensorEntry
from ckpt_tools.core.option_names import format_option
from ckpt_tools.core.quantized import is_low_precision
from ckpt_tools.errors import UnsupportedError
from ckpt_tools.transfer.buffers import populate_pages
from ckpt_tools.transfer.tensor_reader import TensorReader

if TYPE_CHECKING:
    import torch

BLOCK_BYTES = 16 << 20
"""What a thread reads before it is copied to a device; the eight ranks of a node have four such blocks each."""

NUM_READERS = 4
"""Threads of a rank. One alone waits for the disk, or spends as long on copying from the page cache."""

SCRATCH_BYTES = 4 << 20
"""Size of each buffer of a tensor reader, for elements that are cast or that lie strided in their files."""


def to_torch_dtype(dtype: DType) -> torch.dtype:
    """The same dtype of torch. Raises UnsupportedError where this torch has none."""
    import torch

    torch_type = getattr(torch, dtype.value, None)
    if not isinstance(torch_type, torch.dtype):
        raise UnsupportedError(f"torch {torch.__version__} does not support {dtype.value}")
    return torch_type


def make_tensor(elements: NDArray[Any], dtype: DType) -> torch.Tensor:
    """``elements``, whose bytes are of ``dtype`` whatever numpy calls them, as a tensor.

    The memory is shared. It is copied only if the elements do not lie in row-major order, as after a step.

    Raises:
        UnsupportedError: the installed torch does not have ``dtype``.
    """
    import torch

    target_dtype = to_torch_dtype(dtype)
    if not elements.size:
        return torch.empty(elements.shape, dtype=target_dtype)
    raw_bytes = np.ascontiguousarray(elements).reshape(-1).view(np.uint8)
    return torch.from_numpy(raw_bytes).view(target_dtype).reshape(elements.shape)


@dataclass(frozen=True, slots=True)
class TensorFill:
    """``target``, of the shape of ``box``, is to hold the elements of ``box`` of a tensor; ``name`` is for messages."""

    target: torch.Tensor
    entry: TensorEntry
    box: Box
    name: str


def fill_targets(fills: Iterable[TensorFill], tensor_reader: TensorReader) -> None:
    """Fill every target, several at a time, the largest first: no thread is left alone with one of them at the end.

    Raises:
        UnsupportedError: a stored dtype cannot become that of its target. StoreError, FormatError: reading failed.
    """
    largest_first = sorted(fills, key=lambda filling: filling.target.nbytes, reverse=True)
    with ThreadPoolExecutor(NUM_READERS) as pool:
        for _ in pool.map(lambda filling: fill_target(filling, tensor_reader), largest_first):
            pass


def fill_target(tensor_fill: TensorFill, tensor_reader: TensorReader) -> None:
    """Write the elements into the target, cast to its dtype. Raises as ``fill_targets`` does."""
    import torch

    dtype = _choose_read_dtype(tensor_fill)
    with torch.no_grad():
        _fill_box(tensor_fill.target.detach(), tensor_reader, tensor_fill.entry.cast_to(dtype), tensor_fill.box)


def read_tensor(entry: TensorEntry, tensor_reader: TensorReader, *, name: str) -> torch.Tensor:
    """A whole tensor in the host's memory, in its own dtype."""
    import torch

    tensor = torch.empty(entry.shape, dtype=to_torch_dtype(entry.dtype))
    fill_target(TensorFill(tensor, entry, Box.whole(entry.shape), name), tensor_reader)
    return tensor


def _choose_read_dtype(tensor_fill: TensorFill) -> DType:
    """The type to read: the wanted one where we cast to it, else the stored one if torch casts without loss of kind.

    Elements of 8 bits are not cast to floats of another type: they may be quantized, and lack their scales then.
    """
    import torch

    stored, target_dtype = tensor_fill.entry.dtype, tensor_fill.target.dtype
    castable_dtype = from_torch(str(target_dtype).removeprefix("torch."))
    if castable_dtype is stored or (castable_dtype is not None and {stored, castable_dtype} <= CASTABLE):
        return castable_dtype
    if not (is_low_precision(stored) and target_dtype.is_floating_point) and torch.can_cast(
        to_torch_dtype(stored), target_dtype
    ):
        return stored
    advice = f"; {format_option('dequantize', True)} uses its scales" if is_low_precision(stored) else ""
    raise UnsupportedError(
        f"it is stored as {stored.value}, which cannot be cast to {target_dtype}{advice}", key=tensor_fill.name
    )


def _fill_box(target: torch.Tensor, tensor_reader: TensorReader, entry: TensorEntry, box: Box) -> None:
    import torch

    # Elements are read straight into the target's memory where that is possible. A large box is cut in halves; a small
    # one is read into a block and copied, which casts, takes any strides and moves to the device.
    dtype = to_torch_dtype(entry.dtype)
    if not box.numel:
        return
    if target.device.type == "cpu" and target.is_contiguous() and target.dtype == dtype:
        target_bytes = _view_bytes(target)
        populate_pages(np.frombuffer(target_bytes, np.uint8))
        tensor_reader.read(entry, box, entry.shape, 0, box.numel, target_bytes)
    elif box.numel * entry.dtype.item_bytes > BLOCK_BYTES:
        for half in _split_box(box):
            origin = half.relative_to(box.start)
            _fill_box(target[tuple(map(slice, origin.start, origin.stop))], tensor_reader, entry, half)
    else:
        staging_block = torch.empty(box.shape, dtype=dtype)
        tensor_reader.read(entry, box, entry.shape, 0, box.numel, _view_bytes(staging_block))
        target.copy_(staging_block)


def _view_bytes(tensor: torch.Tensor) -> memoryview:
    import torch

    data: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(data)


def _split_box(box: Box) -> tuple[Box, Box]:
    dim = box.shape.index(max(box.shape))
    midpoint = (box.start[dim] + box.stop[dim]) // 2
    return (
        Box(box.start, (*box.stop[:dim], midpoint, *box.stop[dim + 1 :])),
        Box((*box.start[:dim], midpoint, *box.start[dim + 1 :]), box.stop),
    )

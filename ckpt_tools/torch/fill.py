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
from ckpt_tools.core.option_names import option
from ckpt_tools.core.quantized import is_small
from ckpt_tools.errors import UnsupportedError
from ckpt_tools.transfer.buffers import populate
from ckpt_tools.transfer.tensor_reader import TensorReader

if TYPE_CHECKING:
    import torch

BLOCK_BYTES = 16 << 20
"""What a thread reads before it is copied to a device; the eight ranks of a node have four such blocks each."""

NUM_READERS = 4
"""Threads of a rank. One alone waits for the disk, or spends as long on copying from the page cache."""

SCRATCH_BYTES = 4 << 20
"""Size of each buffer of a tensor reader, for elements that are cast or that lie strided in their files."""


def torch_dtype(dtype: DType) -> torch.dtype:
    """The same dtype of torch. Raises UnsupportedError where this torch has none."""
    import torch

    found = getattr(torch, dtype.value, None)
    if not isinstance(found, torch.dtype):
        raise UnsupportedError(f"torch {torch.__version__} does not support {dtype.value}")
    return found


def tensor_of(elements: NDArray[Any], dtype: DType) -> torch.Tensor:
    """``elements``, whose bytes are of ``dtype`` whatever numpy calls them, as a tensor.

    The memory is shared. It is copied only if the elements do not lie in row-major order, as after a step.

    Raises:
        UnsupportedError: the installed torch does not have ``dtype``.
    """
    import torch

    wanted = torch_dtype(dtype)
    if not elements.size:
        return torch.empty(elements.shape, dtype=wanted)
    raw = np.ascontiguousarray(elements).reshape(-1).view(np.uint8)
    return torch.from_numpy(raw).view(wanted).reshape(elements.shape)


@dataclass(frozen=True, slots=True)
class TensorFill:
    """``target``, of the shape of ``box``, is to hold the elements of ``box`` of a tensor; ``name`` is for messages."""

    target: torch.Tensor
    entry: TensorEntry
    box: Box
    name: str


def fill_all(fillings: Iterable[TensorFill], tensor_reader: TensorReader) -> None:
    """Fill every target, several at a time, the largest first: no thread is left alone with one of them at the end.

    Raises:
        UnsupportedError: a stored dtype cannot become that of its target. StoreError, FormatError: reading failed.
    """
    largest_first = sorted(fillings, key=lambda filling: filling.target.nbytes, reverse=True)
    with ThreadPoolExecutor(NUM_READERS) as pool:
        for _ in pool.map(lambda filling: fill(filling, tensor_reader), largest_first):
            pass


def fill(filling: TensorFill, tensor_reader: TensorReader) -> None:
    """Write the elements into the target, cast to its dtype. Raises as ``fill_all`` does."""
    import torch

    dtype = _read_dtype(filling)
    with torch.no_grad():
        _fill(filling.target.detach(), tensor_reader, filling.entry.cast(dtype), filling.box)


def read_whole(entry: TensorEntry, tensor_reader: TensorReader, *, name: str) -> torch.Tensor:
    """A whole tensor in the host's memory, in its own dtype."""
    import torch

    tensor = torch.empty(entry.shape, dtype=torch_dtype(entry.dtype))
    fill(TensorFill(tensor, entry, Box.whole(entry.shape), name), tensor_reader)
    return tensor


def _read_dtype(filling: TensorFill) -> DType:
    """The type to read: the wanted one where we cast to it, else the stored one if torch casts without loss of kind.

    Elements of 8 bits are not cast to floats of another type: they may be quantized, and lack their scales then.
    """
    import torch

    stored, wanted = filling.entry.dtype, filling.target.dtype
    found = from_torch(str(wanted).removeprefix("torch."))
    if found is stored or (found is not None and {stored, found} <= CASTABLE):
        return found
    if not (is_small(stored) and wanted.is_floating_point) and torch.can_cast(torch_dtype(stored), wanted):
        return stored
    advice = f"; {option('dequantize', True)} uses its scales" if is_small(stored) else ""
    raise UnsupportedError(
        f"it is stored as {stored.value}, which cannot be cast to {wanted}{advice}", key=filling.name
    )


def _fill(target: torch.Tensor, tensor_reader: TensorReader, entry: TensorEntry, box: Box) -> None:
    import torch

    dtype = torch_dtype(entry.dtype)
    if not box.numel:
        return
    if target.device.type == "cpu" and target.is_contiguous() and target.dtype == dtype:
        room = _bytes_of(target)
        populate(np.frombuffer(room, np.uint8))
        tensor_reader.read(entry, box, entry.shape, 0, box.numel, room)
    elif box.numel * entry.dtype.item_bytes > BLOCK_BYTES:
        for part in _halves(box):
            origin = part.relative_to(box.start)
            _fill(target[tuple(map(slice, origin.start, origin.stop))], tensor_reader, entry, part)
    else:
        block = torch.empty(box.shape, dtype=dtype)
        tensor_reader.read(entry, box, entry.shape, 0, box.numel, _bytes_of(block))
        target.copy_(block)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    import torch

    data: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(data)


def _halves(box: Box) -> tuple[Box, Box]:
    dim = box.shape.index(max(box.shape))
    middle = (box.start[dim] + box.stop[dim]) // 2
    return (
        Box(box.start, (*box.stop[:dim], middle, *box.stop[dim + 1 :])),
        Box((*box.start[:dim], middle, *box.start[dim + 1 :]), box.stop),
    )

"""Looks into the items of tensors that may not be plain, which the index of a DCP does not tell."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field

from ckpt_tools.core.boxes import Shape
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.shards import ByteRange
from ckpt_tools.errors import FormatError, UnsafeError
from ckpt_tools.formats.dcp.items import ItemFactory
from ckpt_tools.serialization.torch_zip import PICKLE_BYTES, read_item_value
from ckpt_tools.serialization.unread_tensors import explain_unreadable
from ckpt_tools.serialization.zstd import open_zstd_stream
from ckpt_tools.stores.source import Source


@dataclass(slots=True)
class ItemInspector:
    """Looks into the items of tensors that may not be plain, such as quantized ones of torchao.

    The index states shape and dtype of a tensor, and not its class. A plain tensor has an item of a known length, as
    current torch writes it. Of items of any other length, one is opened for each shape, dtype and length.
    """

    source: Source
    _plain_items: ItemFactory = field(default_factory=lambda: ItemFactory({}))
    _reasons: dict[tuple[Shape, DType, int], str | None] = field(default_factory=dict)

    def find_unread_reason(
        self, shape: Shape, dtype: DType, item_range: ByteRange, *, is_compressed: bool
    ) -> str | None:
        """Why the tensor whose piece of ``shape`` is at ``item_range`` cannot be read; None if it can.

        The length of a compressed item is its own, so that most are looked into. That of complex numbers does not tell
        whether they are conjugated.
        """
        shape, item_bytes = tuple(shape), item_range.stop - item_range.start
        may_be_conjugated = dtype in (DType.COMPLEX32, DType.COMPLEX64, DType.COMPLEX128)
        does_length_tell = not is_compressed and not may_be_conjugated
        if does_length_tell and item_bytes == self._plain_items.make_tensor_item(shape, dtype).num_bytes:
            return None
        key = (shape, dtype, item_bytes)
        if key not in self._reasons:
            self._reasons[key] = self._inspect_item(item_range, is_compressed=is_compressed)
        return self._reasons[key]

    def _inspect_item(self, item_range: ByteRange, *, is_compressed: bool) -> str | None:
        """Reason from the item's pickle; None if it is damaged, which reading finds."""
        size = item_range.stop - item_range.start

        def read_range(start: int, stop: int) -> bytes:
            return self.source.read(item_range.file, item_range.start + start, item_range.start + stop)

        with suppress(FormatError, UnsafeError):
            if is_compressed:
                head = open_zstd_stream(read_range, size, item_range.file).read(PICKLE_BYTES)
            else:
                head = read_range(0, min(PICKLE_BYTES, size))
            return explain_unreadable(read_item_value(head, item_range.file))
        return None

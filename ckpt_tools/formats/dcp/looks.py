"""Looks into the items of tensors that may not be plain, such as quantized ones of torchao.

The index says shape and dtype of a tensor, and not its class. A plain tensor has an item of a known length, as current
torch writes it. Of items of any other length one is looked into for each shape, dtype and length.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field

from ckpt_tools.core.boxes import Shape
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.shards import ByteRange
from ckpt_tools.errors import FormatError, UnsafeError
from ckpt_tools.formats.dcp.items import Items
from ckpt_tools.serialization.torch_zip import PICKLE_BYTES, value_at_start
from ckpt_tools.serialization.unread_tensors import why_unread
from ckpt_tools.serialization.zstd import inflating
from ckpt_tools.stores.source import Source


@dataclass(slots=True)
class Looks:
    """Results of looking into items of a source, each looked into once."""

    source: Source
    _plain: Items = field(default_factory=lambda: Items({}))
    _known: dict[tuple[Shape, DType, int], str | None] = field(default_factory=dict)

    def why_unread(self, shape: Shape, dtype: DType, at: ByteRange, *, is_compressed: bool) -> str | None:
        """Why the tensor whose piece of ``shape`` is at ``at`` cannot be read; None if it can.

        The length of a compressed item is its own, so that most are looked into. That of complex numbers does not tell
        whether they are conjugated.
        """
        shape, length = tuple(shape), at.stop - at.start
        may_be_flagged = dtype in (DType.COMPLEX32, DType.COMPLEX64, DType.COMPLEX128)
        if not is_compressed and not may_be_flagged and length == self._plain.tensor(shape, dtype).num_bytes:
            return None
        key = (shape, dtype, length)
        if key not in self._known:
            self._known[key] = self._look(at, is_compressed=is_compressed)
        return self._known[key]

    def _look(self, at: ByteRange, *, is_compressed: bool) -> str | None:
        """Reason from the item's pickle; None if it is damaged, which reading finds."""
        size = at.stop - at.start

        def read(start: int, stop: int) -> bytes:
            return self.source.read(at.file, at.start + start, at.start + stop)

        with suppress(FormatError, UnsafeError):
            if is_compressed:
                head = inflating(read, size, at.file).read(PICKLE_BYTES)
            else:
                head = read(0, min(PICKLE_BYTES, size))
            return why_unread(value_at_start(head, at.file))
        return None

"""Forward passes of sizes whose answers have the same bits.

For another number of rows a matrix product may use another kernel and round differently. A pass of the full size is
what answers are defined by. Smaller passes are used where they gave the same bits for random rows: evidence, no proof.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .images import ImageReading
from .options import ExactMode
from .results import Array, ModelInput

MAX_SHAPES = 256  # shapes of rows whose sizes of passes are measured, each at its first request

ForwardCall = Callable[[Tensor], Tensor]  # of rows [n, ...], with the first dimension kept


@dataclass(frozen=True, slots=True, eq=False)
class ForwardPasses:
    """Divides rows into passes of at most ``full_size`` rows, padded with copies of the last row to a size of
    ``exact``, and to at least ``min_size`` rows."""

    full_size: int
    exact: ExactMode = "full"
    min_size: int = 1
    _sizes: dict[str, tuple[int, ...]] = field(default_factory=dict, init=False, repr=False)

    @property
    def sizes(self) -> Mapping[str, tuple[int, ...]]:
        """Sizes of passes by the shape of a row, for the shapes that were predicted."""
        return dict(self._sizes)

    def run(self, rows: Tensor, forward: ForwardCall, draw_rows: Callable[[int], Tensor]) -> Tensor:
        """``forward`` of ``rows``. ``draw_rows`` makes that many rows of the same shape, with values such as the model
        takes."""
        chunks = self.split_rows(rows, forward, draw_rows)
        return torch.cat([forward(chunk)[:num_kept] for chunk, num_kept in chunks])

    def split_rows(
        self, rows: Tensor, probe: ForwardCall, draw_rows: Callable[[int], Tensor]
    ) -> Iterator[tuple[Tensor, int]]:
        """The rows of each pass, and how many of them are not padding. ``probe`` is a forward pass whose bits are
        compared."""
        shape = "x".join(map(str, rows.shape[1:]))
        for numbers, num_kept in self.split_numbers(len(rows), shape, probe, lambda: draw_rows(self.full_size)):
            yield rows[numbers], num_kept

    def split_numbers(
        self, num_rows: int, shape: str, probe: ForwardCall, draw_full_pass: Callable[[], Tensor]
    ) -> Iterator[tuple[Tensor, int]]:
        """The numbers of the rows of each pass, for ``num_rows`` rows of ``shape``, and how many of them are not
        padding. ``probe`` is a forward pass of the rows of ``draw_full_pass``, whose bits are compared."""
        for start in range(0, num_rows, self.full_size):
            num_kept = min(self.full_size, num_rows - start)
            size = self._choose_size(num_kept, shape, probe, draw_full_pass)
            yield torch.arange(start, start + size).clamp(max=start + num_kept - 1), num_kept

    def _choose_size(self, num_rows: int, shape: str, probe: ForwardCall, draw_full_pass: Callable[[], Tensor]) -> int:
        if self.exact == "off":
            return max(num_rows, self.min_size)
        if shape not in self._sizes and len(self._sizes) >= MAX_SHAPES:
            return self.full_size
        if shape not in self._sizes:
            is_full = self.exact == "full"
            self._sizes[shape] = (self.full_size,) if is_full else self._measure_sizes(probe, draw_full_pass)
        return next(size for size in self._sizes[shape] if size >= num_rows)

    def _measure_sizes(self, probe: ForwardCall, draw_full_pass: Callable[[], Tensor]) -> tuple[int, ...]:
        try:
            return find_agreeing_sizes(probe, draw_full_pass(), self.min_size)
        except Exception:
            # A model may take only some of the inputs that have the right shape.
            return (self.full_size,)


class BatchedTask:
    """Properties of a task that follow from its ``passes``. Tasks of images and of texts override others."""

    __slots__ = ()

    passes: ForwardPasses

    @property
    def reading(self) -> ImageReading | None:
        return None

    @property
    def max_bytes(self) -> int | None:
        return None

    @property
    def max_batch(self) -> int:
        return self.passes.full_size

    @property
    def is_exact(self) -> bool:
        return self.passes.exact != "off"

    @property
    def batch_sizes(self) -> Mapping[str, tuple[int, ...]]:
        return self.passes.sizes

    def prepare(self, pixels: Array) -> ModelInput:
        raise NotImplementedError


@torch.inference_mode()
def find_agreeing_sizes(forward: ForwardCall, rows: Tensor, min_size: int = 1) -> tuple[int, ...]:
    """Batch sizes that change no bit: ``len(rows)``, and smaller powers of two, at least ``min_size``. Passes of the
    first and of the last rows in such a size give the bits of one pass of all rows."""
    full_size = len(rows)
    all_outputs = forward(rows)
    smaller = [2**power for power in range(full_size.bit_length()) if min_size <= 2**power < full_size]

    def has_same_bits(start: int, size: int) -> bool:
        part = slice(start, start + size)
        return _copy_bytes(forward(rows[part])) == _copy_bytes(all_outputs[part])

    return (*(size for size in smaller if has_same_bits(0, size) and has_same_bits(full_size - size, size)), full_size)


def _copy_bytes(outputs: Tensor) -> bytes:
    return outputs.contiguous().view(torch.uint8).cpu().numpy().tobytes()


def pack_bytes(outputs: Mapping[str, Tensor]) -> Tensor:
    """The bytes of several outputs, uint8 [n, bytes]."""
    num_rows = len(next(iter(outputs.values())))
    parts = [each.reshape(num_rows, each[0].numel()).contiguous() for each in outputs.values()]
    return torch.cat([part.view(torch.uint8) for part in parts if part.shape[1]], 1)

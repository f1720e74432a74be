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
from .options import Exact
from .results import Array, ModelInput

MAX_SHAPES = 256  # shapes of rows whose sizes of passes are measured, each at its first request

Forward = Callable[[Tensor], Tensor]  # of rows [n, ...], with the first dimension kept


@dataclass(frozen=True, slots=True, eq=False)
class Passes:
    """Divides rows into passes of at most ``full`` rows, padded with copies of the last row to a size of ``exact``, and
    to at least ``least`` rows."""

    full: int
    exact: Exact = "full"
    least: int = 1
    _sizes: dict[str, tuple[int, ...]] = field(default_factory=dict, init=False, repr=False)

    @property
    def sizes(self) -> Mapping[str, tuple[int, ...]]:
        """Sizes of passes by the shape of a row, for the shapes that were predicted."""
        return dict(self._sizes)

    def run(self, rows: Tensor, forward: Forward, random: Callable[[int], Tensor]) -> Tensor:
        """``forward`` of ``rows``. ``random`` makes that many rows of the same shape, with values such as the model
        takes."""
        chunks = self.split_rows(rows, forward, random)
        return torch.cat([forward(chunk)[:kept] for chunk, kept in chunks])

    def split_rows(self, rows: Tensor, probe: Forward, random: Callable[[int], Tensor]) -> Iterator[tuple[Tensor, int]]:
        """The rows of each pass, and how many of them are not padding. ``probe`` is a forward pass whose bits are
        compared."""
        shape = "x".join(map(str, rows.shape[1:]))
        for numbers, kept in self.split_numbers(len(rows), shape, probe, lambda: random(self.full)):
            yield rows[numbers], kept

    def split_numbers(
        self, many: int, shape: str, probe: Forward, random: Callable[[], Tensor]
    ) -> Iterator[tuple[Tensor, int]]:
        """The numbers of the rows of each pass, for ``many`` rows of ``shape``, and how many of them are not padding.
        ``probe`` is a forward pass of rows of ``random``, whose bits are compared."""
        for start in range(0, many, self.full):
            kept = min(self.full, many - start)
            size = self._fitting_size(kept, shape, probe, random)
            yield torch.arange(start, start + size).clamp(max=start + kept - 1), kept

    def _fitting_size(self, many: int, shape: str, probe: Forward, random: Callable[[], Tensor]) -> int:
        if self.exact == "off":
            return max(many, self.least)
        if shape not in self._sizes and len(self._sizes) >= MAX_SHAPES:
            return self.full
        if shape not in self._sizes:
            self._sizes[shape] = (self.full,) if self.exact == "full" else self._measure_sizes(probe, random)
        return next(size for size in self._sizes[shape] if size >= many)

    def _measure_sizes(self, probe: Forward, random: Callable[[], Tensor]) -> tuple[int, ...]:
        try:
            return find_agreeing_sizes(probe, random(), self.least)
        except Exception:
            # A model may take only some of the inputs that have the right shape.
            return (self.full,)


class InPasses:
    """The properties of a task that follow from its ``passes``, for a task of tensors."""

    __slots__ = ()

    passes: Passes

    @property
    def reading(self) -> ImageReading | None:
        return None

    @property
    def max_bytes(self) -> int | None:
        return None

    @property
    def max_batch(self) -> int:
        return self.passes.full

    @property
    def is_exact(self) -> bool:
        return self.passes.exact != "off"

    @property
    def batch_sizes(self) -> Mapping[str, tuple[int, ...]]:
        return self.passes.sizes

    def prepare(self, pixels: Array) -> ModelInput:
        raise NotImplementedError


@torch.inference_mode()
def find_agreeing_sizes(forward: Forward, rows: Tensor, least: int = 1) -> tuple[int, ...]:
    """Powers of two from ``least`` and below ``len(rows)`` as whose passes the first and the last of ``rows`` have the
    bits of one pass of all, and ``len(rows)``."""
    full = len(rows)
    whole = forward(rows)
    smaller = [2**power for power in range(full.bit_length()) if least <= 2**power < full]

    def has_same_bits(start: int, size: int) -> bool:
        part = slice(start, start + size)
        return _bits_of(forward(rows[part])) == _bits_of(whole[part])

    return (*(size for size in smaller if has_same_bits(0, size) and has_same_bits(full - size, size)), full)


def _bits_of(found: Tensor) -> bytes:
    return found.contiguous().view(torch.uint8).cpu().numpy().tobytes()


def pack_bytes(outputs: Mapping[str, Tensor]) -> Tensor:
    """The bytes of several outputs, uint8 [n, bytes]."""
    many = len(next(iter(outputs.values())))
    parts = [each.reshape(many, each[0].numel()).contiguous() for each in outputs.values()]
    return torch.cat([part.view(torch.uint8) for part in parts if part.shape[1]], 1)

"""The average of tensors of one shape, computed while they are read, and its rule. Pure.

Sources are added in their order, element by element, so that the bits of the result depend on nothing else: not on the
ranks of the sources, nor on how a conversion is cut into tasks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckpt_tools.core.boxes import Box
from ckpt_tools.core.casts import cast_into, is_finite
from ckpt_tools.core.dtypes import DType, to_numpy
from ckpt_tools.core.manifest import MAX_PIECE, RegionwiseTensor, TensorEntry
from ckpt_tools.core.option_names import format_option
from ckpt_tools.errors import DifferenceError, UsageError
from ckpt_tools.messages.wording import join_names

MAX_OPERAND_BYTES = 8 << 20
"""Bytes of all operands that a thread holds at once, whatever their number."""

MIN_PIECE = 1 << 12
"""The fewest elements that are computed at once: smaller reads cost more than what they read."""

BLOCK = 1 << 16
"""Elements that are added up at once: the sum and one operand, 256 KiB each in float32, stay in the processor's
cache."""


@dataclass(frozen=True, slots=True)
class AverageRule:
    """The average of the sources ``s_1`` to ``s_K``. ``divisors`` has a number for each source but the first.

        without decay    a_1 = s_1,  a_k = a_(k-1) + (s_k - a_(k-1)) / divisor_k
        with decay       a_1 = s_1,  a_k = decay a_(k-1) + (1 - decay) s_k

    With coefficients ``c``, ``divisor_k`` is ``(c_1 + ... + c_k) / c_k``, so that the result is ``sum(c s) / sum(c)``.
    Equal coefficients give the divisors 2, 3, ..., and so the formula of ``torch.optim.swa_utils.AveragedModel``; that
    of ``decay`` is ``get_ema_avg_fn``.
    """

    divisors: tuple[float, ...]
    decay: float | None = None

    @classmethod
    def of(cls, num_sources: int, coefficients: Sequence[float] = (), decay: float | None = None) -> AverageRule:
        """The rule for ``num_sources`` sources, with equal coefficients if none are given. Raises UsageError."""
        if coefficients and decay is not None:
            raise UsageError(f"{format_option('coefficients')} and {format_option('decay')} contradict each other")
        if decay is not None and not 0 < decay < 1:
            raise UsageError(f"{format_option('decay', decay)} is not between 0 and 1")
        if coefficients and len(coefficients) != num_sources:
            raise UsageError(
                f"{format_option('coefficients')} has {len(coefficients)} numbers for {num_sources} sources; give one "
                "for each, in their order"
            )
        coefficients = coefficients or (1,) * num_sources
        sums = list(accumulate(coefficients))
        if not all(each > 0 for each in coefficients) or not isfinite(sums[-1]):
            raise UsageError(
                f"{format_option('coefficients')} has a number that is not positive and finite; leave out a source "
                "that does not count"
            )
        return cls(tuple(total / each for total, each in zip(sums[1:], coefficients[1:], strict=True)), decay)

    def average_into(self, parts: Sequence[NDArray[Any]], total: NDArray[Any], scratch: NDArray[Any]) -> None:
        """Fill ``total`` with the average of ``parts``. All arrays have the type of ``total``; ``scratch`` is
        overwritten."""
        number, previous = total.dtype.type, parts[0]
        with np.errstate(all="ignore"):
            for divisor, part in zip(self.divisors, parts[1:], strict=True):
                if self.decay is None:
                    np.subtract(part, previous, out=scratch)
                    np.divide(scratch, number(divisor), out=scratch)
                    np.add(previous, scratch, out=total)
                else:
                    np.multiply(previous, number(self.decay), out=total)
                    np.multiply(part, number(1 - self.decay), out=scratch)
                    np.add(total, scratch, out=total)
                previous = total


@dataclass(frozen=True, slots=True)
class Averaging:
    """An average: where the sources before the last are, and the rule."""

    earlier: tuple[str | Path, ...]
    rule: AverageRule


@dataclass(frozen=True, slots=True, eq=False)
class Average(RegionwiseTensor):
    """The average of all operands by ``rule``, in float32, or in float64 if one of them is of that type. Errors call
    it ``name``, and the sources ``labels``."""

    rule: AverageRule
    name: str
    labels: tuple[str, ...]

    @classmethod
    def of(cls, entries: Sequence[TensorEntry], rule: AverageRule, name: str, labels: Sequence[str]) -> Average:
        """The average of tensors of one shape and of floating-point types, in the order of ``rule``."""
        dtype = DType.FLOAT64 if any(entry.dtype is DType.FLOAT64 for entry in entries) else DType.FLOAT32
        operands = tuple(entry.cast_to(dtype) for entry in entries)
        return cls(entries[-1].shape, dtype, operands, rule, name, tuple(labels))

    def get_operand_regions(self, box: Box) -> Sequence[Box]:
        return (box,) * len(self.operands)

    @property
    def can_cast(self) -> bool:
        return True

    def compute_box(self, box: Box, operand_values: Sequence[NDArray[Any]], out: NDArray[Any]) -> None:
        parts, elements = [each.reshape(-1) for each in operand_values], out.reshape(-1)
        scratch, sums = np.empty((2, min(BLOCK, box.numel)), to_numpy(self.dtype))
        for start in range(0, box.numel, BLOCK):
            block = elements[start : start + BLOCK]
            total = block if block.dtype == sums.dtype else sums[: len(block)]
            blocks = [part[start : start + BLOCK] for part in parts]
            self.rule.average_into(blocks, total, scratch[: len(block)])
            if not is_finite(total):
                self._keep_agreed_infinities(blocks, total)
            if total is not block:
                target = block.view(np.uint8)
                cast_into(total.view(np.uint8), self.dtype, target.data, DType(out.dtype.name))

    def _keep_agreed_infinities(self, parts: Sequence[NDArray[Any]], total: NDArray[Any]) -> None:
        """Write into ``total`` each infinity that all parts share, as masks do. Raises DifferenceError where they
        differ: one NaN would be in the model without a word."""
        places = ~np.isfinite(total)
        agreed = parts[0][places]
        if not all(np.array_equal(part[places], agreed) for part in parts):
            found = [
                label for label, part in zip(self.labels, parts, strict=True) if not np.isfinite(part[places]).all()
            ]
            why = f"NaN or infinities are in {join_names(found)}" if found else "its elements are too large to be added"
            way = f"leave out the sources that ckpt-tools check finds, or name a buffer with {format_option('buffers')}"
            raise DifferenceError(f"{self.name} would not be finite in the average: {why}; {way}")
        total[places] = agreed

    @property
    def max_piece_numel(self) -> int:
        """``MAX_OPERAND_BYTES`` for all operands. A power of two: most tasks begin where a piece does, and cut none."""
        fitting_numel = MAX_OPERAND_BYTES // (len(self.operands) * self.dtype.item_bytes)
        return min(MAX_PIECE, max(MIN_PIECE, 1 << fitting_numel.bit_length() - 1))

    @property
    def working_bytes(self) -> int:
        # The operands and a piece that is kept; blocks of the reader that are cast and placed, and those of the sum.
        return (len(self.operands) + 1) * self.max_piece_numel * self.dtype.item_bytes + (3 << 20)

"""A Llama of a wanted number of parameters."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

NUM_HEADS = 4
ELEMENTS_PER_SQUARE = 350
"""Parameters over the square of the hidden size: 374 M at 1,024, in 24 layers, as published models of that size."""


@dataclass(frozen=True, slots=True)
class Llama:
    """The sizes that decide the shapes; all are multiples of 16, so that 4 or 8 ranks may cut any dim evenly."""

    hidden: int
    layers: int

    @classmethod
    def of(cls, num_elements: int) -> Llama:
        """Of about so many parameters."""
        hidden = max(64, 64 * round(sqrt(num_elements / ELEMENTS_PER_SQUARE) / 64))
        empty = cls(hidden, 0)
        return cls(hidden, max(1, round((num_elements - empty.num_elements) / empty.elements_per_layer)))

    @property
    def ffn(self) -> int:
        return 11 * self.hidden // 4

    @property
    def vocab(self) -> int:
        return 31 * self.hidden

    @property
    def elements_per_layer(self) -> int:
        return 4 * self.hidden**2 + 3 * self.hidden * self.ffn + 2 * self.hidden

    @property
    def num_elements(self) -> int:
        return 2 * self.vocab * self.hidden + self.hidden + self.layers * self.elements_per_layer

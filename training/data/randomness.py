"""Random number generators of Python, NumPy and torch, seeded before each step and each sample.

So a run that is continued draws the numbers of one that was not interrupted, and no state has to be saved.
"""

from __future__ import annotations

import random

import numpy as np
import torch

_MASK = 2**64 - 1


def begin(seed: int, first: int, second: int) -> None:
    """Seed all generators from three numbers, such as the run's seed, the step and the rank's share of the samples.
    Ranks that compute each layer together need the same ones."""
    mixed = _mixed(_mixed(_mixed(seed) ^ first) ^ second)
    random.seed(mixed)
    np.random.seed([mixed & 0xFFFFFFFF, mixed >> 32])
    torch.default_generator.manual_seed(mixed)  # torch.manual_seed takes 90 us
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(mixed)


def _mixed(value: int) -> int:
    """The 64 bits of splitmix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ value >> 27) * 0x94D049BB133111EB) & _MASK
    return value ^ value >> 31

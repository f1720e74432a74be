"""Random number generators of Python, NumPy and torch, seeded before each step and each sample.

So a run that is continued draws the numbers of one that was not interrupted, and no state has to be saved.
"""

from __future__ import annotations

import random
from hashlib import blake2b

import numpy as np
import torch


def begin(seed: int, first: int, second: int) -> None:
    """Seed all generators from three numbers, such as the run's seed, the step and the rank's share of the samples.
    Ranks that compute each layer together need the same ones."""
    mixed = int.from_bytes(blake2b(f"{seed} {first} {second}".encode(), digest_size=8).digest())
    random.seed(mixed)
    np.random.seed([mixed & 0xFFFFFFFF, mixed >> 32])
    torch.default_generator.manual_seed(mixed)  # torch.manual_seed takes 90 us
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(mixed)

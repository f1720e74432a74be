"""Random number generators of Python, NumPy and torch on all ranks, as one string of 20 kB per rank.

Every checkpoint format keeps a string unchanged.
"""

from __future__ import annotations

import base64
import json
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor


def gathered() -> str:
    """States of all ranks in their order, on every rank; collective."""
    states: list[dict[str, Any] | None] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(states, _state())
    return json.dumps(states)


def restore(rng: str | None, *, seed: int, step: int, stream: int) -> None:
    """Restore this rank's generators from ``rng``, if the world size is the same. Otherwise, and in a new run, seed
    them by ``seed``, ``step`` and ``stream``, which ranks that compute each layer together share."""
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    states = [] if rng is None else json.loads(rng)
    if len(states) == world_size:
        _set(states[rank])
    else:
        _begin(seed, step, stream)


def _state() -> dict[str, Any]:
    name, keys, *rest = np.random.get_state()
    cuda = _text(torch.cuda.get_rng_state()) if torch.cuda.is_available() else None
    return {
        "python": random.getstate(),
        "numpy": [name, np.asarray(keys).tolist(), *rest],
        "torch": _text(torch.get_rng_state()),
        "cuda": cuda,
    }


def _set(state: dict[str, Any]) -> None:
    version, keys, gauss = state["python"]
    random.setstate((version, tuple(keys), gauss))
    name, numbers, *rest = state["numpy"]
    np.random.set_state((name, np.array(numbers, dtype=np.uint32), *rest))
    torch.set_rng_state(_tensor(state["torch"]))
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(_tensor(state["cuda"]))


def _begin(seed: int, step: int, stream: int) -> None:
    first, second, third = np.random.SeedSequence([seed, step, stream]).generate_state(3).tolist()
    random.seed(first)
    np.random.seed(second)
    torch.manual_seed(third)


def _text(state: Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _tensor(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)

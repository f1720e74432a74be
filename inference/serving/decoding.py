"""Decoding of what is posted: in threads, and large images one at a time, so that memory is bounded and small ones need
not wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from ..models.images import LARGE_PIXELS
from ..models.predictor import Predictor
from ..models.results import ModelInput
from .batching import QueueFullError

TINY_BYTES, TINY_PIXELS = 2**14, 2**14
"""Limits of an image that is decoded at once: a thread would cost more than the decoder."""

NUM_THREADS = 4
MAX_WAITING_LARGE = 16  # each holds its file in memory

Result = TypeVar("Result")


@dataclass(eq=False, slots=True)
class InputDecoder:
    """Decodes in threads for images and texts, and in one for large images."""

    _usual_pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(NUM_THREADS, "decode"))
    _large_pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "decode-large"))
    _num_waiting_large: int = 0

    async def decode(self, predictor: Predictor, data: bytes, name: str) -> ModelInput:
        """The result of ``predictor.decode``, which may raise. Raises QueueFullError if too many large images wait."""
        reading = predictor.task.reading
        if reading is None:
            return await self._run_in_pool(self._usual_pool, lambda: predictor.decode(data, name))
        size = reading.count_pixels(data)
        if reading.is_input and len(data) <= TINY_BYTES and size <= TINY_PIXELS:
            return predictor.decode(data, name)
        if size <= LARGE_PIXELS:
            return await self._run_in_pool(self._usual_pool, lambda: predictor.decode(data, name))
        if self._num_waiting_large >= MAX_WAITING_LARGE:
            raise QueueFullError
        self._num_waiting_large += 1
        try:
            return await self._run_in_pool(self._large_pool, lambda: predictor.decode(data, name))
        finally:
            self._num_waiting_large -= 1

    async def _run_in_pool(self, pool: ThreadPoolExecutor, decode: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(pool, decode)

    def close(self) -> None:
        for pool in (self._usual_pool, self._large_pool):
            pool.shutdown(wait=False, cancel_futures=True)

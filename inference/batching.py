"""Requests that arrive one by one are predicted together: a bounded queue in front of one thread that runs the model.

While the model is at work, requests wait, and the next forward pass takes as many of them as fit. Nobody waits for a
batch to fill up. A forward pass has a fixed shape, so the company that an image is predicted in changes no bit of its
answer (see :mod:`training.evaluation`), and thirty waiting images cost what one does.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Generic, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


class QueueFullError(Exception):
    """As many requests wait as may: the client should come again."""


@dataclass(eq=False, slots=True)
class _Waiting(Generic[Item, Result]):
    """One item, and the request that waits for its result. ``is_gone`` once nobody does any more."""

    item: Item
    loop: asyncio.AbstractEventLoop
    result: asyncio.Future[Result]
    is_gone: bool = False

    def answer(self, result: Result) -> None:
        self._tell(lambda: self.result.set_result(result))

    def fail(self, error: BaseException) -> None:
        self._tell(lambda: self.result.set_exception(error))

    def _tell(self, set_: Callable[[], None]) -> None:
        def once() -> None:
            if not self.result.done():
                set_()

        try:
            self.loop.call_soon_threadsafe(once)
        except RuntimeError:
            # The loop is closed: the service has ended, and with it whoever waited.
            self.is_gone = True


@dataclass(slots=True)
class Batcher(Generic[Item, Result]):
    """``work`` gets at most ``max_batch`` items and gives a result for each, in order. At most ``max_waiting`` items
    wait. Use as a context manager: its thread ends with the block, after what it has begun."""

    work: Callable[[Sequence[Item]], Sequence[Result]]
    max_batch: int
    max_waiting: int
    _queue: deque[_Waiting[Item, Result]] = field(default_factory=deque, init=False, repr=False)
    _changed: threading.Condition = field(default_factory=threading.Condition, init=False, repr=False)
    _is_closed: bool = field(default=False, init=False, repr=False)
    _thread: threading.Thread | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.max_batch < 1 or self.max_waiting < 1:
            raise ValueError(f"a batch of {self.max_batch} and a queue of {self.max_waiting}: both must be at least 1")

    def __enter__(self) -> Batcher[Item, Result]:
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="batcher", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        assert self._thread is not None
        self._thread.join()

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    async def submit(self, item: Item) -> Result:
        """The result for ``item``. A caller that is cancelled takes its item out of the queue.

        Raises:
            QueueFullError: too many wait. What ``work`` raises, for every item of its batch.
        """
        loop = asyncio.get_running_loop()
        waiting: _Waiting[Item, Result] = _Waiting(item, loop, loop.create_future())
        self._put(waiting)
        try:
            return await waiting.result
        except asyncio.CancelledError:
            self._withdraw(waiting)
            raise

    def _put(self, waiting: _Waiting[Item, Result]) -> None:
        with self._changed:
            if self._is_closed or len(self._queue) >= self.max_waiting:
                raise QueueFullError
            self._queue.append(waiting)
            self._changed.notify()

    def _withdraw(self, waiting: _Waiting[Item, Result]) -> None:
        with self._changed:
            waiting.is_gone = True
            if waiting in self._queue:
                self._queue.remove(waiting)

    def _run(self) -> None:
        while batch := self._next_batch():
            self._answer([waiting for waiting in batch if not waiting.is_gone])

    def _next_batch(self) -> list[_Waiting[Item, Result]]:
        """The items that wait longest, as soon as there is one; nothing at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._is_closed)
            return [self._queue.popleft() for _ in range(min(self.max_batch, len(self._queue)))]

    def _answer(self, batch: Sequence[_Waiting[Item, Result]]) -> None:
        if not batch:
            return
        try:
            results = self.work([waiting.item for waiting in batch])
        except Exception as error:
            for waiting in batch:
                waiting.fail(error)
            return
        for waiting, result in zip(batch, results, strict=True):
            waiting.answer(result)

"""Request batching: a bounded queue in front of the model.

While the model is busy, requests wait, and the next forward pass takes as many as fit; none waits for a batch to fill
up, unless ``max_delay`` says so, or the clients of the last batch are about to ask again. A model in another process
gets a full batch before it is done with the previous one, so that it never waits. Other requests in the batch change no
bit of an answer (:mod:`..models.passes`).
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Generic, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


PATIENCE = 0.25  # part of a batch's time that fewer items wait after it


class QueueFullError(Exception):
    """The queue is full; the client should retry."""


@dataclass(frozen=True, slots=True)
class Execution:
    """One call of ``work``. A batch handed over early counts as queued until the previous one was done."""

    num_items: int
    queue_seconds: float
    work_seconds: float


@dataclass(eq=False, slots=True)
class _QueuedItem(Generic[Item, Result]):
    """An item and its future. ``is_gone`` once its request was cancelled."""

    item: Item
    loop: asyncio.AbstractEventLoop
    result: asyncio.Future[Result]
    since: float = field(default_factory=time.perf_counter)
    is_gone: bool = False


@dataclass(slots=True)
class Batcher(Generic[Item, Result]):
    """Runs ``work`` on batches of at most ``max_batch`` items; it returns a result for each, in order.

    At most ``max_waiting`` items wait. A batch that is not full begins ``max_delay`` seconds after its first item came,
    or when the model is done with the one before, if that is later. ``observe`` is called after each call of ``work``.
    With two or more threads, a full batch is handed to ``work`` while it is busy. Use as a context manager: its threads
    end with the block, after the work they have begun.
    """

    work: Callable[[Sequence[Item]], Sequence[Result]]
    max_batch: int
    max_waiting: int
    observe: Callable[[Execution], None] = lambda _: None
    num_threads: int = 1
    max_delay: float = 0.0
    _queue: deque[_QueuedItem[Item, Result]] = field(default_factory=deque, init=False, repr=False)
    _changed: threading.Condition = field(default_factory=threading.Condition, init=False, repr=False)
    _is_closed: bool = field(default=False, init=False, repr=False)
    _threads: list[threading.Thread] = field(default_factory=list, init=False, repr=False)
    _num_at_work: int = field(default=0, init=False, repr=False)
    _last_end: float = field(default=0.0, init=False, repr=False)
    _last: Execution = field(default=Execution(0, 0.0, 0.0), init=False, repr=False)

    def __post_init__(self) -> None:
        if self.max_batch < 1 or self.max_waiting < 1:
            raise ValueError(f"a batch of {self.max_batch} and a queue of {self.max_waiting}: both must be at least 1")

    def __enter__(self) -> Batcher[Item, Result]:
        self._is_closed, self._num_at_work = False, 0
        self._threads = [
            threading.Thread(target=self._run, name="batcher", daemon=True) for _ in range(self.num_threads)
        ]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        self.join()

    def join(self) -> None:
        """Wait for the threads, after :meth:`close`."""
        for thread in self._threads:
            thread.join()

    @property
    def is_running(self) -> bool:
        return any(thread.is_alive() for thread in self._threads)

    def close(self) -> None:
        """Accept no more items. The threads end when the queue is empty; :meth:`join` waits for them."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    async def submit(self, item: Item) -> Result:
        """The result for ``item``. A cancelled caller takes its item out of the queue. Raises QueueFullError if too
        many wait. What ``work`` raises for this item alone."""
        return (await self.submit_all([item]))[0]

    async def submit_all(self, items: Sequence[Item]) -> list[Result]:
        """The results for ``items``, in order; either all enter the queue or none. Raises as :meth:`submit`."""
        loop = asyncio.get_running_loop()
        waiting: list[_QueuedItem[Item, Result]] = [_QueuedItem(item, loop, loop.create_future()) for item in items]
        self._enqueue(waiting)
        try:
            return [await each.result for each in waiting]
        except BaseException:
            self._withdraw(waiting)
            raise

    def _enqueue(self, waiting: Sequence[_QueuedItem[Item, Result]]) -> None:
        with self._changed:
            if self._is_closed or len(self._queue) + len(waiting) > self.max_waiting:
                raise QueueFullError
            self._queue.extend(waiting)
            self._changed.notify()

    def _withdraw(self, waiting: Sequence[_QueuedItem[Item, Result]]) -> None:
        with self._changed:
            for each in waiting:
                each.is_gone = True
                if not each.result.cancel() and not each.result.cancelled():
                    each.result.exception()  # Marks it retrieved; asyncio would warn otherwise.
                if each in self._queue:
                    self._queue.remove(each)

    def _run(self) -> None:
        while batch := self._next_batch():
            self._answer([waiting for waiting in batch if not waiting.is_gone])
            with self._changed:
                self._num_at_work -= 1
                self._changed.notify()

    def _next_batch(self) -> list[_QueuedItem[Item, Result]]:
        """The longest waiting items, as soon as a batch may start; empty at the end."""
        with self._changed:
            while (seconds := self._seconds_to_wait()) is None or seconds > 0:
                self._changed.wait(seconds)
            self._num_at_work += 1
            return [self._queue.popleft() for _ in range(min(self.max_batch, len(self._queue)))]

    def _seconds_to_wait(self) -> float | None:
        """Seconds until the next batch may start; None if not before something changes. While the model is busy, only a
        full batch may start.

        Clients that were answered together ask again together. The first of them would get a batch of its own, for
        which the others had to wait; so fewer items than were in the last batch wait a part of its time.
        """
        if len(self._queue) >= self.max_batch or self._is_closed:
            return 0.0
        if not self._queue or self._num_at_work:
            return None
        due = self._queue[0].since + self.max_delay
        if len(self._queue) < self._last.num_items:
            due = max(due, self._last_end + PATIENCE * self._last.work_seconds)
        return due - time.perf_counter()

    def _answer(self, batch: Sequence[_QueuedItem[Item, Result]]) -> None:
        if not batch:
            return
        begun = time.perf_counter()
        try:
            results = self.work([waiting.item for waiting in batch])
        except Exception as error:
            self._retry_alone(batch, error)
            return
        self._observe(batch, begun, time.perf_counter())
        _set_outcomes(batch, results)

    def _observe(self, batch: Sequence[_QueuedItem[Item, Result]], begun: float, ended: float) -> None:
        with self._changed:
            begun, self._last_end = max(begun, self._last_end), ended
            waited = sum(begun - waiting.since for waiting in batch)
            self._last = Execution(len(batch), waited, ended - begun)
        self.observe(self._last)

    def _retry_alone(self, batch: Sequence[_QueuedItem[Item, Result]], error: Exception) -> None:
        """Retry each item alone, so that only the one that fails gets the error."""
        if len(batch) == 1:
            _set_outcomes(batch, [error])
            return
        for waiting in batch:
            self._answer([waiting])


def _set_outcomes(batch: Sequence[_QueuedItem[Item, Result]], outcomes: Sequence[Result | Exception]) -> None:
    """Set results or errors, waking each event loop once."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[Result], Result | Exception]]] = {}
    for waiting, outcome in zip(batch, outcomes, strict=True):
        by_loop.setdefault(waiting.loop, []).append((waiting.result, outcome))
    for loop, told in by_loop.items():
        try:
            loop.call_soon_threadsafe(_set_results, told)
        except RuntimeError:
            # The loop is closed, because the service has ended.
            continue


def _set_results(told: Sequence[tuple[asyncio.Future[Result], Result | Exception]]) -> None:
    for future, outcome in told:
        if future.done():
            continue
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)

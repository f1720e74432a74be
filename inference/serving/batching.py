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


REGATHER_FRACTION = 0.25  # part of a batch's time that fewer items wait after it


class QueueFullError(Exception):
    """The queue is full; the client should retry."""


@dataclass(frozen=True, slots=True)
class Execution:
    """One call of ``process_batch``. A batch handed over early counts as queued until the previous one was done."""

    num_items: int
    queue_seconds: float
    work_seconds: float


@dataclass(eq=False, slots=True)
class _QueuedItem(Generic[Item, Result]):
    """An item and its future. ``is_cancelled`` once its request was cancelled."""

    item: Item
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Result]
    queued_at: float = field(default_factory=time.perf_counter)
    is_cancelled: bool = False


@dataclass(slots=True)
class Batcher(Generic[Item, Result]):
    """Runs ``process_batch`` on batches of at most ``max_batch`` items; it returns a result for each, in order.

    At most ``max_waiting`` items wait. A batch that is not full begins ``max_delay`` seconds after its first item came,
    or when the model is done with the one before, if that is later. ``on_execution`` is called after each call of
    ``process_batch``. With two or more threads, a full batch is handed to ``process_batch`` while it is busy. Use as a
    context manager: its threads end with the block, after the work they have begun.
    """

    process_batch: Callable[[Sequence[Item]], Sequence[Result]]
    max_batch: int
    max_waiting: int
    on_execution: Callable[[Execution], None] = lambda _: None
    num_threads: int = 1
    max_delay: float = 0.0
    _queue: deque[_QueuedItem[Item, Result]] = field(default_factory=deque, init=False, repr=False)
    _queue_changed: threading.Condition = field(default_factory=threading.Condition, init=False, repr=False)
    _is_closed: bool = field(default=False, init=False, repr=False)
    _threads: list[threading.Thread] = field(default_factory=list, init=False, repr=False)
    _num_running_batches: int = field(default=0, init=False, repr=False)
    _last_end_time: float = field(default=0.0, init=False, repr=False)
    _last_execution: Execution = field(default=Execution(0, 0.0, 0.0), init=False, repr=False)

    def __post_init__(self) -> None:
        if self.max_batch < 1 or self.max_waiting < 1:
            raise ValueError(f"a batch of {self.max_batch} and a queue of {self.max_waiting}: both must be at least 1")

    def __enter__(self) -> Batcher[Item, Result]:
        self._is_closed, self._num_running_batches = False, 0
        self._threads = [
            threading.Thread(target=self._run_thread, name="batcher", daemon=True) for _ in range(self.num_threads)
        ]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        self.join_threads()

    def join_threads(self) -> None:
        """Wait for the threads, after :meth:`close`."""
        for thread in self._threads:
            thread.join()

    @property
    def is_running(self) -> bool:
        return any(thread.is_alive() for thread in self._threads)

    def close(self) -> None:
        """Accept no more items. The threads end when the queue is empty; :meth:`join_threads` waits for them."""
        with self._queue_changed:
            self._is_closed = True
            self._queue_changed.notify_all()

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    async def submit(self, item: Item) -> Result:
        """The result for ``item``. A cancelled caller takes its item out of the queue. Raises QueueFullError if too
        many wait, and what ``process_batch`` raises for this item alone."""
        return (await self.submit_all([item]))[0]

    async def submit_all(self, items: Sequence[Item]) -> list[Result]:
        """The results for ``items``, in order; either all enter the queue or none. Raises as :meth:`submit`."""
        loop = asyncio.get_running_loop()
        entries: list[_QueuedItem[Item, Result]] = [_QueuedItem(item, loop, loop.create_future()) for item in items]
        self._enqueue(entries)
        try:
            return [await entry.future for entry in entries]
        except BaseException:
            self._withdraw(entries)
            raise

    def _enqueue(self, entries: Sequence[_QueuedItem[Item, Result]]) -> None:
        with self._queue_changed:
            if self._is_closed or len(self._queue) + len(entries) > self.max_waiting:
                raise QueueFullError
            self._queue.extend(entries)
            self._queue_changed.notify()

    def _withdraw(self, entries: Sequence[_QueuedItem[Item, Result]]) -> None:
        with self._queue_changed:
            for entry in entries:
                entry.is_cancelled = True
                if not entry.future.cancel() and not entry.future.cancelled():
                    entry.future.exception()  # Marks it retrieved; asyncio would warn otherwise.
                if entry in self._queue:
                    self._queue.remove(entry)

    def _run_thread(self) -> None:
        while batch := self._take_batch():
            self._run_batch([entry for entry in batch if not entry.is_cancelled])
            with self._queue_changed:
                self._num_running_batches -= 1
                self._queue_changed.notify()

    def _take_batch(self) -> list[_QueuedItem[Item, Result]]:
        """The longest waiting items, as soon as a batch may start; empty at the end."""
        with self._queue_changed:
            while (seconds := self._compute_seconds_to_wait()) is None or seconds > 0:
                self._queue_changed.wait(seconds)
            self._num_running_batches += 1
            return [self._queue.popleft() for _ in range(min(self.max_batch, len(self._queue)))]

    def _compute_seconds_to_wait(self) -> float | None:
        """Seconds until the next batch may start; None if not before something changes. While the model is busy, only a
        full batch may start.

        Clients that were answered together ask again together. The first of them would get a batch of its own, for
        which the others had to wait; so fewer items than were in the last batch wait a part of its time.
        """
        if len(self._queue) >= self.max_batch or self._is_closed:
            return 0.0
        if not self._queue or self._num_running_batches:
            return None
        due_time = self._queue[0].queued_at + self.max_delay
        if len(self._queue) < self._last_execution.num_items:
            due_time = max(due_time, self._last_end_time + REGATHER_FRACTION * self._last_execution.work_seconds)
        return due_time - time.perf_counter()

    def _run_batch(self, batch: Sequence[_QueuedItem[Item, Result]]) -> None:
        if not batch:
            return
        start = time.perf_counter()
        try:
            results = self.process_batch([entry.item for entry in batch])
        except Exception as error:
            self._retry_items(batch, error)
            return
        self._record_execution(batch, start, time.perf_counter())
        _set_outcomes(batch, results)

    def _record_execution(self, batch: Sequence[_QueuedItem[Item, Result]], start: float, end: float) -> None:
        with self._queue_changed:
            start, self._last_end_time = max(start, self._last_end_time), end
            queue_seconds = sum(start - entry.queued_at for entry in batch)
            self._last_execution = Execution(len(batch), queue_seconds, end - start)
        self.on_execution(self._last_execution)

    def _retry_items(self, batch: Sequence[_QueuedItem[Item, Result]], error: Exception) -> None:
        """Retry each item alone, so that only the one that fails gets the error."""
        if len(batch) == 1:
            _set_outcomes(batch, [error])
            return
        for entry in batch:
            self._run_batch([entry])


def _set_outcomes(batch: Sequence[_QueuedItem[Item, Result]], outcomes: Sequence[Result | Exception]) -> None:
    """Set results or errors, waking each event loop once."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[Result], Result | Exception]]] = {}
    for entry, outcome in zip(batch, outcomes, strict=True):
        by_loop.setdefault(entry.loop, []).append((entry.future, outcome))
    for loop, outcomes_of_loop in by_loop.items():
        try:
            loop.call_soon_threadsafe(_resolve_futures, outcomes_of_loop)
        except RuntimeError:
            # The loop is closed, because the service has ended.
            continue


def _resolve_futures(outcomes: Sequence[tuple[asyncio.Future[Result], Result | Exception]]) -> None:
    for future, outcome in outcomes:
        if future.done():
            continue
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)

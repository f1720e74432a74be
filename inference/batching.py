"""Requests that arrive one by one are predicted together: a bounded queue in front of one thread that runs the model.

While the model is at work, requests wait, and the next forward pass takes as many of them as fit. Nobody waits for a
batch to fill up. A forward pass has a fixed shape, so the company that an image is predicted in changes no bit of its
answer (see :mod:`training.evaluation`), and thirty waiting images cost what one does.
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


class QueueFullError(Exception):
    """As many requests wait as may: the client should come again."""


@dataclass(frozen=True, slots=True)
class Execution:
    """One call of ``work``: how many items it had, how long they had waited in all, and how long it took."""

    num_items: int
    queue_seconds: float
    work_seconds: float


@dataclass(eq=False, slots=True)
class _Waiting(Generic[Item, Result]):
    """One item, and the request that waits for its result. ``is_gone`` once nobody does any more."""

    item: Item
    loop: asyncio.AbstractEventLoop
    result: asyncio.Future[Result]
    since: float = field(default_factory=time.perf_counter)
    is_gone: bool = False


@dataclass(slots=True)
class Batcher(Generic[Item, Result]):
    """``work`` gets at most ``max_batch`` items and gives a result for each, in order. At most ``max_waiting`` items
    wait. ``observe`` is told of each call of ``work``. Use as a context manager: its thread ends with the block, after
    what it has begun."""

    work: Callable[[Sequence[Item]], Sequence[Result]]
    max_batch: int
    max_waiting: int
    observe: Callable[[Execution], None] = lambda _: None
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
        self.close()
        self.join()

    def join(self) -> None:
        """Wait for the thread, after :meth:`close`."""
        assert self._thread is not None
        self._thread.join()

    @property
    def is_running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def close(self) -> None:
        """Take nothing any more. The thread ends when all that waits is answered; nobody waits for that here."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    async def submit(self, item: Item) -> Result:
        """The result for ``item``. A caller that is cancelled takes its item out of the queue.

        Raises:
            QueueFullError: too many wait. What ``work`` raises for this item alone.
        """
        return (await self.submit_all([item]))[0]

    async def submit_all(self, items: Sequence[Item]) -> list[Result]:
        """The results for ``items``, in order, which are taken into the queue all or none. As :meth:`submit`."""
        loop = asyncio.get_running_loop()
        waiting: list[_Waiting[Item, Result]] = [_Waiting(item, loop, loop.create_future()) for item in items]
        self._put(waiting)
        try:
            return [await each.result for each in waiting]
        except BaseException:
            self._withdraw(waiting)
            raise

    def _put(self, waiting: Sequence[_Waiting[Item, Result]]) -> None:
        with self._changed:
            if self._is_closed or len(self._queue) + len(waiting) > self.max_waiting:
                raise QueueFullError
            self._queue.extend(waiting)
            self._changed.notify()

    def _withdraw(self, waiting: Sequence[_Waiting[Item, Result]]) -> None:
        with self._changed:
            for each in waiting:
                each.is_gone = True
                if not each.result.cancel() and not each.result.cancelled():
                    each.result.exception()  # Nobody else asks, and asyncio would complain of that.
                if each in self._queue:
                    self._queue.remove(each)

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
        begun = time.perf_counter()
        try:
            results = self.work([waiting.item for waiting in batch])
        except Exception as error:
            self._fail(batch, error)
            return
        ended = time.perf_counter()
        self.observe(Execution(len(batch), sum(begun - waiting.since for waiting in batch), ended - begun))
        _tell(batch, results)

    def _fail(self, batch: Sequence[_Waiting[Item, Result]], error: Exception) -> None:
        """The error is for the item that it comes from, and not for its company: each is tried alone."""
        if len(batch) == 1:
            _tell(batch, [error])
            return
        for waiting in batch:
            self._answer([waiting])


def _tell(batch: Sequence[_Waiting[Item, Result]], outcomes: Sequence[Result | Exception]) -> None:
    """Give everybody their result, or their error: each event loop is woken once."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[Result], Result | Exception]]] = {}
    for waiting, outcome in zip(batch, outcomes, strict=True):
        by_loop.setdefault(waiting.loop, []).append((waiting.result, outcome))
    for loop, told in by_loop.items():
        try:
            loop.call_soon_threadsafe(_set_all, told)
        except RuntimeError:
            # The loop is closed: the service has ended, and with it whoever waited.
            continue


def _set_all(told: Sequence[tuple[asyncio.Future[Result], Result | Exception]]) -> None:
    for future, outcome in told:
        if future.done():
            continue
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)

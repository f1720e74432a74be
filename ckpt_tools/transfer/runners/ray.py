"""Tasks on the processes of a Ray cluster.

Items are assigned in order, and each process works through its items in that order. So the earliest item that is not
done is always under way, or the next to be assigned; an item waits for earlier ones only, so this one never waits, and
there is no deadlock.

A lost process breaks this: its items would queue behind others that wait for them. Then nothing more is assigned,
waiting items are given back (``RayBoard.postpone``), and when none is assigned all of them are assigned again, in order
and before new ones. A loss costs the items of the lost process, those that waited, and the time of those under way.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from queue import Empty, SimpleQueue
from typing import Any, Generic

from ckpt_tools.errors import StoreError
from ckpt_tools.signals import get_first_signal, get_from_queue
from ckpt_tools.transfer.runners.base import Item, Result
from ckpt_tools.transfer.runners.ray_board import PostponedError, RayBoard, sendable

ITEMS_PER_WORKER = 2
"""One under way and one at hand, so that no worker waits for the driver: 910 empty tasks a second by 4 workers with
one, 1,190 with two, on 2 busy cores."""

MAX_LOSSES = 5
"""Processes that one item, or the start of one worker, may lose before it counts as the cause. A machine that is lost
takes its processes one after the other, and an item may meet several of them."""

START_SECONDS = 600.0
"""Seconds that a run without any worker waits: clusters that grow take minutes to add a machine."""

ENDING_SECONDS = 10.0
"""Seconds that an interrupted run waits for the processes that it killed."""


@dataclass(slots=True)
class RayRunner:
    """Up to ``num_workers`` processes of one CPU each, spread over the nodes of the cluster that Ray is connected to.

    ``cost`` says the bytes of an item, of which at most ``bytes_in_flight`` are handed out at a time; a larger item
    goes alone. Every process runs ``check`` before its first item of a run, and an error there ends the run. ``board``
    is where the work waits for other items' results, if it does.

    Processes are kept from run to run, until ``close``: one takes a second of a processor to start.
    """

    num_workers: int
    cost: Callable[[Any], int]
    bytes_in_flight: int
    check: Callable[[], None]
    board: RayBoard | None = None
    _kept: list[Any] = field(default_factory=list, repr=False)

    def __post_init__(self) -> None:
        if self.num_workers < 1:
            raise ValueError(f"{self.num_workers} workers: at least one is needed")

    def run(self, work: Callable[[Item], Result], items: Iterable[Item]) -> Generator[Result, None, None]:
        import ray

        run: _Run[Item, Result] = _Run(self, ray.put(work), enumerate(items))
        try:
            for _ in range(self.num_workers):
                run.start(self._kept.pop() if self._kept else new_process())
            yield from run.results()
        except GeneratorExit:
            run.drain() if get_first_signal() is None else run.kill()
            raise
        except BaseException:
            run.kill()
            raise
        finally:
            self._kept = [worker.process for worker in run.workers]
        if run.error is not None:
            raise run.error

    def close(self) -> None:
        """End the processes."""
        _kill(self._kept)
        self._kept = []


@dataclass(frozen=True, slots=True)
class TaskResult(Generic[Result]):
    """Outcome of an item: a result or an error, sent between processes as a value so that its class is kept."""

    result: tuple[Result, ...]
    error: BaseException | None = None


class Process:
    """One worker. An error is part of what it returns; what Ray raises is then about Ray alone."""

    def start(self, work: Callable[[Any], Any], check: Callable[[], None]) -> TaskResult[None]:
        self._work, self._has_failed = work, False
        return _task_result(check)

    def do(self, item: Any) -> TaskResult[Any]:
        """The item at hand behind one that failed is not begun."""
        if self._has_failed:
            return TaskResult((), PostponedError())
        result = _task_result(self._work, item)
        self._has_failed = not result.result and not isinstance(result.error, PostponedError)
        return result


def _task_result(work: Callable[..., Result], *arguments: Any) -> TaskResult[Result]:
    try:
        return TaskResult((work(*arguments),))
    except BaseException as error:
        return TaskResult((), sendable(error))


def new_process() -> Any:
    """The handle of a process that starts as soon as a node has a CPU free."""
    return _process_class().remote()


@cache
def _process_class() -> Any:
    """Register the class with Ray once, not once a process."""
    import ray

    return ray.remote(num_cpus=1, max_restarts=0, scheduling_strategy="SPREAD")(Process)


def _kill(processes: Iterable[Any]) -> None:
    import ray

    for process in processes:
        with suppress(ray.exceptions.RayError):
            ray.kill(process)


@dataclass(slots=True, order=True)
class _Numbered(Generic[Item]):
    """An item in its place, and how many processes were lost with it."""

    number: int
    item: Item = field(compare=False)
    num_losses: int = field(default=0, compare=False)


@dataclass(slots=True, eq=False)
class _Worker:
    process: Any
    num_losses: int
    is_lost: bool = False
    num_items: int = 0


@dataclass(frozen=True, slots=True)
class _Event(Generic[Item]):
    """An item of a worker, or without one its start, has ended as ``ended`` tells."""

    worker: _Worker
    item: _Numbered[Item] | None
    ended: Any


@dataclass(slots=True)
class _Run(Generic[Item, Result]):
    """State of one call of ``RayRunner.run``. Used only by the thread that takes the results."""

    runner: RayRunner
    work: Any
    """The work, put once where every node fetches it once."""
    items: Iterator[tuple[int, Item]]
    news: SimpleQueue[_Event[Item]] = field(default_factory=SimpleQueue)
    workers: list[_Worker] = field(default_factory=list)
    places: list[tuple[int, int, _Worker]] = field(default_factory=list)
    """A heap of the free places at workers, those at idle ones first."""
    waiting: list[_Numbered[Item]] = field(default_factory=list)
    """Heap of items that were taken and are not assigned."""
    error: BaseException | None = None
    num_out: int = 0
    bytes_out: int = 0
    is_draining: bool = False
    is_exhausted: bool = False
    _ties: Iterator[int] = field(default_factory=count)

    def results(self) -> Generator[Result, None, None]:
        """Results until nothing is left to hand out, or there was an error, and nothing is under way."""
        while self.num_out or (self.error is None and self._peek() is not None):
            yield from self._handle(self._next_news())
            self._hand_out()

    def drain(self) -> None:
        """Wait for tasks under way without taking results; after a second interruption, kill them."""
        self.error = self.error or GeneratorExit()
        try:
            while self.num_out:
                self._handle(self._next_news())
        except BaseException:
            self.kill()
            raise

    def kill(self) -> None:
        """End every process now, and wait until Ray says so: what still wrote could meet the next run's files."""
        _kill(worker.process for worker in self.workers)
        with suppress(Empty):
            while self.num_out:
                self.num_out -= self.news.get(timeout=ENDING_SECONDS).item is not None
        self.workers.clear()

    def start(self, process: Any, num_losses: int = 0) -> None:
        worker = _Worker(process, num_losses)
        self.workers.append(worker)
        self._listen(worker, None, process.start.remote(self.work, self.runner.check))

    def _listen(self, worker: _Worker, item: _Numbered[Item] | None, ref: Any) -> None:
        """Ray calls back when it has ended; ``ray.wait`` would look at all workers for each that is done."""
        ref.future().add_done_callback(lambda ended: self.news.put(_Event(worker, item, ended)))

    def _peek(self) -> _Numbered[Item] | None:
        """First item that is not assigned. An error of the items themselves ends the run like another."""
        if not self.waiting and not self.is_exhausted:
            try:
                self.waiting.extend(_Numbered(*taken) for taken in (next(self.items),))
            except StopIteration:
                self.is_exhausted = True
            except Exception as error:
                self.error, self.is_exhausted = error, True
        return self.waiting[0] if self.waiting else None

    def _hand_out(self) -> None:
        while self.error is None and not self.is_draining and self._has_place():
            item = self._peek()
            if item is None:
                return
            if self.num_out and self.bytes_out + self.runner.cost(item.item) > self.runner.bytes_in_flight:
                return
            heapq.heappop(self.waiting)
            self._give(heapq.heappop(self.places)[2], item)

    def _has_place(self) -> bool:
        while self.places and self.places[0][2].is_lost:
            heapq.heappop(self.places)
        return bool(self.places)

    def _give(self, worker: _Worker, item: _Numbered[Item]) -> None:
        worker.num_items += 1
        self.num_out += 1
        self.bytes_out += self.runner.cost(item.item)
        self._listen(worker, item, worker.process.do.remote(item.item))

    def _next_news(self) -> _Event[Item]:
        try:
            return get_from_queue(self.news, math.inf if self.num_out else START_SECONDS)
        except Empty:
            raise StoreError(
                f"the cluster did not start a worker in {START_SECONDS:.0f} seconds; "
                "check with ray status that a CPU is free"
            ) from None

    def _handle(self, news: _Event[Item]) -> tuple[Result, ...]:
        """Take in what has ended; the result of it, if it has one."""
        if news.item is None:
            self._started(news.worker, news.ended)
            return ()
        news.worker.num_items -= 1
        self.num_out -= 1
        self.bytes_out -= self.runner.cost(news.item.item)
        self._offer(news.worker, news.worker.num_items)
        result = self._result(news.worker, news.item, news.ended)
        if self.is_draining and self.num_out == 0:
            # Resume in order: no task is under way, so none waits.
            if self.runner.board is not None:
                self.runner.board.resume()
            self.is_draining = False
        return result

    def _offer(self, worker: _Worker, num_items: int) -> None:
        heapq.heappush(self.places, (num_items, next(self._ties), worker))

    def _result(self, worker: _Worker, item: _Numbered[Item], ended: Any) -> tuple[Result, ...]:
        loss = ended.exception()
        if loss is not None:
            self._lost(worker, loss)
            self._lost_item(item, loss)
            return ()
        result: TaskResult[Result] = ended.result()
        if isinstance(result.error, PostponedError):
            heapq.heappush(self.waiting, item)
        else:
            self.error = self.error or result.error
        return result.result

    def _started(self, worker: _Worker, ended: Any) -> None:
        loss = ended.exception()
        if loss is not None:
            self._lost(worker, loss)
        elif ended.result().error is not None:
            self.error = self.error or ended.result().error
        else:
            worker.num_losses = 0
            for num_items in range(ITEMS_PER_WORKER):
                self._offer(worker, num_items)

    def _lost(self, worker: _Worker, loss: BaseException) -> None:
        """Replace a process that seems dead by a new one."""
        if worker.is_lost:
            return
        worker.is_lost = True
        self.workers.remove(worker)
        _kill([worker.process])
        if worker.num_losses + 1 >= MAX_LOSSES:
            self.error = self.error or _too_many("start of a worker", loss)
        elif self.error is None:
            self.start(new_process(), worker.num_losses + 1)

    def _lost_item(self, item: _Numbered[Item], loss: BaseException) -> None:
        item.num_losses += 1
        if item.num_losses >= MAX_LOSSES:
            self.error = self.error or _too_many("task", loss)
        heapq.heappush(self.waiting, item)
        if not self.is_draining:
            self.is_draining = True
            if self.runner.board is not None:
                self.runner.board.postpone()


def _too_many(what: str, loss: BaseException) -> StoreError:
    reason = str(loss).strip().partition("\n")[0].rstrip(".")
    return StoreError(f"{MAX_LOSSES} processes of the cluster were lost at the same {what}: {reason}")

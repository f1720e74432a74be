"""Tasks on the processes of a Ray cluster.

Items are assigned in order, and each process works through its items in that order. So the earliest item that is not
done is always under way, or the next to be assigned; an item waits for earlier ones only, so this one never waits, and
there is no deadlock.

A lost process breaks this: its items would queue behind others that wait for them. Then nothing more is assigned,
waiting items are given back (``RayChecksumBoard.postpone``), and when none is assigned all of them are assigned again,
in order and before new ones. A loss costs the items of the lost process, those that waited, and the time of those under
way.

    items -> unassigned_items (heap) -> a free slot of a worker -> event when it has ended -> result
                   ^                                                    |
                   '------- items of a lost worker, postponed items ----'
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
from ckpt_tools.process.signals import get_first_signal, get_from_queue
from ckpt_tools.transfer.runners import Item, Result
from ckpt_tools.transfer.runners.ray_board import PostponedError, RayChecksumBoard, make_error_sendable

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

    ``bytes_of_item`` gives the bytes of an item. At most ``bytes_in_flight`` are handed out at a time; a larger item
    goes alone. Every process runs ``check`` before its first item of a run, and an error there ends the run. ``board``
    is where the work waits for other items' results, if it does.

    Processes are kept from run to run, until ``close``: one takes a second of a processor to start.
    """

    num_workers: int
    bytes_of_item: Callable[[Any], int]
    bytes_in_flight: int
    check: Callable[[], None]
    board: RayChecksumBoard | None = None
    _idle_processes: list[Any] = field(default_factory=list, repr=False)

    def __post_init__(self) -> None:
        if self.num_workers < 1:
            raise ValueError(f"{self.num_workers} workers: at least one is needed")

    def run(self, work: Callable[[Item], Result], items: Iterable[Item]) -> Generator[Result, None, None]:
        import ray

        run: _RayRun[Item, Result] = _RayRun(self, ray.put(work), enumerate(items))
        try:
            for _ in range(self.num_workers):
                run.start_worker(self._idle_processes.pop() if self._idle_processes else new_process())
            yield from run.iter_results()
        except GeneratorExit:
            run.drain_tasks() if get_first_signal() is None else run.kill_workers()
            raise
        except BaseException:
            run.kill_workers()
            raise
        finally:
            self._idle_processes = [worker.process for worker in run.workers]
        if run.error is not None:
            raise run.error

    def close(self) -> None:
        """End the processes."""
        _kill_processes(self._idle_processes)
        self._idle_processes = []


@dataclass(frozen=True, slots=True)
class TaskResult(Generic[Result]):
    """Outcome of an item: a result or an error, sent between processes as a value so that its class is kept."""

    result: tuple[Result, ...]
    error: BaseException | None = None


class RayTaskProcess:
    """One worker. An error is part of what it returns; what Ray raises is then about Ray alone."""

    def start(self, work: Callable[[Any], Any], check: Callable[[], None]) -> TaskResult[None]:
        self._work, self._has_failed = work, False
        return _call_as_result(check)

    def do(self, item: Any) -> TaskResult[Any]:
        """The item at hand behind one that failed is not begun."""
        if self._has_failed:
            return TaskResult((), PostponedError())
        result = _call_as_result(self._work, item)
        self._has_failed = not result.result and not isinstance(result.error, PostponedError)
        return result


def _call_as_result(work: Callable[..., Result], *arguments: Any) -> TaskResult[Result]:
    try:
        return TaskResult((work(*arguments),))
    except BaseException as error:
        return TaskResult((), make_error_sendable(error))


def new_process() -> Any:
    """The handle of a process that starts as soon as a node has a CPU free."""
    return _process_class().remote()


@cache
def _process_class() -> Any:
    """Register the class with Ray once, not once a process."""
    import ray

    return ray.remote(num_cpus=1, max_restarts=0, scheduling_strategy="SPREAD")(RayTaskProcess)


def _kill_processes(processes: Iterable[Any]) -> None:
    import ray

    for process in processes:
        with suppress(ray.exceptions.RayError):
            ray.kill(process)


@dataclass(slots=True, order=True)
class _NumberedItem(Generic[Item]):
    """An item with its position in the order, and the number of processes that were lost with it."""

    number: int
    item: Item = field(compare=False)
    num_losses: int = field(default=0, compare=False)


@dataclass(slots=True, eq=False)
class _RayWorker:
    process: Any
    num_losses: int
    is_lost: bool = False
    num_items: int = 0


@dataclass(frozen=True, slots=True)
class _TaskEvent(Generic[Item]):
    """``future`` has ended: an item of a worker or, if ``item`` is None, the start of the worker."""

    worker: _RayWorker
    item: _NumberedItem[Item] | None
    future: Any


@dataclass(slots=True)
class _RayRun(Generic[Item, Result]):
    """State of one call of ``RayRunner.run``. Used only by the thread that takes the results."""

    runner: RayRunner
    work_ref: Any
    """The work, put once where every node fetches it once."""
    numbered_items: Iterator[tuple[int, Item]]
    events: SimpleQueue[_TaskEvent[Item]] = field(default_factory=SimpleQueue)
    workers: list[_RayWorker] = field(default_factory=list)
    free_slots: list[tuple[int, int, _RayWorker]] = field(default_factory=list)
    """A heap of the free slots of workers, those at idle ones first."""
    unassigned_items: list[_NumberedItem[Item]] = field(default_factory=list)
    """Heap of items that were taken and are not assigned."""
    error: BaseException | None = None
    num_assigned: int = 0
    bytes_assigned: int = 0
    is_draining: bool = False
    is_exhausted: bool = False
    _tie_breakers: Iterator[int] = field(default_factory=count)

    def iter_results(self) -> Generator[Result, None, None]:
        """Results until nothing is left to hand out, or there was an error, and nothing is under way."""
        while self.num_assigned or (self.error is None and self._peek_item() is not None):
            yield from self._handle_event(self._wait_for_event())
            self._assign_items()

    def drain_tasks(self) -> None:
        """Wait for tasks under way without taking results; after a second interruption, kill them."""
        self.error = self.error or GeneratorExit()
        try:
            while self.num_assigned:
                self._handle_event(self._wait_for_event())
        except BaseException:
            self.kill_workers()
            raise

    def kill_workers(self) -> None:
        """End all processes now, and wait for it: one that still wrote could meet the next run's files."""
        _kill_processes(worker.process for worker in self.workers)
        with suppress(Empty):
            while self.num_assigned:
                self.num_assigned -= self.events.get(timeout=ENDING_SECONDS).item is not None
        self.workers.clear()

    def start_worker(self, process: Any, num_losses: int = 0) -> None:
        worker = _RayWorker(process, num_losses)
        self.workers.append(worker)
        self._notify_when_done(worker, None, process.start.remote(self.work_ref, self.runner.check))

    def _notify_when_done(self, worker: _RayWorker, item: _NumberedItem[Item] | None, ref: Any) -> None:
        """Ray calls back when it has ended; ``ray.wait`` would look at all workers for each that is done."""
        ref.future().add_done_callback(lambda ended: self.events.put(_TaskEvent(worker, item, ended)))

    def _peek_item(self) -> _NumberedItem[Item] | None:
        """First item that is not assigned. An error of the items themselves ends the run like another."""
        if not self.unassigned_items and not self.is_exhausted:
            try:
                self.unassigned_items.append(_NumberedItem(*next(self.numbered_items)))
            except StopIteration:
                self.is_exhausted = True
            except Exception as error:
                self.error, self.is_exhausted = error, True
        return self.unassigned_items[0] if self.unassigned_items else None

    def _assign_items(self) -> None:
        while self.error is None and not self.is_draining:
            while self.free_slots and self.free_slots[0][2].is_lost:
                heapq.heappop(self.free_slots)
            item = self._peek_item() if self.free_slots else None
            if item is None:
                return
            num_bytes = self.bytes_assigned + self.runner.bytes_of_item(item.item)
            if self.num_assigned and num_bytes > self.runner.bytes_in_flight:
                return
            heapq.heappop(self.unassigned_items)
            self._assign_item(heapq.heappop(self.free_slots)[2], item)

    def _assign_item(self, worker: _RayWorker, item: _NumberedItem[Item]) -> None:
        worker.num_items += 1
        self.num_assigned += 1
        self.bytes_assigned += self.runner.bytes_of_item(item.item)
        self._notify_when_done(worker, item, worker.process.do.remote(item.item))

    def _wait_for_event(self) -> _TaskEvent[Item]:
        try:
            return get_from_queue(self.events, math.inf if self.num_assigned else START_SECONDS)
        except Empty:
            raise StoreError(
                f"the cluster did not start a worker in {START_SECONDS:.0f} seconds; "
                "check with ray status that a CPU is free"
            ) from None

    def _handle_event(self, event: _TaskEvent[Item]) -> tuple[Result, ...]:
        """Handle a start or an item that has ended; the result of an item, if it has one."""
        if event.item is None:
            self._handle_worker_started(event.worker, event.future)
            return ()
        event.worker.num_items -= 1
        self.num_assigned -= 1
        self.bytes_assigned -= self.runner.bytes_of_item(event.item.item)
        self._offer_slot(event.worker, event.worker.num_items)
        result = self._take_result(event.worker, event.item, event.future)
        if self.is_draining and self.num_assigned == 0:
            # Resume in order: no task is under way, so none waits.
            if self.runner.board is not None:
                self.runner.board.resume()
            self.is_draining = False
        return result

    def _offer_slot(self, worker: _RayWorker, num_items: int) -> None:
        heapq.heappush(self.free_slots, (num_items, next(self._tie_breakers), worker))

    def _take_result(self, worker: _RayWorker, item: _NumberedItem[Item], future: Any) -> tuple[Result, ...]:
        loss = future.exception()
        if loss is not None:
            self._replace_lost_worker(worker, loss)
            self._requeue_lost_item(item, loss)
            return ()
        result: TaskResult[Result] = future.result()
        if isinstance(result.error, PostponedError):
            heapq.heappush(self.unassigned_items, item)
        else:
            self.error = self.error or result.error
        return result.result

    def _handle_worker_started(self, worker: _RayWorker, future: Any) -> None:
        loss = future.exception()
        if loss is not None:
            self._replace_lost_worker(worker, loss)
        elif future.result().error is not None:
            self.error = self.error or future.result().error
        else:
            worker.num_losses = 0
            for num_items in range(ITEMS_PER_WORKER):
                self._offer_slot(worker, num_items)

    def _replace_lost_worker(self, worker: _RayWorker, loss: BaseException) -> None:
        """Replace a process that seems dead by a new one."""
        if worker.is_lost:
            return
        worker.is_lost = True
        self.workers.remove(worker)
        _kill_processes([worker.process])
        if worker.num_losses + 1 >= MAX_LOSSES:
            self.error = self.error or _too_many_losses_error("start of a worker", loss)
        elif self.error is None:
            self.start_worker(new_process(), worker.num_losses + 1)

    def _requeue_lost_item(self, item: _NumberedItem[Item], loss: BaseException) -> None:
        item.num_losses += 1
        if item.num_losses >= MAX_LOSSES:
            self.error = self.error or _too_many_losses_error("task", loss)
        heapq.heappush(self.unassigned_items, item)
        if not self.is_draining:
            self.is_draining = True
            if self.runner.board is not None:
                self.runner.board.postpone()


def _too_many_losses_error(what: str, loss: BaseException) -> StoreError:
    reason = str(loss).strip().partition("\n")[0].rstrip(".")
    return StoreError(f"{MAX_LOSSES} processes of the cluster were lost at the same {what}: {reason}")

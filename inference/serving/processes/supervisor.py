"""Several processes behind one port: this one starts them, keeps them alive and alike, and ends them.

The kernel shares the connections out among the workers, which all listen at the same port. They serve the same versions
of the same weights: a change goes through here, and every worker makes it or none. This process imports torch once for
all of them, loads no model and starts no thread: so it can fork at any time, and a worker is back within a second.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import Any

from ckpt_tools.errors import CkptError, FormatError
from ckpt_tools.signals import STOPPING, Stopped

from .messages import (
    Abandon,
    Asked,
    Begin,
    Change,
    Commit,
    Count,
    Done,
    Empty,
    Failed,
    Loaded,
    Order,
    Prepare,
    Serving,
    Stop,
    Told,
    ToSupervisor,
    ToWorker,
)

MAX_RESTARTS = 5
WITHIN_SECONDS = 60.0
"""Workers that end more often than that will end again: a service that is always half down is a wrong answer."""

END_SECONDS = 40.0
"""After the drain, a worker cuts off who does not finish within 10 seconds, of each protocol."""

Work = Callable[[int, Connection, Sequence[Connection], Sequence[bool]], None]
"""What a worker does: its number, its end of the pipe, the ends that it inherits and that are not its own, and which
places are to be loaded."""


@dataclass(eq=False, slots=True)
class Worker:
    """A process. ``digests`` are of what it has read, once it has; ``has_begun`` once it was told to serve it."""

    number: int
    process: ForkProcess
    pipe: Connection
    digests: list[str | None] | None = None
    has_begun: bool = False
    is_serving: bool = False
    error: Exception | None = None


@dataclass(eq=False, slots=True)
class Round:
    """An order to several workers, and what those have found that did not end before."""

    waiting: set[Worker]
    finish: Callable[[Round], None]
    found: dict[Worker, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Agreed:
    """What all workers have at a place: nothing has no digest. It was ``asked`` for if somebody unloaded it."""

    digest: str | None = None
    version: int | None = None


class EndingError(Exception):
    """A signal asks for the end."""


class Supervisor:
    """Of ``num_workers`` processes that do ``work``. ``names`` are of the models at each place; ``tell`` says one line
    to the operator, and ``announce`` that all workers answer."""

    def __init__(
        self,
        work: Work,
        num_workers: int,
        names: Sequence[str],
        *,
        drain: float,
        announce: Callable[[], None],
        tell: Callable[[str], None],
    ) -> None:
        self.work, self.num_workers, self.names = work, num_workers, names
        self.drain, self.announce, self.tell = drain, announce, tell
        self.workers: list[Worker] = []
        self.agreed: list[Agreed | None] = [None] * len(names)
        self._versions: dict[str, int] = {}
        self._changes: list[tuple[Change, Worker, int]] = []
        self._rounds: dict[int, Round] = {}
        self._order_numbers = count()
        self._ends: list[float] = []
        self._restarts: dict[int, float] = {}
        self._is_announced = self._is_ending = False
        self._stopped_by: int | None = None
        self._signals = -1

    def run(self) -> None:
        """Serve until a signal asks for the end; raises it as :class:`Stopped` then.

        Raises:
            CkptError, ModuleNotFoundError, OSError: a worker could not start, or workers end again and again.
        """
        with _signals() as self._signals:
            try:
                self._serve()
            except EndingError:
                self._end()
            except BaseException:
                self._end()
                raise
            finally:
                for worker in self.workers:
                    _kill(worker)
        if self._stopped_by is not None:
            raise Stopped(self._stopped_by)

    def _serve(self) -> None:
        for number in range(self.num_workers):
            self._start(number)
        while True:
            self._pump(self._restart_due())
            while self._changes:
                self._change(*self._changes.pop(0))
            for worker in [each for each in self.workers if each.digests is not None and not each.has_begun]:
                self._admit(worker)

    # --- processes

    def _start(self, number: int) -> None:
        ours, its = get_context("fork").Pipe()
        others = [*(worker.pipe for worker in self.workers), ours]
        wanted = [agreed is None or agreed.digest is not None for agreed in self.agreed]
        process = get_context("fork").Process(target=_run, args=(self.work, number, its, others, wanted, self._signals))
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            its.close()
        self.workers.append(Worker(number, process, ours))

    def _restart_due(self) -> float | None:
        """Start again what has waited long enough; the seconds until the next has."""
        now = time.monotonic()
        for number, at in list(self._restarts.items()):
            if at <= now:
                del self._restarts[number]
                self._start(number)
        return min((at - now for at in self._restarts.values()), default=None)

    def _ended(self, worker: Worker) -> None:
        worker.process.join(1)
        _kill(worker)
        self.workers.remove(worker)
        for each in list(self._rounds.values()):
            each.waiting.discard(worker)
        self._finish_rounds()
        if not self._is_ending:
            self._replace(worker)

    def _replace(self, worker: Worker) -> None:
        """At once the first time; then it waits for longer each time."""
        how = str(worker.error) if worker.error else _how(worker.process.exitcode)
        if not self._is_announced:
            raise worker.error or CkptError(f"worker {worker.number} {how} before it answered")
        now = time.monotonic()
        self._ends = [*(at for at in self._ends if now - at < WITHIN_SECONDS), now]
        if len(self._ends) > MAX_RESTARTS:
            raise CkptError(
                f"workers ended {len(self._ends)} times within {WITHIN_SECONDS:g} seconds, at last worker "
                f"{worker.number}: {how}; the service ends"
            )
        delay = 0 if len(self._ends) == 1 else 2.0 ** (len(self._ends) - 2)
        self._restarts[worker.number] = now + delay
        self.tell(f"worker {worker.number}: {how}; it is started again" + (f" in {delay:g} s" if delay else ""))

    def _end(self) -> None:
        """Who serves is told to stop, and ends by itself; nobody else has anything to lose."""
        self._is_ending = True
        for worker in self.workers:
            self._send(worker, Stop()) if worker.has_begun else worker.process.kill()
        deadline = time.monotonic() + self.drain + END_SECONDS
        while self.workers and (left := deadline - time.monotonic()) > 0:
            self._pump(left)
        for worker in self.workers:
            self.tell(f"worker {worker.number} did not end, and was killed")

    # --- messages

    def _pump(self, seconds: float | None = None) -> None:
        """Wait until something comes, and take it."""
        pipes = {worker.pipe: worker for worker in self.workers}
        for ready in wait([self._signals, *pipes], seconds):
            if isinstance(ready, Connection):
                self._receive(pipes[ready])
            else:
                self._signalled(os.read(self._signals, 64)[0])

    def _signalled(self, number: int) -> None:
        self._stopped_by = self._stopped_by or number
        if not self._is_ending:
            raise EndingError
        for worker in self.workers:
            self._send(worker, Stop())

    def _receive(self, worker: Worker) -> None:
        try:
            message: ToSupervisor = worker.pipe.recv()
        except (EOFError, OSError):
            self._ended(worker)
            return
        match message:
            case Loaded(digests):
                worker.digests = list(digests)
            case Failed(error):
                worker.error = error
            case Serving():
                worker.is_serving = True
                self._announce()
            case Asked(number, Count()):
                self._count(worker, number)
            case Asked(number, Change() as change):
                self._take(change, worker, number)
            case Done(number, found):
                self._done(worker, number, found)

    def _announce(self) -> None:
        if not self._is_announced and sum(worker.is_serving for worker in self.workers) == self.num_workers:
            self._is_announced = True
            self.announce()

    def _send(self, worker: Worker, message: ToWorker) -> None:
        """To one that has just ended nothing is said: its end is the next message."""
        with suppress(OSError):
            worker.pipe.send(message)

    def _order(self, what: Any, workers: Sequence[Worker], finish: Callable[[Round], None]) -> None:
        number = next(self._order_numbers)
        self._rounds[number] = Round(set(workers), finish)
        for worker in workers:
            self._send(worker, Order(number, what))
        self._finish_rounds()

    def _done(self, worker: Worker, number: int, found: object) -> None:
        if each := self._rounds.get(number):
            each.waiting.discard(worker)
            each.found[worker] = found
            self._finish_rounds()

    def _finish_rounds(self) -> None:
        for number, each in list(self._rounds.items()):
            if not each.waiting:
                del self._rounds[number]
                each.finish(each)

    def _all(self, what: Any, workers: Sequence[Worker]) -> dict[Worker, Any]:
        """What each of them has found; other messages are taken meanwhile."""
        finished: list[Round] = []
        self._order(what, workers, finished.append)
        while not finished:
            self._pump()
        return finished[0].found

    # --- what is asked

    def _count(self, asker: Worker, number: int) -> None:
        def tell(each: Round) -> None:
            found = sorted((worker.number, snapshot) for worker, snapshot in each.found.items())
            self._send(asker, Told(number, dict(found)))

        self._order(Count(), [worker for worker in self.workers if worker.has_begun], tell)

    def _take(self, change: Change, asker: Worker, number: int) -> None:
        if self._is_ending:
            self._send(asker, Told(number, CkptError("the service is stopping")))
        else:
            self._changes.append((change, asker, number))

    def _change(self, change: Change, asker: Worker, number: int) -> None:
        error = None
        if change.is_load:
            error = self._load(change.place)
        else:
            self._unload(change.place)
        self._send(asker, Told(number, error))

    def _readers(self) -> list[Worker]:
        """The workers that have models."""
        return [worker for worker in self.workers if worker.digests is not None]

    def _load(self, place: int) -> CkptError | None:
        """In two halves, as :mod:`.messages` says. A worker that ends meanwhile comes back with what was agreed on."""
        found = self._all(Prepare(place), self._readers())
        error = _disagreement(list(found.values()))
        if error is not None:
            self._all(Abandon(place, error), list(found))
            return error
        digest = next(iter(found.values()))
        self._agree(place, digest)
        agreed = self.agreed[place]
        assert agreed is not None and agreed.version is not None
        self._all(Commit(place, agreed.version), list(found))
        for worker in found:
            assert worker.digests is not None
            worker.digests[place] = digest
        return None

    def _unload(self, place: int) -> None:
        self.agreed[place] = Agreed()
        self._all(Empty(place), self._readers())

    def _agree(self, place: int, digest: str) -> None:
        name = self.names[place]
        self._versions[name] = self._versions.get(name, 0) + 1
        self.agreed[place] = Agreed(digest, self._versions[name])

    def _admit(self, worker: Worker) -> None:
        """Let it serve what the others do. If it has found newer weights, all load those."""
        for place in range(len(self.names)):
            agreed, digest = self.agreed[place], (worker.digests or [None])[place]
            if agreed is None:
                assert digest is not None
                self._agree(place, digest)
            elif agreed.digest is not None and agreed.digest != digest and (error := self._load(place)):
                worker.error = CkptError(f"it cannot load what the others serve ({error})")
                worker.process.kill()
                return
        if worker in self.workers:
            worker.has_begun = True
            self._send(worker, Begin(tuple(agreed.version if agreed else None for agreed in self.agreed)))


def _disagreement(found: Sequence[object]) -> CkptError | None:
    for each in found:
        if isinstance(each, CkptError):
            return each
    if not found:
        return CkptError("no worker is there; try again")
    if len(set(found)) > 1:
        return FormatError("the checkpoint changed while the workers read it; load it again")
    return None


def _run(
    work: Work, number: int, pipe: Connection, others: Sequence[Connection], wanted: Sequence[bool], signals: int
) -> None:
    """In the new process. Signals are the supervisor's: a terminal or an init system sends them to all processes at
    once, and each worker is told over its pipe."""
    signal.set_wakeup_fd(-1)
    os.close(signals)
    for each in STOPPING:
        signal.signal(each, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
    work(number, pipe, others, wanted)


def _kill(worker: Worker) -> None:
    if worker.process.is_alive():
        worker.process.kill()
    worker.process.join()
    worker.pipe.close()


def _how(code: int | None) -> str:
    if code is not None and code < 0:
        return f"ended by {signal.Signals(-code).name}"
    return f"ended with code {code}"


@contextmanager
def _signals() -> Iterator[int]:
    """A descriptor from which the numbers of signals that ask for the end can be read. An ignored one stays ignored."""
    reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    before = {number: signal.getsignal(number) for number in STOPPING}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, lambda *_: None)
    wakeup = signal.set_wakeup_fd(writing)
    try:
        yield reading
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(reading)
        os.close(writing)

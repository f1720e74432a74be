"""One of several processes that serve: it loads the models, and does what the supervisor says over a pipe."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import count
from multiprocessing.connection import Connection
from typing import Any

from ckpt_tools.errors import CkptError

from ...models.predictor import Predictor
from ..http.middleware import Traffic
from ..repository import Load, Repository, Slot, Source
from ..snapshot import Snapshot
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
    Stop,
    Told,
    ToSupervisor,
)

LOG = logging.getLogger(__name__)


class Link:
    """The worker's end of the pipe. The worker ends with the supervisor, at once: what it serves is nobody's then."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._is_sending = threading.Lock()
        self._numbers = count()
        self._asked: dict[int, tuple[Change | Count, Future[Any]]] = {}
        self._has_begun = threading.Event()
        self._preparing = ThreadPoolExecutor(1, "preparing")
        self.obey: Callable[[Any], Any] = lambda _: None
        self.begin: Callable[[Sequence[int | None]], None] = lambda _: None
        self.stop: Callable[[], None] = lambda: os._exit(0)

    def listen(self) -> None:
        threading.Thread(target=self._run, name="link", daemon=True).start()

    def send(self, message: ToSupervisor) -> None:
        with self._is_sending:
            self._pipe.send(message)

    def fail(self, error: CkptError) -> None:
        """End this worker, and have the supervisor say why."""
        with suppress(OSError):
            self.send(Failed(error))
        os._exit(1)

    def ask(self, question: Change | Count) -> Future[Any]:
        """The answer of the supervisor."""
        number, answer = next(self._numbers), Future[Any]()
        self._asked[number] = question, answer
        self.send(Asked(number, question))
        return answer

    def wait(self) -> None:
        """Until this worker may serve."""
        self._has_begun.wait()

    def _run(self) -> None:
        try:
            while True:
                self._take(self._pipe.recv())
        except (EOFError, OSError):
            os._exit(1)
        except Exception as error:
            LOG.critical("the worker does not understand the supervisor, and ends", exc_info=error)
            os._exit(1)

    def _take(self, message: Any) -> None:
        match message:
            case Begin(numbers):
                self.begin(numbers)
                self._has_begun.set()
            case Told(number, found):
                self._tell(number, found)
            case Order(_, Prepare()):
                self._preparing.submit(self._do, message)
            case Order():
                self._do(message)
            case Stop():
                for number, (question, _) in list(self._asked.items()):
                    if isinstance(question, Change):
                        self._tell(number, CkptError("the service is stopping"))
                self.stop()

    def _do(self, order: Order) -> None:
        """An error that nobody foresaw, such as a lack of memory, is one of this change alone."""
        try:
            found = self.obey(order.what)
        except CkptError as error:
            found = error
        except Exception as error:
            LOG.error("a change of the models failed", exc_info=error)
            found = CkptError(f"a change of the models failed ({type(error).__name__})")
        self.send(Done(order.number, found))

    def _tell(self, number: int, found: Any) -> None:
        _, answer = self._asked.pop(number, (None, None))
        if answer is None or not answer.set_running_or_notify_cancel():
            return
        if isinstance(found, CkptError):
            answer.set_exception(found)
        else:
            answer.set_result(found)


class SharedRepository(Repository):
    """The models of one worker. They change when those of all workers do."""

    def __init__(self, sources: Sequence[Source], load: Load, link: Link, traffic: Traffic, worker: int) -> None:
        super().__init__(sources, load)
        self._link, self._traffic, self._worker = link, traffic, worker
        self._read: dict[int, Predictor] = {}
        link.obey, link.begin = self.obey, self._begin

    def renew(self, slot: Slot) -> None:
        self._link.ask(Change(self.slots.index(slot), is_load=True)).result()

    def remove(self, slot: Slot) -> None:
        self._link.ask(Change(self.slots.index(slot), is_load=False)).result()

    async def everywhere(self) -> list[Snapshot]:
        """What each worker has counted."""
        return list((await asyncio.wrap_future(self._link.ask(Count()))).values())

    def load_wanted(self, wanted: Sequence[bool]) -> None:
        """Read what is to be served, and let it answer when all workers agree on it."""
        self._link.send(Loaded(tuple(self.prepare(place) if each else None for place, each in enumerate(wanted))))
        self._link.wait()

    def _begin(self, numbers: Sequence[int | None]) -> None:
        """By the thread of the link: the orders that come next meet it done."""
        for place, number in enumerate(numbers):
            if number is None:
                self._read.pop(place, None)
                self.empty(self.slots[place])
            elif place in self._read:  # Else it took part in a load of all workers already.
                self.commit(place, number)

    def obey(self, what: Prepare | Commit | Abandon | Empty | Count) -> str | Snapshot | None:
        match what:
            case Prepare(place):
                return self.prepare(place)
            case Commit(place, number):
                self.commit(place, number)
            case Abandon(place, error):
                self._read.pop(place, None)
                self.fail(self.slots[place], error)
            case Empty(place):
                self._read.pop(place, None)
                self.empty(self.slots[place])
            case Count():
                return Snapshot.of(self, self._traffic, self._worker)
        return None

    def prepare(self, place: int) -> str:
        """Read what is there now; its digest. It does not answer yet."""
        found = self._read[place] = self.read(self.slots[place])
        return found.identity.digest

    def commit(self, place: int, number: int) -> None:
        self.put(self.slots[place], self._read.pop(place), number)

"""The service's side of the models' process (:mod:`.model_process`), which is started again when it ends."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from pathlib import Path
from signal import Signals
from typing import Any

from ...models.generation import Generation, Give
from ...models.predictor import Predictor
from ...models.results import Array, Columns, Item
from ..repository import ModelsEndedError, Repository, Source
from .model_messages import Broken, LoadedModelFacts, TaskFacts, list_facts, stack_rows

MODULE = f"{__package__}.model_process"

END_SECONDS = 5.0
FIRST_DELAY, LAST_DELAY = 0.1, 30.0
"""Seconds before the process is started again; twice as many each time that it ended soon."""

SOON_SECONDS = 10.0


class BrokenModelError(Exception):
    """Unexpected error of a model; the text is the traceback in its process."""


@dataclass(eq=False, slots=True)
class Process:
    """A started process, the connection that it accepts others by, and connections that no thread uses."""

    process: subprocess.Popen[bytes]
    control: Connection
    connecting: threading.Lock = field(default_factory=threading.Lock)
    free: deque[Connection] = field(default_factory=deque)

    @classmethod
    def start(cls) -> Process:
        """Raises OSError if it cannot be started."""
        ours, its = Pipe()
        with its:
            process = subprocess.Popen(
                # -P: the folder that the service was started in is not searched for modules, unless it was before.
                [sys.executable, "-P", "-m", MODULE, str(its.fileno())],
                pass_fds=[its.fileno()],
                stdin=subprocess.DEVNULL,
                # Ctrl-C is for the service, which ends this process when it has answered what it took.
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(str(Path(part).absolute()) for part in sys.path)},
            )
        return cls(process, ours)

    def connect(self) -> Connection:
        ours, its = Pipe()
        with its, self.connecting, self._speaking():
            self.control.send(True)
            send_handle(self.control, its.fileno(), self.process.pid)
        return ours

    def ask(self, number: int, method: str, *arguments: Any) -> Any:
        """Send a request over a connection that no other thread uses, and return the reply."""
        try:
            connection = self.free.pop()
        except IndexError:
            connection = self.connect()
        try:
            return self.ask_by(connection, number, method, *arguments)
        finally:
            # After an end of the process nothing asks this object again.
            self.free.append(connection)

    def ask_by(self, connection: Connection, number: int, method: str, *arguments: Any) -> Any:
        with self._speaking():
            connection.send((number, method, arguments))
        return self.receive(connection)

    def receive(self, connection: Connection) -> Any:
        with self._speaking():
            found = connection.recv()
        if isinstance(found, Broken):
            raise BrokenModelError(found.trace)
        if isinstance(found, Exception):
            raise found
        return found

    @contextmanager
    def _speaking(self) -> Iterator[None]:
        try:
            yield
        except (EOFError, OSError) as error:
            raise ModelsEndedError(self.describe_end()) from error

    def describe_end(self) -> str:
        """A sentence on how it ended."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(END_SECONDS)
        code = self.process.returncode
        if code is not None and code < 0:
            return f"the process of the models was ended by {Signals(-code).name}"
        return f"the process of the models {'does not answer' if code is None else f'ended with code {code}'}"

    def end(self) -> None:
        self.control.close()
        try:
            self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@dataclass(eq=False, slots=True)
class RemoteModels:
    """The models of a service, in a process started by :meth:`running`. Methods may be called from any thread.

    When the process ends, the models of ``repository`` are lost, and loaded again once it runs again; ``tell`` is
    called with sentences on it.
    """

    threads: int
    tell: Callable[[str], None]
    _process: Process
    repository: Repository | None = None
    _numbers: Iterator[int] = field(default_factory=count)
    _closing: threading.Event = field(default_factory=threading.Event)

    @classmethod
    @contextmanager
    def running(cls, threads: int, tell: Callable[[str], None]) -> Iterator[RemoteModels]:
        """The process, started now and ended with the block. Raises OSError if it cannot be started."""
        models = cls(threads, tell, Process.start())
        threading.Thread(target=models._keep_running, name="models", daemon=True).start()
        try:
            yield models
        finally:
            models._closing.set()
            models._process.end()

    @property
    def pid(self) -> int:
        return self._process.process.pid

    def load(self, source: Source) -> Predictor:
        """Load a model, as :func:`.predictor.load_predictor` does. It stays loaded as long as the result is referenced.
        Raises ModelsEndedError if the process ends meanwhile."""
        process, number = self._process, next(self._numbers)
        connection = process.connect()
        facts: LoadedModelFacts = process.ask_by(
            connection, number, "load", source.url, source.name, source.options, self.threads
        )
        task = RemoteTask(*list_facts(facts.task), process=process, number=number, connection=connection)
        return Predictor(source.name, facts.identity, task, is_elsewhere=True, files=facts.files)

    def _keep_running(self) -> None:
        """Start the process again each time it ends."""
        delay = FIRST_DELAY
        while True:
            began = time.monotonic()
            self._process.process.wait()
            if self._closing.is_set():
                return
            repository, reason = self.repository, self._process.describe_end()
            if repository is not None and not repository.is_closed:
                self.tell(f"{reason}; it is started again")
                repository.lost(reason)
            delay = min(2 * delay, LAST_DELAY) if time.monotonic() - began < SOON_SECONDS else FIRST_DELAY
            if self._closing.wait(delay):
                return
            self._process = Process.start()
            if self._closing.is_set():
                self._process.end()
                return
            if repository is not None:
                repository.reload(self.tell)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RemoteTask(TaskFacts):
    """The task of a model in the other process, which keeps it until ``connection`` is closed. Images are decoded in
    this process."""

    process: Process
    number: int
    connection: Connection

    @property
    def batch_sizes(self) -> Mapping[str, tuple[int, ...]]:
        found: Mapping[str, tuple[int, ...]] = self._ask("batch_sizes")
        return found

    def decode(self, data: bytes, name: str) -> Item:
        if self.reading is None:
            item: Item = self._ask("decode", data, name)
            return item
        return self.prepare(self.reading.decode_pixels(data, name))

    def prepare(self, pixels: Array) -> Item:
        if self.reading is not None and self.reading.is_input:
            return pixels
        item: Item = self._ask("prepare", pixels)
        return item

    def predict(self, inputs: Sequence[Item]) -> Columns:
        stacked = stack_rows(inputs)
        columns: Columns = self._ask("predict", inputs) if stacked is None else self._ask("predict_stacked", stacked)
        return columns

    def generate(self, asked: Generation, give: Give) -> None:
        """Generate a text over a connection of its own, which is closed if ``give`` raises."""
        with self.process.connect() as connection:
            piece = self.process.ask_by(connection, self.number, "generate", asked)
            while piece is not None:
                give(piece)
                piece = self.process.receive(connection)

    def _ask(self, method: str, *arguments: Any) -> Any:
        return self.process.ask(self.number, method, *arguments)

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
from ...models.images import ImageReading
from ...models.predictor import Predictor
from ...models.results import Array, Columns, Item, TensorSpec
from ..repository import ModelsEndedError, Source
from .model_messages import BatchSizes, Broken, Decode, Generate, Load, Loaded, Predict, Prepare, Request

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
                # -P: the folder that the service was started in is no place of modules, unless it was one before.
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

    def ask(self, asked: Request) -> Any:
        """Send a request over a connection that no other thread uses, and return the reply."""
        try:
            connection = self.free.pop()
        except IndexError:
            connection = self.connect()
        try:
            return self.ask_by(connection, asked)
        finally:
            # After an end of the process nothing asks this object again.
            self.free.append(connection)

    def ask_by(self, connection: Connection, asked: Request) -> Any:
        with self._speaking():
            connection.send(asked)
        return self.received(connection)

    def received(self, connection: Connection) -> Any:
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
            raise ModelsEndedError(self.how()) from error

    def how(self) -> str:
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

    When the process ends, ``ended`` is called with the reason, and ``started`` once it runs again, without models.
    """

    threads: int
    ended: Callable[[str], None]
    started: Callable[[], None]
    _process: Process
    _numbers: Iterator[int] = field(default_factory=count)
    _closing: threading.Event = field(default_factory=threading.Event)

    @classmethod
    @contextmanager
    def running(cls, threads: int, ended: Callable[[str], None], started: Callable[[], None]) -> Iterator[RemoteModels]:
        """The process, started now and ended with the block. Raises OSError if it cannot be started."""
        found = cls(threads, ended, started, Process.start())
        threading.Thread(target=found._keep, name="models", daemon=True).start()
        try:
            yield found
        finally:
            found._closing.set()
            found._process.end()

    @property
    def pid(self) -> int:
        return self._process.process.pid

    def load(self, source: Source) -> Predictor:
        """Load a model, as :func:`.predictor.load_predictor` does. It stays loaded as long as the result is referenced.
        Raises ModelsEndedError if the process ends meanwhile."""
        process, number = self._process, next(self._numbers)
        connection = process.connect()
        asked = Load(number, source.url, source.name, source.options, self.threads)
        found: Loaded = process.ask_by(connection, asked)
        taken = found.inputs, found.outputs, found.labels, found.max_batch
        task = RemoteTask(*taken, found.is_exact, found.reading, found.max_bytes, process, number, connection)
        return Predictor(source.name, found.identity, task, is_elsewhere=True, files=found.files)

    def _keep(self) -> None:
        """Start the process again each time it ends."""
        delay = FIRST_DELAY
        while True:
            began = time.monotonic()
            self._process.process.wait()
            if self._closing.is_set():
                return
            self.ended(self._process.how())
            delay = min(2 * delay, LAST_DELAY) if time.monotonic() - began < SOON_SECONDS else FIRST_DELAY
            if self._closing.wait(delay):
                return
            self._process = Process.start()
            if self._closing.is_set():
                self._process.end()
                return
            self.started()


@dataclass(frozen=True, slots=True, eq=False)
class RemoteTask:
    """The task of a model in the other process, which keeps it until ``connection`` is closed. Images are decoded in
    this process."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    labels: tuple[str, ...] | None
    max_batch: int
    is_exact: bool
    reading: ImageReading | None
    max_bytes: int | None
    process: Process
    number: int
    connection: Connection

    @property
    def batch_sizes(self) -> Mapping[str, tuple[int, ...]]:
        found: Mapping[str, tuple[int, ...]] = self.process.ask(BatchSizes(self.number))
        return found

    def decode(self, data: bytes, name: str) -> Item:
        if self.reading is None:
            found: Item = self.process.ask(Decode(self.number, data, name))
            return found
        return self.prepare(self.reading.pixels(data, name))

    def prepare(self, pixels: Array) -> Item:
        if self.reading is not None and self.reading.is_input:
            return pixels
        found: Item = self.process.ask(Prepare(self.number, pixels))
        return found

    def predict(self, inputs: Sequence[Item]) -> Columns:
        found: Columns = self.process.ask(Predict.of(self.number, inputs))
        return found

    def generate(self, asked: Generation, give: Give) -> None:
        """Generate a text over a connection of its own, which is closed if ``give`` raises."""
        with self.process.connect() as connection:
            piece = self.process.ask_by(connection, Generate(self.number, asked))
            while piece is not None:
                give(piece)
                piece = self.process.received(connection)

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

from ...models.generation import GenerationRequest, TextCallback
from ...models.predictor import Predictor
from ...models.results import Array, Columns, ModelInput
from ..repository import ModelRepository, ModelsEndedError, NamedSource
from .model_messages import LoadedModelFacts, TaskFacts, UnexpectedFailure, list_facts, stack_rows

MODULE = f"{__package__}.model_process"

END_SECONDS = 5.0
FIRST_DELAY, LAST_DELAY = 0.1, 30.0
"""Seconds before the process is started again; twice as many each time that it ended soon."""

SHORT_RUN_SECONDS = 10.0


class BrokenModelError(Exception):
    """Unexpected error of a model; the text is the traceback in its process."""


@dataclass(eq=False, slots=True)
class ModelProcess:
    """A started process, the connection that it accepts others by, and connections that no thread uses."""

    popen: subprocess.Popen[bytes]
    control: Connection
    connect_lock: threading.Lock = field(default_factory=threading.Lock)
    free_connections: deque[Connection] = field(default_factory=deque)

    @classmethod
    def start(cls) -> ModelProcess:
        """Raises OSError if it cannot be started."""
        service_end, process_end = Pipe()
        with process_end:
            popen = subprocess.Popen(
                # -P: the folder that the service was started in is not searched for modules, unless it was before.
                [sys.executable, "-P", "-m", MODULE, str(process_end.fileno())],
                pass_fds=[process_end.fileno()],
                stdin=subprocess.DEVNULL,
                # Ctrl-C is for the service, which ends this process when it has answered what it took.
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(str(Path(part).absolute()) for part in sys.path)},
            )
        return cls(popen, service_end)

    def connect(self) -> Connection:
        service_end, process_end = Pipe()
        with process_end, self.connect_lock, self._report_lost_process():
            self.control.send(True)
            send_handle(self.control, process_end.fileno(), self.popen.pid)
        return service_end

    def call(self, number: int, method: str, *arguments: Any) -> Any:
        """The reply to a request, sent over a connection that no other thread uses."""
        try:
            connection = self.free_connections.pop()
        except IndexError:
            connection = self.connect()
        try:
            return self.call_over(connection, number, method, *arguments)
        finally:
            # After an end of the process nothing asks this object again.
            self.free_connections.append(connection)

    def call_over(self, connection: Connection, number: int, method: str, *arguments: Any) -> Any:
        with self._report_lost_process():
            connection.send((number, method, arguments))
        return self.receive_reply(connection)

    def receive_reply(self, connection: Connection) -> Any:
        with self._report_lost_process():
            reply = connection.recv()
        if isinstance(reply, UnexpectedFailure):
            raise BrokenModelError(reply.traceback)
        if isinstance(reply, Exception):
            raise reply
        return reply

    @contextmanager
    def _report_lost_process(self) -> Iterator[None]:
        try:
            yield
        except (EOFError, OSError) as error:
            raise ModelsEndedError(self.describe_end()) from error

    def describe_end(self) -> str:
        """A sentence on how it ended."""
        with suppress(subprocess.TimeoutExpired):
            self.popen.wait(END_SECONDS)
        code = self.popen.returncode
        if code is not None and code < 0:
            return f"the process of the models was ended by {Signals(-code).name}"
        return f"the process of the models {'does not answer' if code is None else f'ended with code {code}'}"

    def end(self) -> None:
        self.control.close()
        try:
            self.popen.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()


@dataclass(eq=False, slots=True)
class RemoteModels:
    """The models of a service, in a process started by :meth:`start`. Methods may be called from any thread.

    When the process ends, the models of ``repository`` are lost, and loaded again once it runs again;
    ``print_notice`` is called with sentences on it.
    """

    num_threads: int
    print_notice: Callable[[str], None]
    _process: ModelProcess
    repository: ModelRepository | None = None
    _numbers: Iterator[int] = field(default_factory=count)
    _close_event: threading.Event = field(default_factory=threading.Event)

    @classmethod
    @contextmanager
    def start(cls, num_threads: int, print_notice: Callable[[str], None]) -> Iterator[RemoteModels]:
        """The process, started now and ended with the block. Raises OSError if it cannot be started."""
        models = cls(num_threads, print_notice, ModelProcess.start())
        threading.Thread(target=models._keep_process_running, name="models", daemon=True).start()
        try:
            yield models
        finally:
            models._close_event.set()
            models._process.end()

    @property
    def pid(self) -> int:
        return self._process.popen.pid

    def load(self, source: NamedSource) -> Predictor:
        """Load a model, as :func:`.predictor.load_predictor` does. It stays loaded as long as the result is referenced.
        Raises ModelsEndedError if the process ends meanwhile."""
        process, number = self._process, next(self._numbers)
        connection = process.connect()
        facts: LoadedModelFacts = process.call_over(
            connection, number, "load", source.url, source.name, source.options, self.num_threads
        )
        task = RemoteTask(*list_facts(facts.task), process=process, number=number, connection=connection)
        return Predictor(source.name, facts.identity, task, is_elsewhere=True, files=facts.files)

    def _keep_process_running(self) -> None:
        """Start the process again each time it ends."""
        delay = FIRST_DELAY
        while True:
            start = time.monotonic()
            self._process.popen.wait()
            if self._close_event.is_set():
                return
            repository, reason = self.repository, self._process.describe_end()
            if repository is not None and not repository.is_closed:
                self.print_notice(f"{reason}; it is started again")
                repository.drop_models(reason)
            delay = min(2 * delay, LAST_DELAY) if time.monotonic() - start < SHORT_RUN_SECONDS else FIRST_DELAY
            if self._close_event.wait(delay):
                return
            self._process = ModelProcess.start()
            if self._close_event.is_set():
                self._process.end()
                return
            if repository is not None:
                repository.reload_dropped_models(self.print_notice)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RemoteTask(TaskFacts):
    """The task of a model in the other process, which keeps it until ``connection`` is closed. Images are decoded in
    this process."""

    process: ModelProcess
    number: int
    connection: Connection

    @property
    def batch_sizes(self) -> Mapping[str, tuple[int, ...]]:
        sizes: Mapping[str, tuple[int, ...]] = self._call("batch_sizes")
        return sizes

    def decode(self, data: bytes, name: str) -> ModelInput:
        if self.reading is None:
            item: ModelInput = self._call("decode", data, name)
            return item
        return self.prepare(self.reading.decode_pixels(data, name))

    def prepare(self, pixels: Array) -> ModelInput:
        if self.reading is not None and self.reading.is_input:
            return pixels
        item: ModelInput = self._call("prepare", pixels)
        return item

    def predict(self, inputs: Sequence[ModelInput]) -> Columns:
        stacked = stack_rows(inputs)
        columns: Columns = self._call("predict", inputs) if stacked is None else self._call("predict_stacked", stacked)
        return columns

    def generate(self, generation: GenerationRequest, give: TextCallback) -> None:
        """Generate a text over a connection of its own, which is closed if ``give`` raises."""
        with self.process.connect() as connection:
            piece = self.process.call_over(connection, self.number, "generate", generation)
            while piece is not None:
                give(piece)
                piece = self.process.receive_reply(connection)

    def _call(self, method: str, *arguments: Any) -> Any:
        return self.process.call(self.number, method, *arguments)

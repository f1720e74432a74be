"""The service's side of the models' process (:mod:`.model_process`)."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from pathlib import Path
from signal import Signals
from typing import Any

import torch
from torch import Tensor

from ckpt_tools.errors import CkptError

from ...common.name_options import Reading
from ...models.predictor import Predictor
from ...models.results import Prediction, TensorSpec
from .model_messages import Broken, Decode, Load, Loaded, Predict

MODULE = f"{__package__}.model_process"

END_SECONDS = 5.0


class BrokenModelError(Exception):
    """Unexpected error of a model; the text is the traceback in its process."""


@dataclass(slots=True)
class RemoteModels:
    """The process, started by :meth:`running`. Methods may be called from any thread."""

    architecture: str | None
    reading: Reading
    device: str
    threads: int
    _process: subprocess.Popen[bytes]
    _control: Connection
    _connecting: threading.Lock = field(default_factory=threading.Lock)
    _free: deque[Connection] = field(default_factory=deque)
    _numbers: Iterator[int] = field(default_factory=count)
    _is_closed: bool = False

    @classmethod
    @contextmanager
    def running(
        cls,
        architecture: str | None,
        reading: Reading,
        device: str,
        threads: int,
        ended: Callable[[CkptError], None],
    ) -> Iterator[RemoteModels]:
        """The process, started now and ended with the block. A thread calls ``ended`` if it ends before. Raises OSError
        if it cannot be started."""
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
        found = cls(architecture, reading, device, threads, process, ours)
        threading.Thread(target=found._watch, args=(ended,), name="models", daemon=True).start()
        try:
            yield found
        finally:
            found._close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def load(self, url: str, name: str) -> Predictor:
        """As :func:`.predictor.load_predictor`. The model stays loaded as long as the result is referenced."""
        number, connection = next(self._numbers), self._connect()
        asked = Load(number, url, name, self.architecture, self.reading, self.device, self.threads)
        found: Loaded = self._ask(connection, asked)
        facts = found.inputs, found.outputs, found.labels, found.max_batch, found.is_exact
        return Predictor(name, found.identity, RemoteTask(*facts, self, number, connection), is_elsewhere=True)

    def ask(self, asked: Decode | Predict) -> Any:
        """Send a request over a connection that no other thread uses, and return the reply."""
        try:
            connection = self._free.pop()
        except IndexError:
            connection = self._connect()
        try:
            return self._ask(connection, asked)
        finally:
            self._free.append(connection)

    def _connect(self) -> Connection:
        ours, its = Pipe()
        with its, self._connecting, self._speaking():
            self._control.send(True)
            send_handle(self._control, its.fileno(), self.pid)
        return ours

    def _ask(self, connection: Connection, asked: Load | Decode | Predict) -> Any:
        with self._speaking():
            connection.send(asked)
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
            raise CkptError(f"the process of the models {self._how()}") from error

    def _how(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS)
        code = self._process.returncode
        if code is not None and code < 0:
            return f"was ended by {Signals(-code).name}"
        return "does not answer" if code is None else f"ended with code {code}"

    def _watch(self, ended: Callable[[CkptError], None]) -> None:
        self._process.wait()
        if not self._is_closed:
            ended(CkptError(f"the process of the models {self._how()}"))

    def _close(self) -> None:
        self._is_closed = True
        self._control.close()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@dataclass(frozen=True, slots=True, eq=False)
class RemoteTask:
    """The task of a model in the other process, which keeps it until ``connection`` is closed."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    labels: tuple[str, ...] | None
    max_batch: int
    is_exact: bool
    models: RemoteModels
    number: int
    connection: Connection

    def decode(self, data: bytes, name: str) -> Tensor:
        return torch.from_numpy(self.models.ask(Decode(self.number, data, name)))

    def predict(self, inputs: Sequence[Tensor]) -> list[Prediction]:
        found: list[Prediction] = self.models.ask(Predict(self.number, [each.numpy() for each in inputs]))
        return found

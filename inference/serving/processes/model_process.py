"""The models' process of a service: ``python -m inference.serving.processes.model_process DESCRIPTOR``.

Parsing requests and writing answers keeps Python's interpreter busy, and a forward pass needs the interpreter for each
operator: in one process, a pass under 64 clients took twice its time. So the models run here, and the service requests
predictions over socket pairs.

Each connection has a thread. A model is kept until the connection that loaded it is closed. The process ends with the
service, at once.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from typing import TYPE_CHECKING, Any

from ckpt_tools.errors import CkptError
from ckpt_tools.process.credentials import mask_output, mask_secrets
from ckpt_tools.process.signals import STOP_SIGNALS

from ...common.garbage import settle
from ...models.generation import Give, generate
from .model_messages import BatchSizes, Broken, Decode, Generate, Load, Loaded, Predict, Prepare, Request

if TYPE_CHECKING:
    from ...models.predictor import Predictor


@dataclass(frozen=True, slots=True)
class Model:
    """A model and its thread: its memory is warm, and the next batch may be submitted while it is busy."""

    predictor: Predictor
    thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "model"))


class Models:
    """The models of this process by number."""

    def __init__(self) -> None:
        self._found: dict[int, Model] = {}

    def answer(self, connection: Connection) -> None:
        """Answer requests over a connection until it is closed, then drop the model it loaded."""
        number = None
        try:
            while True:
                asked = connection.recv()
                if isinstance(asked, Load):
                    number = asked.number
                connection.send(self._try(asked, connection.send))
        except (EOFError, OSError):
            if number is not None:
                self._drop(number)

    def _drop(self, number: int) -> None:
        if model := self._found.pop(number, None):
            model.thread.shutdown(wait=False)
            del model
            settle()

    def _try(self, asked: Request, give: Give) -> Any:
        try:
            if isinstance(asked, Load):
                return self._load(asked)
            model = self._found[asked.number]
            match asked:
                case Predict():
                    return model.thread.submit(model.predictor.task.predict, asked.items()).result()
                case Generate():
                    return generate(model.predictor.task, asked.asked, give)
                case Decode():
                    return model.predictor.decode(asked.data, asked.name)
                case Prepare():
                    return model.predictor.task.prepare(asked.pixels)
                case BatchSizes():
                    return model.predictor.batch_sizes
        except (CkptError, ImportError) as error:
            return error
        except Exception:
            return Broken(mask_secrets(traceback.format_exc()))

    def _load(self, asked: Load) -> Loaded:
        import torch

        from ...models.predictor import loaded

        torch.set_num_threads(asked.threads)
        found = loaded(asked.url, asked.name, asked.options)
        self._found[asked.number] = Model(found)
        settle()
        return Loaded.of(found)


def main(descriptor: int) -> None:
    """Ignores signals: the service ends this process by closing the connection."""
    mask_output()
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    models, service = Models(), Connection(descriptor)
    try:
        while service.recv():
            connection = Connection(recv_handle(service))
            threading.Thread(target=models.answer, args=(connection,), daemon=True).start()
    except (EOFError, OSError):
        pass
    # Without waiting for threads that are in a forward pass.
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]))

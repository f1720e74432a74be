"""The models' process of a service: ``python -m inference.serving.processes.model_process DESCRIPTOR``.

Parsing requests and writing answers keeps Python's interpreter busy, and a forward pass needs the interpreter for each
operator: in one process, a pass under 64 clients took twice its time. So the models run here, and the service requests
predictions over socket pairs.

A request is the number of a model, the name of a method of :class:`HostedModel` and its arguments. It gets one reply:
the result, a ``CkptError`` or ``ImportError`` to raise, or ``UnexpectedFailure``. Each connection has a thread. A
model is kept until the connection that loaded it is closed. The process ends with the service, at once.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from typing import TYPE_CHECKING, Any

from ckpt_tools.errors import CkptError
from ckpt_tools.process.credentials import mask_output, mask_secrets
from ckpt_tools.process.signals import STOP_SIGNALS

from ...common.garbage_collection import collect_and_freeze
from ...models.generation import GenerationRequest, TextCallback, generate_text
from ...models.results import Array, Columns, ModelInput
from .model_messages import LoadedModelFacts, TaskFacts, UnexpectedFailure, list_facts

if TYPE_CHECKING:
    from ...models.options import ModelOptions
    from ...models.predictor import Predictor


class HostedModel:
    """A model of this process. Its methods answer requests."""

    def __init__(self, url: str, name: str, options: ModelOptions, num_threads: int) -> None:
        import torch

        from ...models.predictor import load_with_options

        torch.set_num_threads(num_threads)
        self._predictor: Predictor = load_with_options(url, name, options)
        # One thread: its memory is warm, and the next batch may be submitted while it is busy.
        self._thread = ThreadPoolExecutor(1, "model")

    def describe(self) -> LoadedModelFacts:
        predictor = self._predictor
        return LoadedModelFacts(predictor.identity, TaskFacts(*list_facts(predictor.task)), predictor.files)

    def predict(self, inputs: Sequence[ModelInput]) -> Columns:
        return self._thread.submit(self._predictor.task.predict, inputs).result()

    def predict_stacked(self, stacked: tuple[Array, ...]) -> Columns:
        return self.predict(list(stacked[0]) if len(stacked) == 1 else list(zip(*stacked, strict=True)))

    def generate(self, generation: GenerationRequest, give: TextCallback) -> None:
        generate_text(self._predictor.task, generation, give)

    def decode(self, data: bytes, name: str) -> ModelInput:
        return self._predictor.decode(data, name)

    def prepare(self, pixels: Array) -> ModelInput:
        return self._predictor.task.prepare(pixels)

    def batch_sizes(self) -> Mapping[str, tuple[int, ...]]:
        return self._predictor.batch_sizes

    def close(self) -> None:
        self._thread.shutdown(wait=False)


class HostedModels:
    """The models of this process by number."""

    def __init__(self) -> None:
        self._hosted: dict[int, HostedModel] = {}

    def answer_requests(self, connection: Connection) -> None:
        """Answer requests over a connection until it is closed, then drop the model it loaded."""
        loaded_number = None
        try:
            while True:
                number, method, arguments = connection.recv()
                if method == "load":
                    loaded_number = number
                # Pieces of a text are sent before the reply, which is None. They may be empty, and are at least one a
                # token, so that a generation ends when its connection is closed.
                extra = (connection.send,) if method == "generate" else ()
                connection.send(self._make_reply(number, method, (*arguments, *extra)))
        except (EOFError, OSError):
            if model := self._hosted.pop(loaded_number, None) if loaded_number is not None else None:
                model.close()
                del model
                collect_and_freeze()

    def load_model(self, number: int, *arguments: Any) -> LoadedModelFacts:
        self._hosted[number] = model = HostedModel(*arguments)
        collect_and_freeze()
        return model.describe()

    def _make_reply(self, number: int, method: str, arguments: Sequence[Any]) -> Any:
        try:
            if method == "load":
                return self.load_model(number, *arguments)
            answer: Callable[..., Any] = getattr(self._hosted[number], method)
            return answer(*arguments)
        except (CkptError, ImportError) as error:
            return error
        except Exception:
            return UnexpectedFailure(mask_secrets(traceback.format_exc()))


def main(descriptor: int) -> None:
    """Ignores signals: the service ends this process by closing the connection."""
    mask_output()
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    models, control = HostedModels(), Connection(descriptor)
    try:
        while control.recv():
            connection = Connection(recv_handle(control))
            threading.Thread(target=models.answer_requests, args=(connection,), daemon=True).start()
    except (EOFError, OSError):
        pass
    # Without waiting for threads that are in a forward pass.
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]))

"""Generation of texts: the request of Triton's generate extension, and the threads that wait for a model's pieces."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from threading import Event
from typing import Any, TypeVar

import orjson

from ckpt_tools.errors import FormatError

from ..models.generation import LIMITS, GenerationRequest, generate_text, parse_messages
from .batching import Execution, QueueFullError
from .repository import ModelVersion

PARAMETERS = (*LIMITS, "stop", "stream", "timeout")
MAX_CONCURRENT_TEXTS = 4  # texts that one model generates at a time, a forward pass of each in turn

Json = dict[str, Any]
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """A valid request; ``timeout`` in seconds."""

    id: str | None
    generation: GenerationRequest
    timeout: float | None

    @classmethod
    def parse(cls, body: bytes, *, is_stream: bool) -> GenerateRequest:
        """Parse JSON. Parameters may also be fields of the request, as Triton has it. Raises FormatError."""
        try:
            fields = orjson.loads(body)
        except orjson.JSONDecodeError as error:
            raise FormatError(f"the request is not JSON: {str(error)[:200]}") from error
        if not isinstance(fields, dict):
            raise FormatError("the request has to be a JSON object")
        request_id, parameters = fields.pop("id", None), fields.pop("parameters", {})
        if not isinstance(request_id, str | None):
            raise FormatError("the id of the request has to be a text")
        if not isinstance(parameters, dict):
            raise FormatError("the parameters of the request have to be a JSON object")
        prompts = {name: fields.pop(name) for name in ("text_input", "messages") if name in fields}
        if repeated := fields.keys() & parameters:
            raise FormatError(f"the parameter {min(repeated)[:60]} is given twice")
        return cls(request_id, *_parse_generation(prompts, fields | parameters, is_stream))

    def make_answer(self, version: ModelVersion, text: str) -> Json:
        answer = {"model_name": version.name, "model_version": str(version.number), "text_output": text}
        return {"id": self.id, **answer} if self.id else answer


def _parse_generation(prompts: Json, parameters: Json, is_stream: bool) -> tuple[GenerationRequest, float | None]:
    """The request, and its timeout in seconds."""
    if unknown := sorted(parameters.keys() - set(PARAMETERS)):
        raise FormatError(f"the parameter {unknown[0][:60]!r} is unknown; there are {', '.join(PARAMETERS)}")
    if len(prompts) != 1:
        raise FormatError("the request has to have either text_input or messages")
    if parameters.pop("stream", is_stream) is not is_stream:
        raise FormatError(f"stream has to be {str(is_stream).lower()}; only generate_stream streams")
    prompt = prompts.get("text_input")
    if "text_input" in prompts and not isinstance(prompt, str):
        raise FormatError("text_input has to be a text")
    timeout = parameters.pop("timeout", 0)
    if type(timeout) is not int or timeout < 0:
        raise FormatError("timeout has to be a number of microseconds")
    stop = parameters.pop("stop", ())
    stops = (stop,) if isinstance(stop, str) else stop
    if not isinstance(stops, list | tuple):
        raise FormatError("stop has to be a text or a list of texts")
    generation = GenerationRequest(
        parse_messages(prompts["messages"]) if prompt is None else prompt, is_stream, tuple(stops), **parameters
    )
    return generation, timeout / 1e6 or None


class _ClientLeftError(Exception):
    """Nothing waits for the text any more."""


@dataclass(eq=False, slots=True)
class _GenerationPlaces:
    """The places in which a model generates, and the number of requests that have one or wait for one."""

    semaphore: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_CONCURRENT_TEXTS))
    num_requests: int = 0


@dataclass(eq=False, slots=True)
class TextGenerator:
    """Generates texts in threads, ``MAX_CONCURRENT_TEXTS`` of a model at a time."""

    _thread_pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(64, "generate"))
    _places: dict[ModelVersion, _GenerationPlaces] = field(default_factory=dict)

    async def stream_pieces(
        self, version: ModelVersion, generation: GenerationRequest, deadline: float
    ) -> AsyncGenerator[str]:
        """The text in pieces that are not empty. The generation ends when this iterator is closed. Raises what the
        model raises, TimeoutError at the time ``deadline`` of the event loop, and QueueFullError if too many wait."""
        queued_at = time.perf_counter()
        async with self._hold_place(version, deadline):
            start = time.perf_counter()
            loop, queue, is_closed = asyncio.get_running_loop(), asyncio.Queue[str | Exception | None](), Event()

            def push_piece(piece: str | Exception | None) -> None:
                if is_closed.is_set():
                    raise _ClientLeftError
                if piece != "":
                    loop.call_soon_threadsafe(queue.put_nowait, piece)

            def run_generation() -> None:
                try:
                    generate_text(version.predictor.task, generation, push_piece)
                except _ClientLeftError:
                    return
                except Exception as error:
                    push_piece(error)
                else:
                    push_piece(None)

            self._thread_pool.submit(run_generation)
            try:
                while (piece := await _await_before(deadline, queue.get())) is not None:
                    if isinstance(piece, Exception):
                        raise piece
                    if loop.time() > deadline:  # There was always a piece that the client had not read yet.
                        raise TimeoutError
                    yield piece
            finally:
                is_closed.set()
            version.metrics.count_execution(Execution(1, start - queued_at, time.perf_counter() - start))

    @asynccontextmanager
    async def _hold_place(self, version: ModelVersion, deadline: float) -> AsyncIterator[None]:
        places = self._places.setdefault(version, _GenerationPlaces())
        if places.num_requests >= MAX_CONCURRENT_TEXTS + version.batcher.max_waiting:
            raise QueueFullError
        places.num_requests += 1
        try:
            await _await_before(deadline, places.semaphore.acquire())
            try:
                yield
            finally:
                places.semaphore.release()
        finally:
            places.num_requests -= 1
            if not places.num_requests:
                del self._places[version]

    def close(self) -> None:
        self._thread_pool.shutdown(wait=False, cancel_futures=True)


async def _await_before(deadline: float, awaitable: Awaitable[Result]) -> Result:
    async with asyncio.timeout_at(deadline):
        return await awaitable

"""The functions of the service, which HTTP and gRPC share: metadata, inference, statistics, repository control."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager
from typing import Any, TypeVar

from prometheus_client import Metric

import ckpt_tools
from ckpt_tools.errors import CkptError, FormatError

from ..models.predictor import Prediction, Predictor, TensorSpec
from ..models.results import BYTES, Item
from ..models.task import TooLongError, check_length
from .batching import QueueFullError
from .decoding import MAX_WAITING_LARGE, Decoders
from .generating import GenerateRequest, Generators
from .metrics import merge_replicas, triton_statistics
from .protocol import InferRequest, tensor_metadata
from .refusals import RETRY_AFTER, Refused, is_permitted, no_token
from .repository import READY, ModelsEndedError, NotReadyError, Repository, UnknownModelError, Version
from .settings import Settings

LOG = logging.getLogger(__name__)

EXTENSIONS = ("binary_tensor_data", "statistics", "model_configuration")
CONTROL_EXTENSION = "model_repository"
PLATFORM = "pytorch"

LARGE_REQUEST = 64 * 2**10  # larger requests are parsed in a thread, so that they do not block the event loop
COUNTING_SECONDS = 5.0  # timeout for the counts of all replicas
Json = dict[str, Any]
Answer = TypeVar("Answer")

Replicas = Callable[[], Awaitable[Mapping[int, Sequence[Metric]]]]
"""The metrics of all replicas of the service by number, if there are several."""

Parse = Callable[[Version], InferRequest]
Render = Callable[[InferRequest, Sequence[Prediction], Version], Answer]


class Service:
    """Requests to the models of a repository. Every method may raise ``Refused``."""

    def __init__(self, repository: Repository, settings: Settings, replicas: Replicas | None = None) -> None:
        self.repository, self.settings, self._replicas = repository, settings, replicas
        self.is_draining = False
        # One thread for loads, which leaves the event loop's threads to requests.
        self.loader = ThreadPoolExecutor(1, "loader")
        self.decoders, self.generators = Decoders(), Generators()

    def server(self) -> Json:
        extensions = [*EXTENSIONS, *([CONTROL_EXTENSION] if self.settings.has_model_control else [])]
        return {"name": "ckpt-tools", "version": ckpt_tools.__version__, "extensions": extensions}

    def check_control(self, authorization: bytes) -> None:
        """Raises ``Refused``: 401 if this ``Authorization`` has not the token of loads, 400 if models do not change."""
        if not is_permitted(self.settings.control_token or self.settings.token, authorization):
            raise no_token(" of --control-token" if self.settings.control_token else "")
        if not self.settings.has_model_control:
            raise Refused(400, "models cannot be loaded and unloaded: the service has no --model-control explicit")

    def check_ready(self) -> None:
        """Readiness for load balancers: not while draining, and not while a model that should answer is not loaded."""
        if self.is_draining:
            raise Refused(503, "the service is stopping")
        if not self.repository.is_ready:
            raise Refused(503, "a model is not loaded")

    def version(self, name: str, number: str | None) -> Version:
        with refusing_missing_models():
            return self.repository.version(name, number)

    async def metadata(self, name: str, number: str | None) -> Json:
        with refusing_missing_models(), self.repository.hold(name, number) as version:
            described, predictor = await _describe_weights(version), version.predictor
        return {
            "name": version.name,
            "versions": [str(number) for number in self._numbers(version)],
            "platform": PLATFORM,
            "inputs": [tensor_metadata(spec) for spec in predictor.inputs],
            "outputs": [tensor_metadata(spec) for spec in predictor.outputs],
            "parameters": {**described, "max_batch_size": predictor.max_batch},
        }

    def _numbers(self, version: Version) -> list[int]:
        return [each.number for each in self.repository.versions_of(version.name)]

    async def configuration(self, name: str, number: str | None) -> Json:
        """The fields of Triton's ModelConfig that apply. ``dims`` are a shape of the metadata without its first
        dimension, the batch."""
        with refusing_missing_models(), self.repository.hold(name, number) as version:
            described, predictor = await _describe_weights(version), version.predictor
        return {
            "name": version.name,
            "platform": PLATFORM,
            "backend": PLATFORM,
            "version_policy": {"specific": {"versions": self._numbers(version)}},
            "max_batch_size": predictor.max_batch,
            "input": [_configure_tensor(spec) for spec in predictor.inputs],
            "output": [_configure_tensor(spec) for spec in predictor.outputs],
            "dynamic_batching": {},
            "parameters": {key: {"string_value": text} for key, text in texts(described).items()},
        }

    async def statistics(self, name: str | None, number: str | None) -> Json:
        """Triton's statistics of one version, of all versions of a model, or of all models."""
        if name is None:
            found = self.repository.versions()
        elif number is not None:
            found = [self.version(name, number)]
        else:
            self.version(name, None)
            found = self.repository.versions_of(name)
        families = await self.metrics()
        return {"model_stats": [triton_statistics(families, version.name, version.number) for version in found]}

    async def metrics(self) -> Sequence[Metric]:
        """The metrics of all replicas. Raises ``Refused`` 503 if one is missing: partial sums would be wrong."""
        if self._replicas is None:
            return self.repository.metrics.families()
        try:
            async with asyncio.timeout(COUNTING_SECONDS):
                return merge_replicas(await self._replicas())
        except TimeoutError as error:
            raise Refused(503, "a replica does not report its counts; try again", RETRY_AFTER) from error

    async def infer(
        self,
        name: str,
        number: str | None,
        parse: Parse,
        render: Render[Answer],
        *,
        num_bytes: int,
        log_fields: MutableMapping[str, str],
        seconds: float | None = None,
    ) -> Answer:
        """The rendered answer of a model. ``parse`` reads the request of ``num_bytes`` for the version that answers;
        ``seconds`` is the client's own deadline; the version is written to ``log_fields`` for the access log."""
        with holding(self.repository, log_fields, name, number) as version, refusing_requests():
            asked = await _parse_request(parse, version, num_bytes)
            limits = (self.settings.timeout, asked.timeout, seconds)
            answers = await predictions(version, asked.items, min(each for each in limits if each is not None))
            return render(asked, answers, version)

    async def generate(
        self, name: str, number: str | None, body: bytes, *, is_stream: bool, log_fields: MutableMapping[str, str]
    ) -> AsyncGenerator[Json]:
        """The answers of Triton's generate extension, at least one, to a request in JSON: the text in pieces for a
        stream, else at once. ``log_fields`` as for :meth:`infer`."""
        with holding(self.repository, log_fields, name, number) as version, refusing_requests():
            asked = await asyncio.to_thread(GenerateRequest.parse, body, is_stream=is_stream)
            check_length(asked.generation.num_bytes, version.predictor.task.max_bytes, "the prompt")
            seconds = min(self.settings.timeout, asked.timeout or self.settings.timeout)
            most, until = version.batcher.max_waiting, asyncio.get_running_loop().time() + seconds
            is_empty = True
            with refusing(seconds, most, "texts wait to be generated"), logging_failures(version):
                async with aclosing(self.generators.pieces(version, asked.generation, until)) as pieces:
                    async for piece in pieces:
                        yield asked.answer(version, piece)
                        is_empty = False
            if is_empty:
                yield asked.answer(version, "")

    async def decode(self, predictor: Predictor, data: bytes, name: str) -> Item:
        """One input of the model, of an image file or a text. Raises ``Refused``: 400, 503 and 504 as
        :func:`predictions`."""
        with refusing(self.settings.timeout, MAX_WAITING_LARGE, "large images wait to be decoded"):
            async with asyncio.timeout(self.settings.timeout):
                return await self.decoders.decode(predictor, data, name)

    def close(self) -> None:
        """Unload all models, once requests are answered."""
        self.decoders.close()
        self.generators.close()
        self.repository.close()

    def index(self, *, only_ready: bool) -> list[Json]:
        return [entry for entry in self.repository.list_index() if entry["state"] == READY or not only_ready]

    async def load(self, name: str, parameters: Json) -> None:
        """Load what is at the model's own URL now. A client cannot choose another URL, which would expose files."""
        if parameters:
            shown = str(parameters)[:60]
            raise Refused(400, f"a model is loaded as the service was started with it; {shown} is not taken")
        try:
            await self._change(self.repository.load, name)
        except CkptError as error:
            LOG.error("%s cannot be loaded: %s", name, error)
            raise Refused(400, f"the model {name} cannot be loaded; the log of the service says why") from error

    async def unload(self, name: str, parameters: Json) -> None:
        """Unload a model. Triton's client always sends ``unload_dependents``; no model here depends on another."""
        if unknown := sorted(parameters.keys() - {"unload_dependents"}):
            raise Refused(400, f"the parameter {unknown[0][:60]!r} of an unload is not supported")
        await self._change(self.repository.unload, name)

    async def _change(self, change: Callable[[str], None], name: str) -> None:
        with refusing_missing_models():
            await asyncio.get_running_loop().run_in_executor(self.loader, change, name)


@contextmanager
def holding(
    repository: Repository, log_fields: MutableMapping[str, str], name: str, number: str | None
) -> Iterator[Version]:
    """The version of a request, kept loaded and counted; its name goes to the access log. ``Refused`` 404."""
    with refusing_missing_models(), repository.hold(name, number) as version:
        log_fields.update(model=name, version=str(version.number))
        with _counted(version):
            yield version


@contextmanager
def refusing_missing_models() -> Iterator[None]:
    """Refuses a request to a model that is not there: 503 if it is about to be loaded again, 404 otherwise."""
    try:
        yield
    except (UnknownModelError, NotReadyError) as error:
        if isinstance(error, NotReadyError) and not error.is_unloaded:
            raise Refused(503, f"{error}; try again", RETRY_AFTER) from error
        raise Refused(404, str(error)) from error


@contextmanager
def _counted(version: Version) -> Iterator[None]:
    begun = time.perf_counter()
    try:
        yield
    except BaseException as error:
        version.metrics.count_failure(_reason(error), time.perf_counter() - begun)
        raise
    version.metrics.count_success(time.perf_counter() - begun)


def _reason(error: BaseException) -> str:
    if isinstance(error, asyncio.CancelledError | GeneratorExit):
        return "CANCELED"
    status = error.status if isinstance(error, Refused) else 500
    return {503: "REJECTED", 504: "REJECTED", 500: "BACKEND"}.get(status, "OTHER")


async def predictions(version: Version, items: Sequence[Item], seconds: float) -> list[Prediction]:
    """The answer for each item. Raises Refused: 503 if the queue is full or the process of the models ended, 504 if the
    model takes longer than ``seconds``, 400 if it does not take such items, 500 if it fails."""
    with refusing(seconds, version.batcher.max_waiting, "inputs wait for the model"), logging_failures(version):
        async with asyncio.timeout(seconds):
            return await version.batcher.submit_all(items)


@contextmanager
def logging_failures(version: Version) -> Iterator[None]:
    """Maps unexpected errors of the model to ``Refused`` 500, and logs them."""
    try:
        yield
    except (QueueFullError, TimeoutError, FormatError, ModelsEndedError, Refused):
        raise
    except Exception as error:
        LOG.error("the model %s, version %d, failed", version.name, version.number, exc_info=error)
        raise Refused(500, "the model failed on this request; the log of the service says why") from error


@contextmanager
def refusing(seconds: float, most: int, what: str) -> Iterator[None]:
    """Maps errors of the block to ``Refused``. ``most`` is the length of its queue, of ``what``."""
    try:
        with refusing_requests():
            yield
    except QueueFullError as error:
        raise Refused(503, f"{most} {what}, which is the limit; try again", RETRY_AFTER) from error
    except TimeoutError as error:
        raise Refused(504, f"the model did not answer within {seconds:g} seconds") from error


@contextmanager
def refusing_requests() -> Iterator[None]:
    """Maps errors of reading a request to ``Refused``: 413 for a text that is too long, else 400."""
    try:
        yield
    except FormatError as error:
        raise Refused(413 if isinstance(error, TooLongError) else 400, error.message) from error
    except ModelsEndedError as error:
        raise ended(error) from error


def ended(error: ModelsEndedError) -> Refused:
    return Refused(503, f"{error.message}; it is started again", RETRY_AFTER)


async def _parse_request(parse: Parse, version: Version, num_bytes: int) -> InferRequest:
    if num_bytes > LARGE_REQUEST or any(spec.datatype == BYTES for spec in version.predictor.inputs):
        return await asyncio.to_thread(parse, version)
    return parse(version)


async def _describe_weights(version: Version) -> Json:
    """Facts that metadata and configuration both give of a model. Raises ``Refused`` 503 if its process has ended."""
    try:
        sizes = await asyncio.to_thread(lambda: version.predictor.batch_sizes)
    except ModelsEndedError as error:
        raise ended(error) from error
    batch_sizes = {shape: list(found) for shape, found in sizes.items()}
    return {**identity(version), "labels": version.predictor.labels, "batch_sizes": batch_sizes}


def texts(values: Json) -> dict[str, str]:
    """Values for messages that hold only texts: each other value as JSON. Unknown values are left out."""
    return {
        key: value if isinstance(value, str) else json.dumps(value)
        for key, value in values.items()
        if value is not None
    }


def identity(version: Version) -> Json:
    """The weights that answer. The source is cut to its last two parts: server paths are not exposed."""
    known = version.predictor.identity
    return {
        "digest": known.digest,
        "source": "/".join(known.source.rstrip("/").split("/")[-2:]),
        "format": known.format,
        "step": known.step,
        "world_size": known.world_size,
    }


def _configure_tensor(spec: TensorSpec) -> Json:
    datatype = "STRING" if spec.datatype == "BYTES" else spec.datatype
    return {"name": spec.name, "data_type": f"TYPE_{datatype}", "dims": list(spec.shape[1:])}

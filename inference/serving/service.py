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
from ..models.results import BYTES, ModelInput
from ..models.task import TextTooLongError, check_length
from .batching import QueueFullError
from .decoding import MAX_WAITING_LARGE, InputDecoder
from .generating import GenerateRequest, TextGenerator
from .metrics import compute_triton_statistics, merge_replicas
from .protocol import InferRequest, describe_tensor
from .refusals import RETRY_AFTER, RequestRefusal, is_permitted, make_token_refusal
from .repository import READY, ModelRepository, ModelsEndedError, ModelVersion, NotReadyError, UnknownModelError
from .settings import ServiceSettings

LOG = logging.getLogger(__name__)

EXTENSIONS = ("binary_tensor_data", "statistics", "model_configuration")
CONTROL_EXTENSION = "model_repository"
PLATFORM = "pytorch"

LARGE_REQUEST_BYTES = 64 * 2**10  # larger requests are parsed in a thread, so that they do not block the event loop
COUNTING_SECONDS = 5.0  # timeout for the counts of all replicas
Json = dict[str, Any]
Answer = TypeVar("Answer")

ReplicaMetrics = Callable[[], Awaitable[Mapping[int, Sequence[Metric]]]]
"""The metrics of all replicas of the service by number, if there are several."""

ParseRequest = Callable[[ModelVersion], InferRequest]
RenderAnswer = Callable[[InferRequest, Sequence[Prediction], ModelVersion], Answer]


class Service:
    """Requests to the models of a repository. Every method may raise ``RequestRefusal``."""

    def __init__(
        self, repository: ModelRepository, settings: ServiceSettings, get_replica_metrics: ReplicaMetrics | None = None
    ) -> None:
        self.repository, self.settings, self._get_replica_metrics = repository, settings, get_replica_metrics
        self.is_draining = False
        # One thread for loads, which leaves the event loop's threads to requests.
        self._load_thread = ThreadPoolExecutor(1, "loader")
        self._input_decoder, self._text_generator = InputDecoder(), TextGenerator()

    def describe_server(self) -> Json:
        extensions = [*EXTENSIONS, *([CONTROL_EXTENSION] if self.settings.has_model_control else [])]
        return {"name": "ckpt-tools", "version": ckpt_tools.__version__, "extensions": extensions}

    def check_control_token(self, authorization: bytes) -> None:
        """Refuses a load or an unload: 401 without its token in ``authorization``, 400 if models do not change."""
        if not is_permitted(self.settings.control_token or self.settings.token, authorization):
            raise make_token_refusal(" of --control-token" if self.settings.control_token else "")
        if not self.settings.has_model_control:
            raise RequestRefusal(
                400, "models cannot be loaded and unloaded: the service has no --model-control explicit"
            )

    def check_ready(self) -> None:
        """Readiness for load balancers: not while draining, and not while a model that should answer is not loaded."""
        if self.is_draining:
            raise RequestRefusal(503, "the service is stopping")
        if not self.repository.is_ready:
            raise RequestRefusal(503, "a model is not loaded")

    def get_version(self, name: str, number: str | None) -> ModelVersion:
        with refuse_missing_models():
            return self.repository.get_version(name, number)

    async def describe_model(self, name: str, number: str | None) -> Json:
        with refuse_missing_models(), self.repository.hold_version(name, number) as version:
            described, predictor = await _describe_weights(version), version.predictor
        return {
            "name": version.name,
            "versions": [str(number) for number in self._list_version_numbers(version)],
            "platform": PLATFORM,
            "inputs": [describe_tensor(spec) for spec in predictor.inputs],
            "outputs": [describe_tensor(spec) for spec in predictor.outputs],
            "parameters": {**described, "max_batch_size": predictor.max_batch},
        }

    def _list_version_numbers(self, version: ModelVersion) -> list[int]:
        return [each.number for each in self.repository.list_model_versions(version.name)]

    async def describe_configuration(self, name: str, number: str | None) -> Json:
        """The fields of Triton's ModelConfig that apply. ``dims`` are a shape of the metadata without its first
        dimension, the batch."""
        with refuse_missing_models(), self.repository.hold_version(name, number) as version:
            described, predictor = await _describe_weights(version), version.predictor
        return {
            "name": version.name,
            "platform": PLATFORM,
            "backend": PLATFORM,
            "version_policy": {"specific": {"versions": self._list_version_numbers(version)}},
            "max_batch_size": predictor.max_batch,
            "input": [_configure_tensor(spec) for spec in predictor.inputs],
            "output": [_configure_tensor(spec) for spec in predictor.outputs],
            "dynamic_batching": {},
            "parameters": {key: {"string_value": text} for key, text in format_as_texts(described).items()},
        }

    async def compute_statistics(self, name: str | None, number: str | None) -> Json:
        """Triton's statistics of one version, of all versions of a model, or of all models."""
        if name is None:
            versions = self.repository.list_versions()
        elif number is not None:
            versions = [self.get_version(name, number)]
        else:
            self.get_version(name, None)
            versions = self.repository.list_model_versions(name)
        families = await self.collect_metrics()
        return {"model_stats": [compute_triton_statistics(families, each.name, each.number) for each in versions]}

    async def collect_metrics(self) -> Sequence[Metric]:
        """The metrics of all replicas. Raises ``RequestRefusal`` 503 if one is missing: partial sums would be wrong."""
        if self._get_replica_metrics is None:
            return self.repository.metrics.collect_families()
        try:
            async with asyncio.timeout(COUNTING_SECONDS):
                return merge_replicas(await self._get_replica_metrics())
        except TimeoutError as error:
            raise RequestRefusal(503, "a replica does not report its counts; try again", RETRY_AFTER) from error

    async def infer(
        self,
        name: str,
        number: str | None,
        parse: ParseRequest,
        render: RenderAnswer[Answer],
        *,
        num_bytes: int,
        log_fields: MutableMapping[str, str],
        seconds: float | None = None,
    ) -> Answer:
        """The rendered answer of a model. ``parse`` reads the request of ``num_bytes`` for the version that answers;
        ``seconds`` is the client's own deadline; the version is written to ``log_fields`` for the access log."""
        with hold_counted_version(self.repository, log_fields, name, number) as version, refuse_bad_requests():
            request = await _parse_request(parse, version, num_bytes)
            limits = (self.settings.timeout, request.timeout, seconds)
            answers = await predict_items(version, request.items, min(each for each in limits if each is not None))
            return render(request, answers, version)

    async def generate(
        self, name: str, number: str | None, body: bytes, *, is_stream: bool, log_fields: MutableMapping[str, str]
    ) -> AsyncGenerator[Json]:
        """The answers of Triton's generate extension, at least one, to a request in JSON: the text in pieces for a
        stream, else at once. ``log_fields`` as for :meth:`infer`."""
        with hold_counted_version(self.repository, log_fields, name, number) as version, refuse_bad_requests():
            request = await asyncio.to_thread(GenerateRequest.parse, body, is_stream=is_stream)
            check_length(request.generation.num_bytes, version.predictor.task.max_bytes, "the prompt")
            seconds = min(self.settings.timeout, request.timeout or self.settings.timeout)
            max_waiting, deadline = version.batcher.max_waiting, asyncio.get_running_loop().time() + seconds
            is_empty = True
            with refuse_overload(seconds, max_waiting, "texts wait to be generated"), log_failures(version):
                async with aclosing(
                    self._text_generator.stream_pieces(version, request.generation, deadline)
                ) as pieces:
                    async for piece in pieces:
                        yield request.make_answer(version, piece)
                        is_empty = False
            if is_empty:
                yield request.make_answer(version, "")

    async def decode_item(self, predictor: Predictor, data: bytes, name: str) -> ModelInput:
        """One input of the model, of an image file or a text. Raises ``RequestRefusal``: 400, 503 and 504 as
        :func:`predict_items`."""
        with refuse_overload(self.settings.timeout, MAX_WAITING_LARGE, "large images wait to be decoded"):
            async with asyncio.timeout(self.settings.timeout):
                return await self._input_decoder.decode(predictor, data, name)

    def close(self) -> None:
        """Unload all models, once requests are answered."""
        self._input_decoder.close()
        self._text_generator.close()
        self.repository.close()

    def list_index(self, *, only_ready: bool) -> list[Json]:
        return [entry for entry in self.repository.list_index() if entry["state"] == READY or not only_ready]

    async def load_model(self, name: str, parameters: Json) -> None:
        """Load what is at the model's own URL now. A client cannot choose another URL, which would expose files."""
        if parameters:
            shown = str(parameters)[:60]
            raise RequestRefusal(400, f"a model is loaded as the service was started with it; {shown} is not taken")
        try:
            await self._change_models(self.repository.load, name)
        except CkptError as error:
            LOG.error("%s cannot be loaded: %s", name, error)
            raise RequestRefusal(400, f"the model {name} cannot be loaded; the log of the service says why") from error

    async def unload_model(self, name: str, parameters: Json) -> None:
        """Unload a model. Triton's client always sends ``unload_dependents``; no model here depends on another."""
        if unknown := sorted(parameters.keys() - {"unload_dependents"}):
            raise RequestRefusal(400, f"the parameter {unknown[0][:60]!r} of an unload is not supported")
        await self._change_models(self.repository.unload, name)

    async def _change_models(self, change: Callable[[str], None], name: str) -> None:
        with refuse_missing_models():
            await asyncio.get_running_loop().run_in_executor(self._load_thread, change, name)


@contextmanager
def hold_counted_version(
    repository: ModelRepository, log_fields: MutableMapping[str, str], name: str, number: str | None
) -> Iterator[ModelVersion]:
    """The version of a request, kept loaded and counted; its name goes to the access log. Refuses if it is missing."""
    with refuse_missing_models(), repository.hold_version(name, number) as version:
        log_fields.update(model=name, version=str(version.number))
        with _count_request(version):
            yield version


@contextmanager
def refuse_missing_models() -> Iterator[None]:
    """Refuses a request to a model that is not there: 503 if it is about to be loaded again, 404 otherwise."""
    try:
        yield
    except (UnknownModelError, NotReadyError) as error:
        if isinstance(error, NotReadyError) and not error.is_unloaded:
            raise RequestRefusal(503, f"{error}; try again", RETRY_AFTER) from error
        raise RequestRefusal(404, str(error)) from error


@contextmanager
def _count_request(version: ModelVersion) -> Iterator[None]:
    start = time.perf_counter()
    try:
        yield
    except BaseException as error:
        version.metrics.count_failure(_find_failure_reason(error), time.perf_counter() - start)
        raise
    version.metrics.count_success(time.perf_counter() - start)


def _find_failure_reason(error: BaseException) -> str:
    if isinstance(error, asyncio.CancelledError | GeneratorExit):
        return "CANCELED"
    status = error.status if isinstance(error, RequestRefusal) else 500
    return {503: "REJECTED", 504: "REJECTED", 500: "BACKEND"}.get(status, "OTHER")


async def predict_items(version: ModelVersion, items: Sequence[ModelInput], seconds: float) -> list[Prediction]:
    """The answer for each item. Raises ``RequestRefusal``: 503 if the queue is full or the process of the models ended,
    504 if the model takes longer than ``seconds``, 400 if it does not take such items, 500 if it fails."""
    with refuse_overload(seconds, version.batcher.max_waiting, "inputs wait for the model"), log_failures(version):
        async with asyncio.timeout(seconds):
            return await version.batcher.submit_all(items)


@contextmanager
def log_failures(version: ModelVersion) -> Iterator[None]:
    """Maps unexpected errors of the model to ``RequestRefusal`` 500, and logs them."""
    try:
        yield
    except (QueueFullError, TimeoutError, FormatError, ModelsEndedError, RequestRefusal):
        raise
    except Exception as error:
        LOG.error("the model %s, version %d, failed", version.name, version.number, exc_info=error)
        raise RequestRefusal(500, "the model failed on this request; the log of the service says why") from error


@contextmanager
def refuse_overload(seconds: float, max_waiting: int, what: str) -> Iterator[None]:
    """Maps errors of the block to ``RequestRefusal``. ``max_waiting`` is the length of its queue, of ``what``."""
    try:
        with refuse_bad_requests():
            yield
    except QueueFullError as error:
        raise RequestRefusal(503, f"{max_waiting} {what}, which is the limit; try again", RETRY_AFTER) from error
    except TimeoutError as error:
        raise RequestRefusal(504, f"the model did not answer within {seconds:g} seconds") from error


@contextmanager
def refuse_bad_requests() -> Iterator[None]:
    """Maps errors of reading a request to ``RequestRefusal``: 413 for a text that is too long, else 400."""
    try:
        yield
    except FormatError as error:
        raise RequestRefusal(413 if isinstance(error, TextTooLongError) else 400, error.message) from error
    except ModelsEndedError as error:
        raise make_ended_refusal(error) from error


def make_ended_refusal(error: ModelsEndedError) -> RequestRefusal:
    return RequestRefusal(503, f"{error.message}; it is started again", RETRY_AFTER)


async def _parse_request(parse: ParseRequest, version: ModelVersion, num_bytes: int) -> InferRequest:
    if num_bytes > LARGE_REQUEST_BYTES or any(spec.datatype == BYTES for spec in version.predictor.inputs):
        return await asyncio.to_thread(parse, version)
    return parse(version)


async def _describe_weights(version: ModelVersion) -> Json:
    """Facts that metadata and configuration both give of a model. Refuses with 503 if its process has ended."""
    try:
        sizes = await asyncio.to_thread(lambda: version.predictor.batch_sizes)
    except ModelsEndedError as error:
        raise make_ended_refusal(error) from error
    batch_sizes = {shape: list(shape_sizes) for shape, shape_sizes in sizes.items()}
    return {**describe_identity(version), "labels": version.predictor.labels, "batch_sizes": batch_sizes}


def format_as_texts(values: Json) -> dict[str, str]:
    """Values for messages that hold only texts: each other value as JSON. Unknown values are left out."""
    return {
        key: value if isinstance(value, str) else json.dumps(value)
        for key, value in values.items()
        if value is not None
    }


def describe_identity(version: ModelVersion) -> Json:
    """The weights that answer. The source is cut to its last two parts: server paths are not exposed."""
    weights = version.predictor.identity
    return {
        "digest": weights.digest,
        "source": "/".join(weights.source.rstrip("/").split("/")[-2:]),
        "format": weights.format,
        "step": weights.step,
        "world_size": weights.world_size,
    }


def _configure_tensor(spec: TensorSpec) -> Json:
    datatype = "STRING" if spec.datatype == "BYTES" else spec.datatype
    return {"name": spec.name, "data_type": f"TYPE_{datatype}", "dims": list(spec.shape[1:])}

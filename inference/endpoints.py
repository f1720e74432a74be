"""The paths of the Open Inference Protocol v2, and Triton's for the repository, statistics and configuration."""

from __future__ import annotations

import asyncio
import json
import logging
import zlib
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import ckpt_tools
from ckpt_tools.errors import CkptError

from .asking import held, predictions
from .front import Traffic, too_large
from .predictor import Predictor, TensorSpec
from .protocol import BadRequestError, InferRequest, infer_response, parse_infer, tensor_metadata
from .refusals import CLOSE, Refused
from .repository import NotReadyError, Repository, UnknownModelError, Version
from .settings import MAX_BODY_BYTES, Settings

LOG = logging.getLogger(__name__)

JSON_LENGTH = "Inference-Header-Content-Length"
EXTENSIONS = ["binary_tensor_data", "model_repository", "statistics", "model_configuration"]
PLATFORM = "pytorch"

LARGE_BODY = 64 * 2**10
"""A larger request is parsed beside the event loop, so that it holds nobody up."""

Json = dict[str, Any]
Handler = Callable[[Request], Awaitable[Response]]


class Endpoints:
    """The handlers, over the models of a repository."""

    def __init__(self, repository: Repository, settings: Settings, traffic: Traffic) -> None:
        self.repository, self.settings, self.traffic = repository, settings, traffic
        # Loads take turns in a thread of their own: they leave the others to requests.
        self.loader = ThreadPoolExecutor(1, "loader")

    def routes(self) -> list[Route]:
        model, version = "/v2/models/{name}", "/v2/models/{name}/versions/{version}"
        gets: dict[str, Handler] = {
            "/v2": self.server,
            "/v2/health/live": self.live,
            "/v2/health/ready": self.ready,
            "/v2/models/stats": self.statistics,
            **dict.fromkeys((model, version), self.metadata),
            **{f"{base}/ready": self.model_ready for base in (model, version)},
            **{f"{base}/stats": self.statistics for base in (model, version)},
            **{f"{base}/config": self.configuration for base in (model, version)},
        }
        posts: dict[str, Handler] = {
            **{f"{base}/infer": self.infer for base in (model, version)},
            "/v2/repository/index": self.index,
            "/v2/repository/models/{name}/load": self.load,
            "/v2/repository/models/{name}/unload": self.unload,
        }
        return [
            *(Route(path, handler, methods=["GET"]) for path, handler in gets.items()),
            *(Route(path, handler, methods=["POST"]) for path, handler in posts.items()),
        ]

    # --- the server

    async def server(self, _: Request) -> Response:
        return JSONResponse({"name": "ckpt-tools", "version": ckpt_tools.__version__, "extensions": EXTENSIONS})

    async def live(self, _: Request) -> Response:
        return JSONResponse({"live": True})

    async def ready(self, _: Request) -> Response:
        """For a load balancer: not while the service ends, and not while a model is missing that should answer."""
        if self.traffic.is_draining:
            raise Refused(503, "the service is stopping")
        if not self.repository.is_ready:
            raise Refused(503, "a model is not loaded")
        return JSONResponse({"ready": True})

    # --- a model

    async def metadata(self, request: Request) -> Response:
        version = self._version(request)
        predictor = version.predictor
        return JSONResponse(
            {
                "name": version.name,
                "versions": [str(each.number) for each in self.repository.versions_of(version.name)],
                "platform": PLATFORM,
                "inputs": [tensor_metadata(spec) for spec in predictor.inputs],
                "outputs": [tensor_metadata(spec) for spec in predictor.outputs],
                "parameters": {**identity(version), "labels": predictor.labels},
            }
        )

    async def model_ready(self, request: Request) -> Response:
        return JSONResponse({"name": self._version(request).name, "ready": True})

    async def configuration(self, request: Request) -> Response:
        """As much of Triton's ModelConfig as is true here."""
        version = self._version(request)
        predictor = version.predictor
        return JSONResponse(
            {
                "name": version.name,
                "platform": PLATFORM,
                "backend": PLATFORM,
                "max_batch_size": predictor.max_batch,
                "input": [_configured(spec) for spec in predictor.inputs],
                "output": [_configured(spec) for spec in predictor.outputs],
                "dynamic_batching": {},
                "parameters": {key: {"string_value": str(value)} for key, value in identity(version).items()},
            }
        )

    async def statistics(self, request: Request) -> Response:
        if "name" not in request.path_params:
            found = self.repository.versions()
        elif "version" in request.path_params:
            found = [self._version(request)]
        else:
            self._version(request)
            found = self.repository.versions_of(request.path_params["name"])
        return JSONResponse({"model_stats": [_statistics(version) for version in found]})

    async def infer(self, request: Request) -> Response:
        """The body first: a client that is slow holds no version."""
        name, number = request.path_params["name"], request.path_params.get("version")
        body = await read_body(request)
        with held(self.repository, request, name, number) as version:
            asked = await self._parsed(body, request.headers.get(JSON_LENGTH), version)
            seconds = min(self.settings.timeout, asked.timeout or self.settings.timeout)
            answers = await predictions(version, asked.items, seconds)
            answer = infer_response(asked, answers, name, str(version.number))
        if answer.json_bytes is None:
            return Response(answer.content, media_type="application/json")
        length = {JSON_LENGTH: str(answer.json_bytes)}
        return Response(answer.content, media_type="application/octet-stream", headers=length)

    async def _parsed(self, body: bytes, length: str | None, version: Version) -> InferRequest:
        parse = partial(parse_infer, body, length, version.predictor, version.batcher.max_waiting)
        try:
            if len(body) > LARGE_BODY or _decodes(version.predictor):
                return await asyncio.to_thread(parse)
            return parse()
        except BadRequestError as error:
            raise Refused(400, str(error)) from error

    def _version(self, request: Request) -> Version:
        try:
            return self.repository.version(request.path_params["name"], request.path_params.get("version"))
        except (UnknownModelError, NotReadyError) as error:
            raise Refused(404, str(error)) from error

    # --- the repository

    async def index(self, request: Request) -> Response:
        only_ready = (await _json_object(request)).get("ready", False)
        if not isinstance(only_ready, bool):
            raise Refused(400, "ready has to be true or false")
        entries = [entry for entry in self.repository.index() if entry.state == "READY" or not only_ready]
        return JSONResponse(
            [
                {"name": entry.name, "version": entry.version, "state": entry.state, "reason": entry.reason}
                for entry in entries
            ]
        )

    async def load(self, request: Request) -> Response:
        """What the model's own URL has now. Another one cannot be named: whoever may ask may not choose files."""
        if parameters := (await _json_object(request)).get("parameters"):
            shown = str(parameters)[:60]
            raise Refused(400, f"a model is loaded as the service was started with it; {shown} is not taken")
        name = request.path_params["name"]
        try:
            await asyncio.get_running_loop().run_in_executor(self.loader, self.repository.load, name)
        except UnknownModelError as error:
            raise Refused(404, str(error)) from error
        except CkptError as error:
            LOG.error("%s cannot be loaded: %s", name, error)
            raise Refused(400, f"the model {name} cannot be loaded; the log of the service says why") from error
        return JSONResponse({})

    async def unload(self, request: Request) -> Response:
        await _json_object(request)
        try:
            name = request.path_params["name"]
            await asyncio.get_running_loop().run_in_executor(self.loader, self.repository.unload, name)
        except UnknownModelError as error:
            raise Refused(404, str(error)) from error
        return JSONResponse({})


def identity(version: Version) -> Json:
    """Which weights answer. Of the source the last two parts: a place of the server is nobody's business."""
    known = version.predictor.identity
    return {
        "digest": known.digest,
        "source": "/".join(known.source.rstrip("/").split("/")[-2:]),
        "format": known.format,
        "step": known.step,
        "world_size": known.world_size,
    }


def _decodes(predictor: Predictor) -> bool:
    return any(spec.datatype == "BYTES" for spec in predictor.inputs)


def _configured(spec: TensorSpec) -> Json:
    datatype = "STRING" if spec.datatype == "BYTES" else spec.datatype
    return {"name": spec.name, "data_type": f"TYPE_{datatype}", "dims": list(spec.shape[1:]) or [1]}


def _statistics(version: Version) -> Json:
    counts = version.statistics
    failures = sum(counts.failures.values())
    return {
        "name": version.name,
        "version": str(version.number),
        "last_inference": counts.last_inference_ms,
        "inference_count": counts.inferences,
        "execution_count": counts.executions,
        "inference_stats": {
            "success": {"count": counts.successes, "ns": counts.request_ns},
            "fail": {"count": failures, "ns": counts.failure_ns},
            "queue": {"count": counts.inferences, "ns": counts.queue_ns},
            "compute_infer": {"count": counts.inferences, "ns": counts.compute_ns},
        },
        "pending_request_count": version.batcher.num_waiting,
    }


# --- bodies


async def read_body(request: Request) -> bytes:
    """The whole body, decompressed. Raises ``Refused``."""
    try:
        body = await request.body()
    except ClientDisconnect as error:
        raise Refused(400, "the connection was closed before the whole request was there", CLOSE) from error
    encoding = request.headers.get("Content-Encoding", "identity").lower()
    if encoding == "identity":
        return body
    if encoding not in {"gzip", "deflate"}:
        raise Refused(415, f"the content encoding {encoding[:40]!r} is not known; gzip and deflate are")
    return await asyncio.to_thread(_inflated, body, request.url.path)


def _inflated(body: bytes, path: str) -> bytes:
    """Of gzip or zlib. It stops as soon as there is more than a body may have."""
    unpacker = zlib.decompressobj(zlib.MAX_WBITS | 32)
    try:
        found = unpacker.decompress(body, MAX_BODY_BYTES + 1)
    except zlib.error as error:
        raise Refused(400, "the compressed request is damaged") from error
    if len(found) > MAX_BODY_BYTES:
        raise too_large(path)
    if not unpacker.eof or unpacker.unused_data:
        raise Refused(400, "the compressed request is damaged")
    return found


async def _json_object(request: Request) -> Json:
    """The body, a JSON object, or none."""
    body = await read_body(request)
    try:
        found = json.loads(body or b"{}")
    except (ValueError, RecursionError) as error:
        raise Refused(400, "the request is not JSON") from error
    if not isinstance(found, dict):
        raise Refused(400, "the request has to be a JSON object")
    return found

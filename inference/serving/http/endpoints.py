"""Endpoints of the Open Inference Protocol v2, and Triton's for repository, statistics and configuration."""

from __future__ import annotations

import asyncio
import json
import re
import zlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from ...models.predictor import Prediction
from ..protocol import InferRequest, make_infer_body, parse_infer_request
from ..refusals import CLOSE, RequestRefusal
from ..repository import ModelVersion
from ..service import Service
from ..settings import MAX_BODY_BYTES
from .events import EventStream
from .middleware import make_size_refusal

JSON_LENGTH_HEADER = "Inference-Header-Content-Length"

INFER_PATH = re.compile(r"/v2/models/(?P<name>[^/]+)(/versions/(?P<version>[^/]+))?/infer")

Json = dict[str, Any]
Handler = Callable[[Request], Awaitable[Response]]
RenderError = Callable[[Request, Exception], Awaitable[Response]]


class Endpoints:
    """HTTP handlers over the functions of the service."""

    def __init__(self, service: Service) -> None:
        self.service = service

    def list_routes(self) -> list[Route]:
        model, version = "/v2/models/{name}", "/v2/models/{name}/versions/{version}"
        gets: dict[str, Handler] = {
            **dict.fromkeys(("/v2", "/v2/"), self.server),
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
            **{f"{base}/generate": self.generate for base in (model, version)},
            **{f"{base}/generate_stream": self.generate_stream for base in (model, version)},
            "/v2/repository/index": self.index,
            "/v2/repository/models/{name}/load": self.load,
            "/v2/repository/models/{name}/unload": self.unload,
        }
        return [
            *(Route(path, handler, methods=["GET"]) for path, handler in gets.items()),
            *(Route(path, handler, methods=["POST"]) for path, handler in posts.items()),
        ]

    async def server(self, _: Request) -> Response:
        return JSONResponse(self.service.describe_server())

    async def live(self, _: Request) -> Response:
        return JSONResponse({"live": True})

    async def ready(self, _: Request) -> Response:
        self.service.check_ready()
        return JSONResponse({"ready": True})

    async def metadata(self, request: Request) -> Response:
        return JSONResponse(await self.service.describe_model(*_get_name_and_version(request)))

    async def model_ready(self, request: Request) -> Response:
        return JSONResponse({"name": self.service.get_version(*_get_name_and_version(request)).name, "ready": True})

    async def configuration(self, request: Request) -> Response:
        return JSONResponse(await self.service.describe_configuration(*_get_name_and_version(request)))

    async def statistics(self, request: Request) -> Response:
        path_params = request.path_params
        return JSONResponse(await self.service.compute_statistics(path_params.get("name"), path_params.get("version")))

    async def infer(self, request: Request) -> Response:
        """Infer. Reads the body first, so that a slow client does not keep a version loaded."""
        name, number = _get_name_and_version(request)
        body, length = await read_body(request), request.headers.get(JSON_LENGTH_HEADER)

        def parse(version: ModelVersion) -> InferRequest:
            return parse_infer_request(body, length, version.predictor, version.batcher.max_waiting)

        state = request.scope["state"]
        return await self.service.infer(name, number, parse, _render_answer, num_bytes=len(body), log_fields=state)

    async def generate(self, request: Request) -> Response:
        (answer,) = [each async for each in await self._start_generation(request, is_stream=False)]
        return JSONResponse(answer)

    async def generate_stream(self, request: Request) -> Response:
        """Server-sent events. An error before the first is an answer with its status."""
        answers = await self._start_generation(request, is_stream=True)
        return EventStream(await anext(answers), answers, self.service.settings.timeout)

    async def _start_generation(self, request: Request, *, is_stream: bool) -> AsyncGenerator[Json]:
        name, number = _get_name_and_version(request)
        body, state = await read_body(request), request.scope["state"]
        return self.service.generate(name, number, body, is_stream=is_stream, log_fields=state)

    async def index(self, request: Request) -> Response:
        only_ready = (await _read_json_object(request, "ready")).get("ready", False)
        if not isinstance(only_ready, bool):
            raise RequestRefusal(400, "ready has to be true or false")
        return JSONResponse(self.service.list_index(only_ready=only_ready))

    async def load(self, request: Request) -> Response:
        await self.service.load_model(request.path_params["name"], await self._read_control_parameters(request))
        return JSONResponse({})

    async def unload(self, request: Request) -> Response:
        await self.service.unload_model(request.path_params["name"], await self._read_control_parameters(request))
        return JSONResponse({})

    async def _read_control_parameters(self, request: Request) -> Json:
        """The parameters of a load or an unload, of a client that may change the models."""
        self.service.check_control_token(request.headers.get("Authorization", "").encode("latin-1"))
        parameters: object = (await _read_json_object(request, "parameters")).get("parameters") or {}
        if not isinstance(parameters, dict):
            raise RequestRefusal(400, "the parameters have to be a JSON object")
        return parameters


class FastPath:
    """Answers inference requests, and passes all others to ``app``. ``render_error`` answers an error. A request
    through FastAPI passes eight layers that do nothing for it, and the patterns of all other paths. They cost more
    processor time than reading the request, waiting in the queue and writing the answer together."""

    def __init__(self, app: ASGIApp, endpoints: Endpoints, render_error: RenderError) -> None:
        self.app, self.endpoints, self.render_error = app, endpoints, render_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path_match = INFER_PATH.fullmatch(scope["path"]) if scope["method"] == "POST" else None
        if path_match is None:
            await self.app(scope, receive, send)
            return
        scope["path_params"] = path_match.groupdict()
        request = Request(scope, receive)
        try:
            response = await self.endpoints.infer(request)
        except RequestRefusal as error:
            response = await self.render_error(request, error)
        except Exception as error:
            await (await self.render_error(request, error))(scope, receive, send)
            raise  # For the log.
        await response(scope, receive, send)


def _get_name_and_version(request: Request) -> tuple[str, str | None]:
    return request.path_params["name"], request.path_params.get("version")


def _render_answer(request: InferRequest, answers: Sequence[Prediction], version: ModelVersion) -> Response:
    body = make_infer_body(request, answers, version.name, str(version.number))
    if body.json_bytes is None:
        return Response(body.content, media_type="application/json")
    length = {JSON_LENGTH_HEADER: str(body.json_bytes)}
    return Response(body.content, media_type="application/octet-stream", headers=length)


async def read_body(request: Request) -> bytes:
    """The whole body, decompressed. Raises ``RequestRefusal``."""
    try:
        body = await request.body()
    except ClientDisconnect as error:
        raise RequestRefusal(400, "the connection was closed before the whole request was there", CLOSE) from error
    encoding = request.headers.get("Content-Encoding", "identity").lower()
    if encoding == "identity":
        return body
    if encoding not in {"gzip", "deflate"}:
        raise RequestRefusal(415, f"the content encoding {encoding[:40]!r} is not known; gzip and deflate are")
    return await asyncio.to_thread(_decompress, body, request.url.path)


def _decompress(body: bytes, path: str) -> bytes:
    """Decompress gzip or zlib, up to the size limit of a body."""
    unpacker = zlib.decompressobj(zlib.MAX_WBITS | 32)
    try:
        decompressed = unpacker.decompress(body, MAX_BODY_BYTES + 1)
    except zlib.error as error:
        raise RequestRefusal(400, "the compressed request is damaged") from error
    if len(decompressed) > MAX_BODY_BYTES:
        raise make_size_refusal(path)
    if not unpacker.eof or unpacker.unused_data:
        raise RequestRefusal(400, "the compressed request is damaged")
    return decompressed


async def _read_json_object(request: Request, field: str) -> Json:
    """The body, an object with at most this field. Raises ``RequestRefusal``."""
    body = await read_body(request)
    try:
        json_object = json.loads(body or b"{}")
    except (ValueError, RecursionError) as error:
        raise RequestRefusal(400, "the request is not JSON") from error
    if not isinstance(json_object, dict):
        raise RequestRefusal(400, "the request has to be a JSON object")
    if unknown := sorted(json_object.keys() - {field}):
        raise RequestRefusal(400, f"the request has the unknown field {unknown[0][:60]!r}")
    return json_object

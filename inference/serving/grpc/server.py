"""gRPC server in the event loop of the HTTP service.

Every call is handled as a stream of one message, which is the same on the wire, so that slow and malformed messages are
refused here instead of by the library.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any
from urllib.parse import unquote

import grpc
from google.protobuf.json_format import ParseDict

from ..http.middleware import choose_request_id, format_access_line
from ..protocol import BadRequestError, InferRequest
from ..refusals import RequestRefusal, is_permitted, make_token_refusal
from ..repository import ModelVersion
from ..service import Service, format_as_texts
from ..settings import HEAD_SECONDS, MAX_BODY_BYTES, GrpcSettings
from .requests import METHODS, SERVICE, RpcMethod, make_infer_response, parse_infer_message, parse_message

LOG = logging.getLogger(__name__)

GRACE_SECONDS = 10.0

REFUSING_SECONDS = 0.5
"""Time before the end in which new calls get ``UNAVAILABLE``: gRPC itself cancels those that arrive as it stops."""

OPEN_METHODS = frozenset({"ServerLive", "ServerReady"})
"""Methods without a token."""

CONTROL_METHODS = frozenset({"RepositoryModelLoad", "RepositoryModelUnload"})
"""Methods whose token ``Service`` checks."""

CODES: Mapping[int, grpc.StatusCode] = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    404: grpc.StatusCode.NOT_FOUND,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    500: grpc.StatusCode.INTERNAL,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
"""gRPC codes by HTTP status of ``RequestRefusal``."""


@asynccontextmanager
async def serve_grpc(service: Service, grpc_settings: GrpcSettings) -> AsyncIterator[None]:
    """Serve gRPC within the block; at its end, accept no calls and answer those in flight."""
    server = grpc.aio.server(
        options=[
            ("grpc.so_reuseport", 1),
            ("grpc.max_receive_message_length", MAX_BODY_BYTES),
            ("grpc.max_send_message_length", -1),
            ("grpc.server_handshake_timeout_ms", round(HEAD_SECONDS * 1000)),
        ]
    )
    handlers = GrpcHandlers(service)
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE, handlers.list_rpc_handlers())])
    _add_port(server, grpc_settings)
    await server.start()
    try:
        yield
    finally:
        handlers.is_stopping = True
        await asyncio.sleep(REFUSING_SECONDS)
        await server.stop(GRACE_SECONDS)


def _add_port(server: grpc.aio.Server, grpc_settings: GrpcSettings) -> None:
    if grpc_settings.certificate is None:
        server.add_insecure_port(grpc_settings.address)
        return
    pair = ((grpc_settings.key or grpc_settings.certificate).read_bytes(), grpc_settings.certificate.read_bytes())
    server.add_secure_port(grpc_settings.address, grpc.ssl_server_credentials([pair]))


@dataclass(slots=True)
class GrpcCall:
    """State of one call, for the access log."""

    name: str
    context: Any
    metadata: Mapping[str, str | bytes]
    request_id: str
    log_fields: dict[str, str] = field(default_factory=dict)
    start_counter: float = field(default_factory=time.perf_counter)
    start_time: datetime = field(default_factory=lambda: datetime.now(UTC))
    code: grpc.StatusCode = grpc.StatusCode.OK
    bytes_in: int = 0
    bytes_out: int = 0

    @classmethod
    def from_context(cls, name: str, context: Any) -> GrpcCall:
        metadata = dict(context.invocation_metadata() or ())
        return cls(name, context, metadata, choose_request_id(metadata.get("x-request-id", "")))

    @property
    def authorization(self) -> bytes:
        given = self.metadata.get("authorization", "")
        return given if isinstance(given, bytes) else given.encode()

    def log_line(self) -> str:
        return format_access_line(
            self.start_counter,
            self.start_time,
            request_id=self.request_id,
            client=parse_client_address(self.context.peer()),
            method="gRPC",
            path=f"/{SERVICE}/{self.name}",
            status=self.code.name,
            bytes_in=self.bytes_in,
            bytes_out=self.bytes_out,
            log_fields=self.log_fields,
        )


def parse_client_address(peer: str) -> str:
    """The address in a gRPC peer: ``ipv4:127.0.0.1:5000``, ``ipv6:%5B::1%5D:5000``."""
    return unquote(peer.partition(":")[2]).rpartition(":")[0].strip("[]")


Handler = Callable[[Any, GrpcCall], Awaitable[Any]]


class GrpcHandlers:
    """The service's methods, with token check, limits, counting and access log for every call."""

    def __init__(self, service: Service) -> None:
        self.service, self.settings, self.metrics = service, service.settings, service.repository.metrics
        self.is_stopping = False

    def list_rpc_handlers(self) -> dict[str, Any]:
        named: dict[str, Handler] = {
            "ServerLive": self.live,
            "ServerReady": self.ready,
            "ModelReady": self.model_ready,
            "ServerMetadata": self.server,
            "ModelMetadata": self.metadata,
            "ModelInfer": self.infer,
            "ModelConfig": self.configuration,
            "ModelStatistics": self.statistics,
            "RepositoryIndex": self.index,
            "RepositoryModelLoad": self.load,
            "RepositoryModelUnload": self.unload,
        }
        assert named.keys() == METHODS.keys()
        return {
            name: grpc.stream_unary_rpc_method_handler(partial(self.answer_call, name, METHODS[name], handler))
            for name, handler in named.items()
        }

    async def answer_call(self, name: str, method: RpcMethod, handler: Handler, _: object, context: Any) -> bytes:
        call = GrpcCall.from_context(name, context)
        self.metrics.in_flight.inc()
        try:
            return await self._run_handler(method, handler, call)
        except RequestRefusal as refusal:
            await self._abort_call(call, refusal)
            raise
        except asyncio.CancelledError:
            call.code = grpc.StatusCode.CANCELLED
            raise
        finally:
            self.metrics.in_flight.dec()
            self.metrics.grpc_responses.labels(call.code.name).inc()
            if self.settings.has_access_log:
                print(call.log_line(), flush=True)

    async def _run_handler(self, method: RpcMethod, handler: Handler, call: GrpcCall) -> bytes:
        if self.is_stopping:
            raise RequestRefusal(503, "the service is stopping")
        self._check_sender(call)
        call.context.set_trailing_metadata((("x-request-id", call.request_id),))
        try:
            request = parse_message(method.request, await self._read_message(call))
            response: bytes = (await handler(request, call)).SerializeToString()
        except BadRequestError as error:
            raise RequestRefusal(400, str(error)) from error
        except (RequestRefusal, asyncio.CancelledError):
            raise
        except Exception as error:
            LOG.error("the call %s failed", call.name, exc_info=error)
            raise RequestRefusal(500, "the service failed on this request; its log says why") from error
        call.bytes_out = len(response)
        return response

    def _check_sender(self, call: GrpcCall) -> None:
        if call.name in CONTROL_METHODS:
            self.service.check_control_token(call.authorization)
        elif call.name not in OPEN_METHODS and not is_permitted(self.settings.token, call.authorization):
            raise make_token_refusal()

    async def _read_message(self, call: GrpcCall) -> bytes:
        try:
            async with asyncio.timeout(self.settings.body_seconds):
                message = await call.context.read()
        except TimeoutError as error:
            raise RequestRefusal(408, "the request took too long to arrive") from error
        if message is grpc.aio.EOF:
            raise RequestRefusal(400, "the call has no message")
        call.bytes_in = len(message)
        return bytes(message)

    async def _abort_call(self, call: GrpcCall, refusal: RequestRefusal) -> None:
        """Abort with the code, and with the delay that clients' retry policies follow."""
        call.code = CODES[refusal.status]
        trailing = [("x-request-id", call.request_id)]
        if seconds := refusal.headers.get("Retry-After"):
            trailing.append(("grpc-retry-pushback-ms", str(int(seconds) * 1000)))
        await call.context.abort(call.code, refusal.sentence, tuple(trailing))

    async def live(self, _: Any, call: GrpcCall) -> Any:
        return _make_response(call, {"live": True})

    async def ready(self, _: Any, call: GrpcCall) -> Any:
        return _make_response(call, {"ready": _does_hold(self.service.check_ready)})

    async def model_ready(self, request: Any, call: GrpcCall) -> Any:
        check = partial(self.service.get_version, *_get_name_and_version(request))
        return _make_response(call, {"ready": _does_hold(check)})

    async def server(self, _: Any, call: GrpcCall) -> Any:
        return _make_response(call, self.service.describe_server())

    async def metadata(self, request: Any, call: GrpcCall) -> Any:
        metadata = await self.service.describe_model(*_get_name_and_version(request))
        return _make_response(call, {**metadata, "properties": format_as_texts(metadata["parameters"])})

    async def configuration(self, request: Any, call: GrpcCall) -> Any:
        configuration = await self.service.describe_configuration(*_get_name_and_version(request))
        return _make_response(call, {"config": configuration})

    async def statistics(self, request: Any, call: GrpcCall) -> Any:
        statistics = await self.service.compute_statistics(request.name or None, request.version or None)
        return _make_response(call, statistics)

    async def infer(self, request: Any, call: GrpcCall) -> Any:
        def parse(version: ModelVersion) -> InferRequest:
            return parse_infer_message(request, version.predictor, version.batcher.max_waiting)

        return await self.service.infer(
            request.model_name,
            request.model_version or None,
            parse,
            make_infer_response,
            num_bytes=call.bytes_in,
            log_fields=call.log_fields,
            seconds=call.context.time_remaining(),
        )

    async def index(self, request: Any, call: GrpcCall) -> Any:
        if request.repository_name:
            raise RequestRefusal(400, "the models are in one repository, which has no name; leave repository_name out")
        return _make_response(call, {"models": self.service.list_index(only_ready=request.ready)})

    async def load(self, request: Any, call: GrpcCall) -> Any:
        name = _get_model_name(request)
        await self.service.load_model(name, dict.fromkeys(request.parameters, "..."))
        return _make_response(call, {"model_name": name, "isLoaded": True})

    async def unload(self, request: Any, call: GrpcCall) -> Any:
        name = _get_model_name(request)
        await self.service.unload_model(name, dict(request.parameters))
        return _make_response(call, {"model_name": name, "isUnloaded": True})


def _make_response(call: GrpcCall, fields: Mapping[str, Any]) -> Any:
    """The response message with the fields of HTTP's JSON that it has."""
    return ParseDict(fields, METHODS[call.name].response(), ignore_unknown_fields=True)


def _does_hold(check: Callable[[], object]) -> bool:
    try:
        check()
    except RequestRefusal:
        return False
    return True


def _get_name_and_version(request: Any) -> tuple[str, str | None]:
    return request.name, request.version or None


def _get_model_name(request: Any) -> str:
    """Model of a repository request: ``model_name`` of Triton's clients, ``repository_name`` of KServe's."""
    name: str = request.model_name or request.repository_name
    return name

"""Middleware: request id, authorization, size and time limits, access log."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
import uuid
from collections.abc import Mapping
from datetime import UTC, datetime
from ipaddress import ip_address
from typing import TYPE_CHECKING

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..refusals import CLOSE, RequestRefusal, is_permitted, make_token_refusal, render_refusal
from ..settings import MAX_BODY_BYTES, MAX_UPLOAD_BYTES, ServiceSettings

if TYPE_CHECKING:
    from ..service import Service

TOO_LARGE = f"the image is larger than {MAX_UPLOAD_BYTES // 2**20} MiB"
TOO_LARGE_BODY = f"the request is larger than {MAX_UPLOAD_BYTES // 2**20} MiB"
STOPPING = "the service is stopping"

OPEN_PATHS = frozenset({"/", "/healthz", "/v2/health/live", "/v2/health/ready"})
"""Paths without a token: for probes, and for the page, which asks for the token."""

CONTROL_PATH = "/v2/repository/models/"
"""Paths below it load and unload models; ``Service`` checks their token itself."""

HOST_PORT = re.compile(r":\d*$")

CLOSE_HEADER = (b"connection", b"close")

WATCH_SECONDS = 0.05  # delay before watching for a disconnect; most answers are sent before it
REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")


class ServiceMiddleware:
    """ASGI middleware. It cancels the work for a disconnected client; requests cancelled by a shutdown get 503."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self.app, self.service, self.settings = app, service, service.settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        record, metrics = RequestRecord(scope, receive, send, self.service), self.service.repository.metrics
        metrics.in_flight.inc()
        try:
            await self._answer_request(record)
        finally:
            record.stop_watching()
            metrics.in_flight.dec()
            metrics.http_responses.labels(record.status).inc()
            if self.settings.has_access_log:
                print(record.log_line(), flush=True, file=sys.stdout)

    async def _answer_request(self, record: RequestRecord) -> None:
        if refusal := self._find_refusal(record):
            await record.refuse(refusal)
            return
        try:
            await self.app(record.scope, record.receive, record.send)
        except asyncio.CancelledError:
            if record.has_left:
                return
            if not record.has_started:
                await record.refuse(RequestRefusal(503, STOPPING, CLOSE))

    def _find_refusal(self, record: RequestRecord) -> RequestRefusal | None:
        """Refusal by the head alone: another origin (CSRF) or host name (DNS rebinding), no token, or too large a body,
        which is not read."""
        headers = record.headers
        origin = headers.get(b"origin")
        if origin is not None and origin.partition(b"://")[2] != headers.get(b"host"):
            return RequestRefusal(403, "a page of another origin may not ask this service", CLOSE)
        if has_foreign_host(self.settings, headers.get(b"host", b"").decode("latin-1")):
            return RequestRefusal(
                403, "ask this service by its address, as localhost, or by a name of --allow-host", CLOSE
            )
        is_open = record.path in OPEN_PATHS or record.path.startswith(CONTROL_PATH)
        if not is_open and not is_permitted(self.settings.token, headers.get(b"authorization", b"")):
            return make_token_refusal()
        if int(headers.get(b"content-length", b"0")) > MAX_BODY_BYTES:
            return make_size_refusal(record.path)
        return None


def has_foreign_host(settings: ServiceSettings, host: str) -> bool:
    """Whether the Host header has a name that is not accepted. IP addresses are accepted."""
    name = HOST_PORT.sub("", host).lower().rstrip(".")
    if settings.accepted_hosts is None or not name or name in settings.accepted_hosts or name.endswith(".localhost"):
        return False
    try:
        ip_address(name.strip("[]"))
    except ValueError:
        return True
    return False


def choose_request_id(given: str | bytes) -> str:
    """The client's request id, or a new one."""
    text = given.decode("latin-1") if isinstance(given, bytes) else given
    return text if REQUEST_ID.fullmatch(text) else uuid.uuid4().hex


def format_access_line(start: float, start_time: datetime, *, log_fields: Mapping[str, str], **fields: object) -> str:
    """Access log line in JSON; ``log_fields`` has the model that answered."""
    return json.dumps(
        {
            "time": start_time.isoformat(timespec="milliseconds"),
            **fields,
            "seconds": round(time.perf_counter() - start, 6),
            "model": log_fields.get("model"),
            "version": log_fields.get("version"),
        }
    )


def make_size_refusal(path: str) -> RequestRefusal:
    return RequestRefusal(413, TOO_LARGE if path == "/predict" else TOO_LARGE_BODY, CLOSE)


class RequestRecord:
    """State of one request and its answer."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, service: Service) -> None:
        self.scope, self._receive, self._send, self.service = scope, receive, send, service
        self.path: str = scope["path"]
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.start_counter = time.perf_counter()
        self.start_time = time.time()
        self.body_deadline = asyncio.get_running_loop().time() + service.settings.body_seconds
        self.task = asyncio.current_task()
        self.disconnect_watch: asyncio.TimerHandle | asyncio.Task[None] | None = None
        self.status, self.bytes_in, self.bytes_out = 499, 0, 0
        self.has_started = self.has_finished = self.has_left = False
        self.request_id = choose_request_id(self.headers.get(b"x-request-id", b""))
        scope.setdefault("state", {})

    async def receive(self) -> Message:
        """Receive with size and time limits; starts watching for a disconnect after the body."""
        try:
            async with asyncio.timeout_at(self.body_deadline if self.disconnect_watch is None else None):
                message = await self._receive()
        except TimeoutError as error:
            raise RequestRefusal(408, "the request took too long to arrive", CLOSE) from error
        self.bytes_in += len(message.get("body", b""))
        if self.bytes_in > MAX_BODY_BYTES:
            raise make_size_refusal(self.path)
        if message["type"] == "http.request" and not message.get("more_body") and self.disconnect_watch is None:
            self.disconnect_watch = asyncio.get_running_loop().call_later(WATCH_SECONDS, self._start_watch)
        return message

    def _start_watch(self) -> None:
        self.disconnect_watch = asyncio.create_task(self._watch_for_disconnect())

    async def _watch_for_disconnect(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if not self.has_finished:
            self.has_left = True
            assert self.task is not None
            self.task.cancel()

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.has_started, self.status = True, message["status"]
            headers = [*message.get("headers", []), (b"x-request-id", self.request_id.encode())]
            if self.service.is_draining and CLOSE_HEADER not in headers:
                headers.append(CLOSE_HEADER)  # The client asks another service then.
            message = {**message, "headers": headers}
        else:
            self.bytes_out += len(message.get("body", b""))
            self.has_finished = not message.get("more_body")
        await self._send(message)

    async def refuse(self, refusal: RequestRefusal) -> None:
        await render_refusal(self.path, refusal)(self.scope, self._receive, self.send)

    def stop_watching(self) -> None:
        if self.disconnect_watch is not None:
            self.disconnect_watch.cancel()

    def log_line(self) -> str:
        client = self.scope.get("client")
        return format_access_line(
            self.start_counter,
            datetime.fromtimestamp(self.start_time, UTC),
            request_id=self.request_id,
            client=client[0] if client else None,
            method=self.scope["method"],
            path=self.path,
            status=self.status,
            bytes_in=self.bytes_in,
            bytes_out=self.bytes_out,
            log_fields=self.scope["state"],
        )

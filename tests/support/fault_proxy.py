"""An HTTP proxy in front of a server that answers wrongly, late or not at all where it is told to.

It hands requests on as they are, host and signature included. Requests are counted from 0 from the moment a fault is
set; the fault hits those numbered ``first`` to ``first + length - 1``.
"""

import http.client
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

from tests.support.s3_server import S3Server

STATUSES = {
    "500": (500, "InternalError"),
    "502": (502, ""),
    "503": (503, "SlowDown"),
    "429": (429, "TooManyRequests"),
    "409": (409, "ConditionalRequestConflict"),
    "412": (412, "PreconditionFailed"),
}
"""Answers that the server never gave: their status, and their code in XML."""

LATE = {
    "full": (507, "XMinioStorageFull"),
    "over quota": (403, "QuotaExceeded"),
    "too large": (400, "EntityTooLarge"),
}
"""Answers of services without room for more."""

KINDS = (*STATUSES, "reset before", "reset after", "reset within", "truncated", "short", "wrong range", "slow")
"""Resets come before the server sees the request, after it did all that was asked, or in the middle of its answer. A
truncated body ends before its announced length, a short one has another. A wrong range is one that nobody asked for."""

SLOW_SECONDS = 1.0
"""Longer than the clients of a test wait."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong with which requests; those that do not match ``only`` are not counted."""

    kind: str
    first: int
    length: int
    only: str = ""
    """A pattern of the method and the path."""

    def hits(self, number: int) -> bool:
        return self.first <= number < self.first + self.length


@dataclass(slots=True)
class FaultProxy:
    """Where it is, what goes wrong, and how often it did."""

    port: int
    behind: S3Server
    fault: Fault | None = None
    on_request: Callable[[int], None] = field(default=lambda number: None, repr=False)
    """Called with the number of each request before it is handed on."""
    num_requests: int = 0
    num_hit: int = 0
    num_matching: int = 0
    num_open: int = 0
    """Requests that the server has not answered yet."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def set(self, fault: Fault | None) -> None:
        with self._lock:
            self.fault, self.num_requests, self.num_hit, self.num_matching = fault, 0, 0, 0

    @contextmanager
    def next_fault(self, request: str) -> Iterator[str]:
        """The kind of fault of one more request, which is open meanwhile; nothing where all is well."""
        with self._lock:
            number, self.num_requests = self.num_requests, self.num_requests + 1
            kind = self._kind(request)
            self.num_open += 1
        self.on_request(number)
        try:
            yield kind
        finally:
            with self._lock:
                self.num_open -= 1

    def _kind(self, request: str) -> str:
        if self.fault is None or not re.search(self.fault.only, request):
            return ""
        self.num_matching += 1
        is_hit = self.fault.hits(self.num_matching - 1)
        self.num_hit += is_hit
        return self.fault.kind if is_hit else ""

    def wait(self) -> None:
        """Until the server has answered everything that it was sent."""
        while self.num_open:
            time.sleep(0.005)


@contextmanager
def running_fault_proxy(behind: S3Server) -> Iterator[FaultProxy]:
    """A proxy on loopback in front of that server."""

    class Handler(_Handler):
        pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    proxy = Handler.proxy = FaultProxy(server.server_port, behind)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        server.shutdown()
        thread.join()
        server.socket.close()


@dataclass(slots=True)
class _Answer:
    status: int
    headers: list[tuple[str, str]]
    body: bytes


class _Handler(BaseHTTPRequestHandler):
    proxy: FaultProxy
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_: Any) -> None:
        """Nothing on stderr."""

    def handle_one_request(self) -> None:
        with suppress(OSError):
            super().handle_one_request()
            return
        self.close_connection = True

    def _answer(self) -> None:
        with self.proxy.next_fault(f"{self.command} {self.path}") as kind:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if kind == "reset before":
                self._reset()
            elif kind in STATUSES | LATE:
                self._send(_refusal(*(STATUSES | LATE)[kind]))
            else:
                self._hand_on(kind, body)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _answer  # noqa: N815

    def _hand_on(self, kind: str, body: bytes) -> None:
        wanted = _shifted(self.headers.get("Range")) if kind == "wrong range" else None
        answer = self._forward(body) if wanted is None else self._fetch(wanted)
        if kind == "slow":
            time.sleep(SLOW_SECONDS)
        if kind == "reset after":
            self._reset()
        elif kind == "reset within":
            self._send(answer, sent=len(answer.body) // 2)
            self._reset()
        elif kind == "truncated":
            self._send(answer, sent=len(answer.body) // 2)
            self.close_connection = True
        elif kind == "short" and self.command == "GET":
            answer.body = answer.body[: len(answer.body) // 2]
            self._send(answer)
        else:
            self._send(answer)

    def _fetch(self, wanted: str) -> _Answer:
        """Another range than the one that the signature is for."""
        _, bucket, key = unquote(urlsplit(self.path).path).split("/", 2)
        found = self.proxy.behind.client().get_object(Bucket=bucket, Key=key, Range=wanted)
        names = ("content-range", "content-type", "etag", "last-modified")
        headers = [(name, found["ResponseMetadata"]["HTTPHeaders"][name]) for name in names]
        return _Answer(206, headers, found["Body"].read())

    def _forward(self, body: bytes) -> _Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.proxy.behind.port, timeout=30)
        try:
            connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() not in ("connection", "expect"):
                    connection.putheader(name, value)
            connection.endheaders(body or None)
            if len(body) < int(self.headers.get("Content-Length") or 0):
                raise ConnectionResetError("the client is gone, and its request ends here too")
            found = connection.getresponse()
            return _Answer(found.status, found.getheaders(), found.read())
        finally:
            connection.close()

    def _send(self, answer: _Answer, *, sent: int | None = None) -> None:
        """The answer; of its body, the first ``sent`` bytes, whatever length it announces."""
        self.send_response_only(answer.status)
        length = len(answer.body)
        for name, value in answer.headers:
            if self.command == "HEAD" and name.lower() == "content-length":
                length = int(value)
            elif name.lower() not in ("content-length", "transfer-encoding", "connection"):
                self.send_header(name, value)
        self.send_header("Content-Length", str(length))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body[:sent])
        self.wfile.flush()

    def _reset(self) -> None:
        """Close so that the other side gets a reset, and no orderly end."""
        self.close_connection = True
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()


def _refusal(status: int, code: str) -> _Answer:
    text = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>injected</Message></Error>" if code else "oops"
    return _Answer(status, [("Content-Type", "application/xml")], text.encode())


def _shifted(asked: str | None) -> str | None:
    """A range of the same length, one byte further on; shorter by one where it starts at none."""
    found = re.fullmatch(r"bytes=(\d+)-(\d+)", asked or "")
    if found is None:
        return None
    start, stop = int(found[1]), int(found[2])
    return f"bytes={start - 1}-{stop - 1}" if start else f"bytes=0-{max(stop - 1, 0)}"

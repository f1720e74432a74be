"""Shutdown and request timeouts of uvicorn."""

from __future__ import annotations

import asyncio
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ckpt_tools.process.signals import STOP_SIGNALS, Stopped

from ...common.garbage import settle
from ..settings import HEAD_SECONDS, MAX_HEAD_BYTES

GRACE_SECONDS = 10  # time for requests in flight at shutdown; complete ones end well within it


class LargeHeadError(Exception):
    """The head of a request, or its trailer, is larger than ``MAX_HEAD_BYTES``."""


class PromptProtocol(HttpToolsProtocol):
    """uvicorn's protocol with a time limit for each head and a size limit for heads and trailers."""

    _head: asyncio.TimerHandle | None = None
    _unread = 0
    """Bytes received since the last complete head or body byte: of a head or a trailer whose end is not there yet."""
    _fields = 0
    """Bytes of the URL and the headers of this request so far: also of a head that comes in one piece."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def data_received(self, data: bytes) -> None:
        if self._is_idle() and self._head is None:
            self._await_head()
        self._unread += len(data)
        super().data_received(data)
        if self._head is not None and not self._is_idle():
            self._stop_waiting()
        if self._unread > MAX_HEAD_BYTES:
            self.transport.close()

    def on_message_begin(self) -> None:
        self._fields = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + len(": \r\n"))
        super().on_header(name, value)

    def _count(self, num_bytes: int) -> None:
        """Close the connection beyond the limit. The parser ends at the error; uvicorn's answer to it is not sent."""
        self._fields += num_bytes
        if self._fields > MAX_HEAD_BYTES:
            self.transport.close()
            raise LargeHeadError

    def on_headers_complete(self) -> None:
        self._unread = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._unread = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._unread = 0
        super().on_message_complete()

    def connection_lost(self, error: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(error)

    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _await_head(self) -> None:
        self._head = asyncio.get_running_loop().call_later(HEAD_SECONDS, self._cut_off)

    def _stop_waiting(self) -> None:
        if self._head is not None:
            self._head.cancel()
            self._head = None

    def _cut_off(self) -> None:
        self._head = None
        if self._is_idle():
            self.transport.close()


class Server(uvicorn.Server):
    """Shuts down on SIGTERM, SIGINT and SIGHUP: reports not ready and serves for ``drain`` more seconds, then closes
    the listener and answers the requests in flight. A second signal ends the drain. ``announce`` is called once
    requests are answered."""

    stopped_by: int | None = None
    stops_at: float | None = None

    def __init__(self, config: uvicorn.Config, app: FastAPI, drain: float, announce: Callable[[], None]) -> None:
        super().__init__(config)
        self.service, self.drain, self.announce = app.state.service, drain, announce

    def serve_on(self, listening: socket.socket) -> None:
        """Serve until a signal. Raises :class:`Stopped` then."""
        self.run(sockets=[listening])
        if self.stopped_by:
            raise Stopped(self.stopped_by)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        settle()
        if self.started:
            self.announce()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.service.is_draining = True
        if self.drain and self.stopped_by is None:
            self.stopped_by, self.stops_at = sig, time.monotonic() + self.drain
            return
        self.stopped_by = self.stopped_by or sig
        super().handle_exit(sig, frame)

    async def on_tick(self, counter: int) -> bool:
        is_over = self.stops_at is not None and time.monotonic() >= self.stops_at
        return await super().on_tick(counter) or is_over

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Replaces uvicorn's, which leaves out SIGHUP. An ignored signal stays ignored (``nohup``)."""
        before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
        for number, handler in before.items():
            if handler is not signal.SIG_IGN:
                signal.signal(number, self.handle_exit)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def server_of(
    app: FastAPI, announce: Callable[[], None], drain: float, certificate: Path | None, key: Path | None
) -> Server:
    tls: dict[str, Any] = {} if certificate is None else {"ssl_certfile": certificate, "ssl_keyfile": key}
    config = uvicorn.Config(
        app,
        http=PromptProtocol,
        # uvicorn warns of each request that is not HTTP, so that any client could fill the log.
        log_level="error",
        access_log=False,
        timeout_graceful_shutdown=GRACE_SECONDS,
        ws="none",
        **tls,
    )
    return Server(config, app, drain, announce)

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

from ...common.garbage_collection import collect_and_freeze
from ..settings import HEAD_SECONDS, MAX_HEAD_BYTES

GRACE_SECONDS = 10  # time for requests in flight at shutdown; complete ones end well within it


class LargeHeadError(Exception):
    """The head of a request, or its trailer, is larger than ``MAX_HEAD_BYTES``."""


class LimitedHeadProtocol(HttpToolsProtocol):
    """uvicorn's protocol with a time limit for each head and a size limit for heads and trailers."""

    _head_timer: asyncio.TimerHandle | None = None
    _num_unread_bytes = 0
    """Bytes received since the last complete head or body byte: of a head or a trailer whose end is not there yet."""
    _num_field_bytes = 0
    """Bytes of the URL and the headers of this request so far: also of a head that comes in one piece."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_head_timer()

    def data_received(self, data: bytes) -> None:
        if self._is_idle() and self._head_timer is None:
            self._start_head_timer()
        self._num_unread_bytes += len(data)
        super().data_received(data)
        if self._head_timer is not None and not self._is_idle():
            self._stop_head_timer()
        if self._num_unread_bytes > MAX_HEAD_BYTES:
            self.transport.close()

    def on_message_begin(self) -> None:
        self._num_field_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count_field_bytes(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_field_bytes(len(name) + len(value) + len(": \r\n"))
        super().on_header(name, value)

    def _count_field_bytes(self, num_bytes: int) -> None:
        """Close the connection beyond the limit. The parser ends at the error; uvicorn's answer to it is not sent."""
        self._num_field_bytes += num_bytes
        if self._num_field_bytes > MAX_HEAD_BYTES:
            self.transport.close()
            raise LargeHeadError

    def on_headers_complete(self) -> None:
        self._num_unread_bytes = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_unread_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._num_unread_bytes = 0
        super().on_message_complete()

    def connection_lost(self, error: Exception | None) -> None:
        self._stop_head_timer()
        super().connection_lost(error)

    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _start_head_timer(self) -> None:
        self._head_timer = asyncio.get_running_loop().call_later(HEAD_SECONDS, self._close_if_idle)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _close_if_idle(self) -> None:
        self._head_timer = None
        if self._is_idle():
            self.transport.close()


class DrainingServer(uvicorn.Server):
    """Shuts down on SIGTERM, SIGINT and SIGHUP: reports not ready and serves for ``drain_seconds`` more, then closes
    the listener and answers the requests in flight. A second signal ends the drain. ``announce`` is called once
    requests are answered."""

    stopped_by: int | None = None
    stop_time: float | None = None

    def __init__(
        self, config: uvicorn.Config, app: FastAPI, drain_seconds: float, announce: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self.service, self.drain_seconds, self.announce = app.state.service, drain_seconds, announce

    def serve_socket(self, bound_socket: socket.socket) -> None:
        """Serve until a signal. Raises :class:`Stopped` then."""
        self.run(sockets=[bound_socket])
        if self.stopped_by:
            raise Stopped(self.stopped_by)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        collect_and_freeze()
        if self.started:
            self.announce()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.service.is_draining = True
        if self.drain_seconds and self.stopped_by is None:
            self.stopped_by, self.stop_time = sig, time.monotonic() + self.drain_seconds
            return
        self.stopped_by = self.stopped_by or sig
        super().handle_exit(sig, frame)

    async def on_tick(self, counter: int) -> bool:
        is_over = self.stop_time is not None and time.monotonic() >= self.stop_time
        return await super().on_tick(counter) or is_over

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Replaces uvicorn's, which leaves out SIGHUP. An ignored signal stays ignored (``nohup``)."""
        old_handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
        for number, handler in old_handlers.items():
            if handler is not signal.SIG_IGN:
                signal.signal(number, self.handle_exit)
        try:
            yield
        finally:
            for number, handler in old_handlers.items():
                signal.signal(number, handler)


def make_server(
    app: FastAPI, announce: Callable[[], None], drain_seconds: float, certificate: Path | None, key: Path | None
) -> DrainingServer:
    tls: dict[str, Any] = {} if certificate is None else {"ssl_certfile": certificate, "ssl_keyfile": key}
    config = uvicorn.Config(
        app,
        http=LimitedHeadProtocol,
        # uvicorn warns of each request that is not HTTP, so that any client could fill the log.
        log_level="error",
        access_log=False,
        timeout_graceful_shutdown=GRACE_SECONDS,
        ws="none",
        **tls,
    )
    return DrainingServer(config, app, drain_seconds, announce)

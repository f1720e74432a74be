"""uvicorn as this service runs it: how it ends, and how long it waits for somebody who does not say what he wants."""

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

from ckpt_tools.errors import CkptError
from ckpt_tools.signals import Stopped

from ...common.garbage import settle
from ..settings import HEAD_SECONDS, MAX_HEAD_BYTES

# Requests that are whole are answered well within it; a client that hangs holds the end no longer.
GRACE_SECONDS = 10

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class PromptProtocol(HttpToolsProtocol):
    """uvicorn's own, with a limit of time for the head of each request, and one of size for heads and trailers, which
    httptools keeps until they are whole."""

    _head: asyncio.TimerHandle | None = None
    _unread = 0
    """Bytes that came since the last one that was neither of a head nor of a trailer."""

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
    """Ends alike by SIGTERM, SIGINT and SIGHUP: says that it is not ready, and goes on for ``drain`` seconds. Then it
    takes no connection any more, and answers the requests in flight. A second signal ends the drain."""

    stopped_by: int | None = None
    stops_at: float | None = None
    failed: CkptError | None = None

    def __init__(self, config: uvicorn.Config, app: FastAPI, drain: float, announce: Callable[[], None]) -> None:
        super().__init__(config)
        self.traffic, self.drain, self.announce = app.state.traffic, drain, announce

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        settle()
        if self.started:
            self.announce()

    def stop(self) -> None:
        """As a signal does, from any thread."""
        self.handle_exit(signal.SIGTERM, None)

    def fail(self, error: CkptError) -> None:
        """End at once, from any thread: what answers is gone. :func:`serve` raises the error."""
        self.failed, self.traffic.is_draining = error, True
        self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.traffic.is_draining = True
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
        """In the place of uvicorn's own, which leaves SIGHUP out. An ignored signal stays ignored: ``nohup``."""
        before = {number: signal.getsignal(number) for number in STOPPING}
        for number, handler in before.items():
            if handler is not signal.SIG_IGN:
                signal.signal(number, self.handle_exit)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def server_of(
    app: FastAPI,
    announce: Callable[[], None],
    *,
    drain: float = 0,
    certificate: Path | None = None,
    key: Path | None = None,
) -> Server:
    """``announce`` is called when requests are answered."""
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


def serve(server: Server, listening: socket.socket) -> None:
    """Serve until a signal asks for the end; raises it as :class:`Stopped` then. Raises what the server failed by."""
    server.run(sockets=[listening])
    if server.failed is not None:
        raise server.failed
    if server.stopped_by:
        raise Stopped(server.stopped_by)

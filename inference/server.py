"""uvicorn as this service runs it: how it ends."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import uvicorn
from fastapi import FastAPI

from ckpt_tools.signals import Stopped

# Requests that are whole are answered well within it; a client that hangs holds the end no longer.
GRACE_SECONDS = 10

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Server(uvicorn.Server):
    """Ends alike by SIGTERM, SIGINT and SIGHUP: takes no connection any more, and answers the requests in flight."""

    stopped_by: int | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.stopped_by = self.stopped_by or sig
        super().handle_exit(sig, frame)

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


def serve(app: FastAPI, listening: socket.socket) -> None:
    """Serve until a signal asks for the end; raises it as :class:`Stopped` then."""
    config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=GRACE_SECONDS)
    server = Server(config)
    server.run(sockets=[listening])
    if server.stopped_by:
        raise Stopped(server.stopped_by)

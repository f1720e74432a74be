"""A proxy that puts an HTTP server far away, and the log of its requests.

Each exchange waits for the latency before its answer begins, and each connection carries so many bytes a second in
either direction. A request keeps its Host header, which its signature covers.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

BLOCK_BYTES = 64 << 10
"""Bytes passed on at a time."""


@dataclass(frozen=True, slots=True)
class LoggedRequest:
    """A request, and when it arrived and its answer was through, in seconds."""

    method: str
    path: str
    start: float
    end: float


@dataclass(slots=True)
class DistantServer:
    """An HTTP/1.1 proxy in front of ``server_port`` of this machine."""

    server_port: int
    latency_seconds: float
    bytes_per_second: float
    port: int = 0
    requests: list[LoggedRequest] = field(default_factory=list)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def serve_until(self, is_started: threading.Event, end: asyncio.Event) -> None:
        async with await asyncio.start_server(self._pass_connection, "127.0.0.1", 0, limit=1 << 20) as listener:
            self.port = listener.sockets[0].getsockname()[1]
            is_started.set()
            await end.wait()
        connections = asyncio.all_tasks() - {asyncio.current_task()}
        for connection in connections:
            connection.cancel()
        await asyncio.gather(*connections, return_exceptions=True)

    async def _pass_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.server_port, limit=1 << 20)
        try:
            with suppress(asyncio.IncompleteReadError, ConnectionError):
                while True:
                    await self._pass_request(reader, writer, far_reader, far_writer)
        finally:
            for each in (writer, far_writer):
                each.close()

    async def _pass_request(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        far_reader: asyncio.StreamReader,
        far_writer: asyncio.StreamWriter,
    ) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        start, (method, path, _) = time.monotonic(), head.decode("latin-1").split(" ", 2)
        far_writer.write(head)
        is_asking = b"\r\nexpect: 100-continue\r\n" in head.lower()
        if not is_asking or await self._pass_answer(far_reader, writer, method) == b"100":
            await self._pass_body(reader, far_writer, _find_body_bytes(head))
            await self._pass_answer(far_reader, writer, method)
        self.requests.append(LoggedRequest(method, path, start, time.monotonic()))

    async def _pass_answer(self, far_reader: asyncio.StreamReader, writer: asyncio.StreamWriter, method: str) -> bytes:
        """The status."""
        _, head = await asyncio.gather(asyncio.sleep(self.latency_seconds), far_reader.readuntil(b"\r\n\r\n"))
        writer.write(head)
        await self._pass_body(far_reader, writer, 0 if method == "HEAD" else _find_body_bytes(head))
        return head.split(b" ", 2)[1]

    async def _pass_body(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, num_bytes: int | None
    ) -> None:
        """With None, until the empty chunk."""
        start, bytes_passed = time.monotonic(), 0
        while num_bytes is None or bytes_passed < num_bytes:
            if num_bytes is None:
                block = await reader.readuntil(b"\r\n")
                block += await reader.readexactly(int(block, 16) + 2)
            elif not (block := await reader.read(min(BLOCK_BYTES, num_bytes - bytes_passed))):
                raise ConnectionResetError
            bytes_passed += len(block)
            writer.write(block)
            await writer.drain()
            await asyncio.sleep(start + bytes_passed / self.bytes_per_second - time.monotonic())
            if num_bytes is None and block == b"0\r\n\r\n":
                break


def _find_body_bytes(head: bytes) -> int | None:
    """None for a body in chunks."""
    fields = dict(line.lower().split(b":", 1) for line in head.splitlines()[1:] if line)
    return None if b"chunked" in fields.get(b"transfer-encoding", b"") else int(fields.get(b"content-length", b"0"))


@contextmanager
def running_distant_server(port: int, latency_seconds: float, bytes_per_second: float) -> Iterator[DistantServer]:
    """The server at ``port`` of this machine, at a distance, in a thread."""
    server, is_started = DistantServer(port, latency_seconds, bytes_per_second), threading.Event()
    loop, end = asyncio.new_event_loop(), asyncio.Event()
    thread = threading.Thread(target=loop.run_until_complete, args=(server.serve_until(is_started, end),), daemon=True)
    thread.start()
    is_started.wait()
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(end.set)
        thread.join()
        loop.close()


def count_rounds(requests: Sequence[LoggedRequest]) -> int:
    """Number of rounds. A round begins with a request that starts when no earlier one is under way."""
    rounds, latest_end = 0, 0.0
    for request in sorted(requests, key=lambda each: each.start):
        rounds += request.start >= latest_end
        latest_end = max(latest_end, request.end)
    return rounds


def find_longest_chain(requests: Sequence[LoggedRequest]) -> int:
    """Length of the longest chain of requests. Each begins after the end of the one before, whether it needs its answer
    or waits for a connection."""
    length, latest_end = 0, 0.0
    for request in sorted(requests, key=lambda each: each.end):
        if request.start >= latest_end:
            length, latest_end = length + 1, request.end
    return length

"""Streams of events to a client that does not read, and of a service that stops."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from starlette.types import Message

from inference.serving.http.events import EventStream


class Numbers:
    """Numbers without an end; ``is_closed`` once nothing wants them any more."""

    def __init__(self) -> None:
        self.is_closed = False

    async def events(self) -> AsyncGenerator[dict[str, Any]]:
        try:
            for number in range(1, 10**9):
                await asyncio.sleep(0)
                yield {"number": number}
        finally:
            self.is_closed = True


async def receive() -> Message:
    raise AssertionError("the middleware watches the client")


def test_a_client_that_does_not_read_is_cut_off():
    numbers, sent = Numbers(), list[Message]()

    async def send(message: Message) -> None:
        if len(sent) == 4:
            await asyncio.sleep(600)
        sent.append(message)

    async def run() -> None:
        await EventStream({"number": 0}, numbers.events(), 0.1)({}, receive, send)

    asyncio.run(run())
    assert [message["type"].rpartition(".")[2] for message in sent] == ["start", "body", "body", "body"]
    assert all(message["more_body"] for message in sent[1:])
    assert numbers.is_closed


def test_a_stream_of_a_service_that_stops_ends_with_an_error():
    numbers, sent = Numbers(), list[Message]()

    async def send(message: Message) -> None:
        sent.append(message)

    async def run() -> None:
        task = asyncio.create_task(EventStream({"number": 0}, numbers.events(), 60)({}, receive, send))
        while len(sent) < 4:
            await asyncio.sleep(0)
        task.cancel()
        await task

    asyncio.run(run())
    assert [message.get("body") for message in sent[:3]] == [
        None,
        b'data: {"number":0}\n\n',
        b'data: {"number":1}\n\n',
    ]
    assert sent[-2]["body"] == b'data: {"error":"the service is stopping"}\n\n'
    assert sent[-1] == {"type": "http.response.body", "body": b"", "more_body": False}
    assert numbers.is_closed

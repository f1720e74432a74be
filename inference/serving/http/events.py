"""Responses of server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from typing import Any

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..refusals import RequestRefusal
from .middleware import STOPPING

Json = dict[str, Any]


class EventStream(Response):
    """An event for each answer. If what comes after the first is refused, the last event has the sentence in ``error``.
    A client that does not read an event within ``seconds`` is cut off. starlette's own class would watch for the client
    to leave, as the middleware does already."""

    media_type = "text/event-stream"

    def __init__(self, first_answer: Json, other_answers: AsyncGenerator[Json], send_timeout: float) -> None:
        super().__init__(headers={"Cache-Control": "no-store"})
        del self.headers["Content-Length"]
        self.first_answer, self.other_answers, self.send_timeout = first_answer, other_answers, send_timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_body(body: bytes, *, is_last: bool = False) -> None:
            async with asyncio.timeout(self.send_timeout):
                await send({"type": "http.response.body", "body": body, "more_body": not is_last})

        # uvicorn closes the connection of an answer that is not complete.
        async with aclosing(self.other_answers):
            with suppress(TimeoutError):
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                await send_body(_format_event(self.first_answer))
                try:
                    async for answer in self.other_answers:
                        await send_body(_format_event(answer))
                except (RequestRefusal, asyncio.CancelledError) as error:
                    # The client left, which makes no difference here, or the service stops.
                    await send_body(
                        _format_event({"error": error.sentence if isinstance(error, RequestRefusal) else STOPPING})
                    )
                await send_body(b"", is_last=True)


def _format_event(answer: Json) -> bytes:
    return b"data: " + orjson.dumps(answer) + b"\n\n"

"""The short way to the one path that load consists of.

A request through FastAPI passes eight layers that do nothing for it, and the patterns of all other paths. They cost
more processor time than reading the request, waiting in the queue and writing the answer do together.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from ..refusals import Refused
from .endpoints import Endpoints

INFER = re.compile(r"/v2/models/(?P<name>[^/]+)(/versions/(?P<version>[^/]+))?/infer")

Refuse = Callable[[Request, Exception], Awaitable[Response]]


class Shortcut:
    """Inference over HTTP is answered here, and everything else by ``app``. ``refuse`` makes an answer of an error."""

    def __init__(self, app: ASGIApp, endpoints: Endpoints, refuse: Refuse) -> None:
        self.app, self.endpoints, self.refuse = app, endpoints, refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        found = INFER.fullmatch(scope["path"]) if scope["method"] == "POST" else None
        if found is None:
            await self.app(scope, receive, send)
            return
        scope["path_params"] = found.groupdict()
        request = Request(scope, receive)
        try:
            response = await self.endpoints.infer(request)
        except Refused as error:
            response = await self.refuse(request, error)
        except Exception as error:
            await (await self.refuse(request, error))(scope, receive, send)
            raise  # For the log.
        await response(scope, receive, send)

"""Error responses in the format of the endpoint's protocol, and the check of tokens."""

from __future__ import annotations

import hmac
from collections.abc import Mapping

from fastapi.responses import JSONResponse

CLOSE = {"Connection": "close"}
RETRY_AFTER = {"Retry-After": "1"}


class RequestRefusal(Exception):  # noqa: N818  An answer, and often not an error.
    """An error response. It contains no path and no traceback of the service."""

    def __init__(self, status: int, sentence: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(sentence)
        self.status, self.sentence, self.headers = status, sentence, dict(headers or {})


def render_refusal(path: str, refusal: RequestRefusal) -> JSONResponse:
    """``{"error": ...}`` for paths of the Open Inference Protocol, ``{"detail": ...}`` for the others."""
    key = "error" if path.startswith("/v2") else "detail"
    return JSONResponse({key: refusal.sentence}, refusal.status, refusal.headers)


def is_permitted(token: str | None, authorization: bytes) -> bool:
    """Whether this ``Authorization`` header has the token, if one is needed."""
    return token is None or hmac.compare_digest(authorization, f"Bearer {token}".encode())


def make_token_refusal(which: str = "") -> RequestRefusal:
    headers = {**CLOSE, "WWW-Authenticate": "Bearer"}
    return RequestRefusal(401, f"the request needs the token{which}, as Authorization: Bearer TOKEN", headers)

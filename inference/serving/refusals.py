"""Error responses in the format of the endpoint's protocol."""

from __future__ import annotations

from collections.abc import Mapping

from fastapi.responses import JSONResponse

CLOSE = {"Connection": "close"}
RETRY_AFTER = {"Retry-After": "1"}


class Refused(Exception):  # noqa: N818  An answer, and often not an error.
    """An error response. It contains no path and no traceback of the service."""

    def __init__(self, status: int, sentence: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(sentence)
        self.status, self.sentence, self.headers = status, sentence, dict(headers or {})


def answer(path: str, refused: Refused) -> JSONResponse:
    """``{"error": ...}`` for paths of the Open Inference Protocol, ``{"detail": ...}`` for the others."""
    key = "error" if path.startswith("/v2") else "detail"
    return JSONResponse({key: refused.sentence}, refused.status, refused.headers)

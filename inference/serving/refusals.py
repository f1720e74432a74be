"""How the service says no: a status, and one sentence in the form that the path's protocol wants."""

from __future__ import annotations

from collections.abc import Mapping

from fastapi.responses import JSONResponse

CLOSE = {"Connection": "close"}
RETRY_AFTER = {"Retry-After": "1"}


class Refused(Exception):  # noqa: N818  It is an answer, and often nobody's error.
    """The answer to a request that is not fulfilled. It holds no path and no traceback of the service."""

    def __init__(self, status: int, sentence: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(sentence)
        self.status, self.sentence, self.headers = status, sentence, dict(headers or {})


def answer(path: str, refused: Refused) -> JSONResponse:
    """``{"error": ...}`` is what the Open Inference Protocol wants; the other paths have ``{"detail": ...}``."""
    key = "error" if path.startswith("/v2") else "detail"
    return JSONResponse({key: refused.sentence}, refused.status, refused.headers)

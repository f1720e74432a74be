"""Settings and limits of the service."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ckpt_tools.errors import FormatError, SourceNotFoundError, StoreError, UsageError

MAX_UPLOAD_BYTES = 16 * 2**20

# What a multipart form takes around one file: its boundaries, headers and the file's name.
MAX_BODY_BYTES = MAX_UPLOAD_BYTES + 2**16

MAX_HEAD_BYTES = 2**16
"""Approximate limit of request line and headers; the connection is closed beyond it."""

HEAD_SECONDS = 10.0
"""Timeout for the head of a request; the connection is closed after it."""

BODY_SECONDS = 30.0
"""Timeout for head and body of a request; the connection is closed after it."""

MAX_TOKEN_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of the command line. ``timeout`` is the longest wait for the model in seconds. Without a ``token``,
    every client is accepted.

    After a signal the service keeps serving for ``drain`` seconds and reports not ready, so that a load balancer stops
    sending requests.

    ``hosts`` are the accepted names in the Host header, besides IP addresses; None accepts all. Without this check, a
    page in a browser could rebind its own name to this machine and pass as the same origin.
    """

    timeout: float = 30.0
    body_seconds: float = BODY_SECONDS
    drain: float = 0.0
    token: str | None = None
    has_access_log: bool = False
    hosts: frozenset[str] | None = None

    def __post_init__(self) -> None:
        for option, seconds, may_be_0 in (("--timeout", self.timeout, False), ("--drain", self.drain, True)):
            if not 0 <= seconds < 1e9 or not (seconds or may_be_0):
                raise UsageError(f"{option} is a number of seconds, not {seconds:g}")


def read_token(path: Path) -> str:
    """The bearer token in a file, stripped of white space. Raises ``CkptError``."""
    try:
        with path.open("rb") as file:
            token = file.read(MAX_TOKEN_BYTES + 1).strip()
    except FileNotFoundError as error:
        raise SourceNotFoundError(f"--token: there is no file {path}") from error
    except OSError as error:
        raise StoreError(f"--token: {path} cannot be read ({error.strerror or error})") from error
    if not token or len(token) > MAX_TOKEN_BYTES or not all(33 <= byte < 127 for byte in token):
        raise FormatError(f"--token: {path} has to hold one word of ASCII, of at most {MAX_TOKEN_BYTES} bytes")
    return token.decode()

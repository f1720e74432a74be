"""What a user may set of the service, beside its models and its address."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ckpt_tools.errors import FormatError, SourceNotFoundError, StoreError, UsageError

MAX_UPLOAD_BYTES = 16 * 2**20

# What a multipart form takes around one file: its boundaries, headers and the file's name.
MAX_BODY_BYTES = MAX_UPLOAD_BYTES + 2**16

MAX_HEAD_BYTES = 2**16
"""Of the line and the headers of a request, about: the connection of one that has more is closed."""

HEAD_SECONDS = 10.0
"""In which the head of a request has to arrive. Whoever takes longer is cut off: heads have no other limit of time."""

BODY_SECONDS = 30.0
"""In which a whole request has to arrive: head and body. A client that takes longer is cut off."""

MAX_TOKEN_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Settings:
    """``timeout`` is how many seconds a request may wait for the model. Without a ``token``, everybody may ask.

    After a signal the service goes on for ``drain`` seconds, and says that it is not ready: a load balancer needs them
    to send nobody here any more.

    ``hosts`` are the names that a request may call the service by, beside addresses; None are all. A page in a browser
    can give its own name the address of this machine, and would then be no page of another site.
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
    """The bearer token in a file, without the white space around it. Raises ``CkptError``."""
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

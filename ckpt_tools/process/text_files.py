"""Small text files that a user names: configurations, recipes, lists of names."""

from __future__ import annotations

import errno
import os
from pathlib import Path

MAX_TEXT_BYTES = 64 << 20


def read_text(path: Path) -> str:
    """The text of a file in UTF-8, with a byte order mark or without. Raises OSError, also for more than
    ``MAX_TEXT_BYTES``, as an endless device has, and UnicodeDecodeError."""
    with path.open("rb") as file:
        content = file.read(MAX_TEXT_BYTES + 1)
    if len(content) > MAX_TEXT_BYTES:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
    return content.decode("utf-8-sig")

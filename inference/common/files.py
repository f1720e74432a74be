"""What a user names, as far as it can be checked without loading torch."""

from __future__ import annotations

from pathlib import Path

import ckpt_tools
from ckpt_tools.errors import UsageError


def local_path(text: str, option: str, instead: str) -> Path:
    """``text`` as a local path. Raises ``UsageError`` for a URL, and says there what to do ``instead``."""
    if "://" in text:
        raise UsageError(f"{option} has to be a local path, {text} is a URL; {instead}")
    return Path(text)


def check_model(url: str) -> str:
    """``url``, if a checkpoint of some format can be read there, by its headers. Raises as ``ckpt_tools.inspect``."""
    ckpt_tools.inspect(url)
    return url

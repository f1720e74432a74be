"""An index as numpy takes it, from text: ``0:2, :``, ``..., -1``. Pure; nothing is evaluated."""

from __future__ import annotations

import re
from types import EllipsisType

from ckpt_tools.errors import UsageError

Index = tuple[int | slice | EllipsisType, ...]

_INTEGER = r"\s*([+-]?[0-9]{1,18})?\s*"
_SLICE = re.compile(rf"{_INTEGER}:{_INTEGER}(?::{_INTEGER})?", re.ASCII)
_INTEGER_ONLY = re.compile(r"[+-]?[0-9]{1,18}", re.ASCII)


def split_index(text: str) -> tuple[str, str | None]:
    """``NAME[INDEX]`` as its two parts; the index is None without brackets at the end."""
    name, bracket, index = text.rpartition("[")
    return (name, index[:-1]) if bracket and index.endswith("]") else (text, None)


def parse_index(text: str) -> Index:
    """The index of ``text``: integers, slices and an ellipsis with commas between them.

    Raises:
        UsageError: a part is something else, or the step of a slice is 0.
    """
    return tuple(_parse_index_part(part.strip(), text) for part in text.split(","))


def _parse_index_part(part: str, text: str) -> int | slice | EllipsisType:
    if part == "...":
        return ...
    if _INTEGER_ONLY.fullmatch(part):
        return int(part)
    slice_match = _SLICE.fullmatch(part)
    if slice_match is None:
        raise UsageError(
            f"[{text}]: {part or 'an empty part'} is not an integer, a slice (0:2, ::2) or an ellipsis (...)"
        )
    first, last, step = (None if each is None else int(each) for each in slice_match.groups())
    if step == 0:
        raise UsageError(f"[{text}]: the step of a slice cannot be 0")
    return slice(first, last, step)

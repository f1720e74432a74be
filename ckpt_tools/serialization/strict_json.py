"""JSON read strictly: no duplicate keys, no NaN, no half characters."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

from ckpt_tools.errors import MalformedError

JsonPairs: TypeAlias = list[tuple[str, Any]]
"""The names and values of an object, in order."""


def parse_json(data: bytes, path: str, *, convert_pairs: Callable[[JsonPairs], Any] | None = None) -> Any:
    """``data`` as UTF-8 JSON of whole characters, without a duplicate key. Raises MalformedError.

    ``convert_pairs`` gives the value of each object, innermost first, so that a million small objects need not be a
    million dicts. Default: ``build_object``.
    """
    try:
        text = data.decode()
        build = convert_pairs or partial(build_object, path=path)
        parsed = json.loads(text, object_pairs_hook=build, parse_constant=_refuse_constant)
        if _HALF_CHARACTER.search(text):
            json.dumps(parsed, ensure_ascii=False).encode()
        return parsed
    except (ValueError, RecursionError) as error:
        raise MalformedError(f"not valid JSON: {str(error)[:200]}", path=path) from error


def build_object(pairs: JsonPairs, path: str) -> dict[str, Any]:
    """The object of ``pairs``. Raises MalformedError if a name appears twice."""
    object_by_name = dict(pairs)
    if len(object_by_name) != len(pairs):
        duplicate = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise MalformedError(f"the name {duplicate[:200]!r} appears twice", path=path)
    return object_by_name


# As an escape; JSON can hold half of a surrogate pair, and no file, no terminal and no other library takes it.
_HALF_CHARACTER = re.compile(r"\\u[dD][89a-fA-F]")


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")

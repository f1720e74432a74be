"""JSON read strictly: no duplicate keys, no NaN, no half characters."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

from ckpt_tools.errors import MalformedError


def parse_json(data: bytes, path: str, *, value_of: Callable[[dict[str, Any]], Any] | None = None) -> Any:
    """``data`` as UTF-8 JSON of whole characters, without a duplicate key. Raises MalformedError.

    ``value_of`` gives the value of each object, innermost first, so that a million small objects need not be a million
    dicts.
    """

    def build_object(pairs: list[tuple[str, Any]]) -> Any:
        object_by_name = dict(pairs)
        if len(object_by_name) != len(pairs):
            duplicate = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
            raise MalformedError(f"the name {duplicate[:200]!r} appears twice", path=path)
        return object_by_name if value_of is None else value_of(object_by_name)

    try:
        text = data.decode()
        parsed = json.loads(text, object_pairs_hook=build_object, parse_constant=_refuse_constant)
        if _HALF_CHARACTER.search(text):
            json.dumps(parsed, ensure_ascii=False).encode()
        return parsed
    except (ValueError, RecursionError) as error:
        raise MalformedError(f"not valid JSON: {str(error)[:200]}", path=path) from error


# As an escape; JSON can hold half of a surrogate pair, and no file, no terminal and no other library takes it.
_HALF_CHARACTER = re.compile(r"\\u[dD][89a-fA-F]")


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")

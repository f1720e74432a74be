"""Files of names that options take: ``--param-order``, the order of an optimizer's parameters, and ``--key-map``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from ckpt_tools.core.option_names import format_option
from ckpt_tools.errors import SourceNotFoundError, UsageError
from ckpt_tools.process.text_files import read_text


@dataclass(frozen=True, slots=True)
class ParamOrder:
    """Names of parameters.

    ``groups`` are the names of each group of the optimizer, in its order, if the file has them; else ``names`` are
    those of the optimizer in its order, or of the model in the model's order.

    Raises:
        UsageError: there are no names, or one occurs twice.
    """

    names: tuple[str, ...]
    groups: tuple[tuple[str, ...], ...] | None = None

    def __post_init__(self) -> None:
        if not self.names:
            raise UsageError(f"the file of {format_option('param_order')} has no names")
        seen: set[str] = set()
        for name in self.names:
            if not name:
                raise UsageError(f"the file of {format_option('param_order')} has an empty name")
            if name in seen:
                raise UsageError(f"the file of {format_option('param_order')} has {name!r} twice")
            seen.add(name)


def read_param_order(path: Path) -> ParamOrder:
    """A text file with a name on each line, a JSON list of names, or a JSON list with a list of names for each group.

    Raises:
        SourceNotFoundError: it cannot be read. UsageError: it is something else.
    """
    try:
        text = read_text(path)
    except OSError as error:
        raise SourceNotFoundError(f"{format_option('param_order', path)}: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"{format_option('param_order', path)} is not text") from error
    if text.lstrip().startswith("["):
        try:
            names = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{format_option('param_order', path)} is not valid JSON: {error}") from error
        if _are_names(names):
            return ParamOrder(tuple(names))
        if isinstance(names, list) and names and all(map(_are_names, names)):
            return ParamOrder(tuple(chain.from_iterable(names)), tuple(map(tuple, names)))
        form = "must be a list of names, or a list of such lists, one for a group"
        raise UsageError(f"{format_option('param_order', path)} {form}")
    return ParamOrder(tuple(line.strip() for line in text.splitlines() if line.strip()))


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(type(name) is str for name in value)


def read_key_map(path: Path) -> Mapping[str, str]:
    """A JSON object of old names to new ones. Raises SourceNotFoundError, UsageError."""
    try:
        key_map = json.loads(read_text(path))
    except OSError as error:
        raise SourceNotFoundError(f"{format_option('key_map', path)}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{format_option('key_map', path)} is not valid JSON: {error}") from error
    if not isinstance(key_map, dict) or not all(isinstance(name, str) for name in key_map.values()):
        raise UsageError(f"{format_option('key_map', path)} must be a JSON object that maps old names to new ones")
    if not key_map:
        raise UsageError(f"{format_option('key_map', path)} is empty, so it renames nothing")
    if "" in {*key_map, *key_map.values()}:
        raise UsageError(f"{format_option('key_map', path)} has an empty name")
    return key_map

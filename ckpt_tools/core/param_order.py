"""The order in which an optimizer knows its parameters, as a user says it: ``--param-order FILE``."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from ckpt_tools.core.option_names import format_option
from ckpt_tools.errors import SourceNotFoundError, UsageError


@dataclass(frozen=True, slots=True)
class ParamOrder:
    """Names of parameters.

    ``groups`` are those of each group of the optimizer, in its order, if the file says them; else ``names`` are the
    optimizer's in its order, or the model's in the model's order.

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
    from ckpt_tools.text_files import read_text  # for the few that name a file

    try:
        text = read_text(path)
    except OSError as error:
        raise SourceNotFoundError(f"{format_option('param_order', path)}: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"{format_option('param_order', path)} is not text") from error
    if text.lstrip().startswith("["):
        names = _parse_json(text, path)
        if _are_names(names):
            return ParamOrder(tuple(names))
        if isinstance(names, list) and names and all(map(_are_names, names)):
            return ParamOrder(tuple(chain.from_iterable(names)), tuple(map(tuple, names)))
        form = "must be a list of names, or a list of such lists, one for a group"
        raise UsageError(f"{format_option('param_order', path)} {form}")
    return ParamOrder(tuple(line.strip() for line in text.splitlines() if line.strip()))


def _parse_json(text: str, path: Path) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{format_option('param_order', path)} is not valid JSON: {error}") from error


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(type(name) is str for name in value)

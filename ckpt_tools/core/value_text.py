"""Values of a summary as text in one line. Imports nothing that costs time at start-up."""

from __future__ import annotations

from itertools import islice
from typing import Any

from ckpt_tools.core.wording import count


def one_line(value: Any, limit: int) -> str:
    """What ``ShownValues`` made of a value, as a person reads it: ``lr: 0.1, betas: [0.9, 0.95]``; cut at ``limit``."""
    text = _open(value, limit)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def _open(value: Any, limit: int) -> str:
    """A dict without its braces."""
    if isinstance(value, dict) and not _is_stand_in(value):
        return ", ".join(f"{name}: {_closed(part, limit)}" for name, part in islice(value.items(), limit))
    return _closed(value, limit)


def _closed(value: Any, limit: int) -> str:
    if isinstance(value, dict):
        return _stand_in(value) if _is_stand_in(value) else f"{{{_open(value, limit)}}}"
    if isinstance(value, list):
        return f"[{', '.join(_closed(part, limit) for part in islice(value, limit))}]"
    return "none" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)


def _is_stand_in(value: dict[str, Any]) -> bool:
    return len(value) == 1 and next(iter(value)).startswith("$")


def _stand_in(value: dict[str, Any]) -> str:
    name, what = next(iter(value.items()))
    units = {"$bytes": "byte", "$int": "bit"}
    if type(what) is int:
        return f"<{name[1:]} of {count(what, units.get(name, 'item'))}>"
    return f"<{name[1:]} {what}>" if name == "$tensor" else str(what)

"""Calls as people read them: ``os.system('id')``, bounded in length and depth whatever the arguments are.

The classes here are all that a recording keeps of values: how they came to be.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ckpt_tools.core.values import GlobalRef, Value
from ckpt_tools.core.wording import printable

MAX_SHOWN_CHARS = 200
"""Length of a call as it is shown."""

_MAX_STRING_CHARS = 100
MAX_SHOWN_ITEMS = 8
_MAX_SHOWN_DEPTH = 3


class Made:
    """What a loader would have made of a name or of another object; ``hooks`` are attributes that it would call."""

    __slots__ = ("args", "form", "hooks", "of")

    def __init__(self, of: Value, args: tuple[Value, ...], form: str = "") -> None:
        self.of = of
        self.args = args
        self.form = form
        self.hooks: dict[str, Value] | None = None


class Pairs(list[Value]):
    """A dict: keys and values in turn."""


class Elements(list[Value]):
    """A set."""


@dataclass(frozen=True, slots=True)
class Number:
    """An integer too long to be worth making."""

    num_bytes: int


def items_of(pairs: Pairs) -> Iterable[tuple[Value, Value]]:
    return zip(pairs[::2], pairs[1::2], strict=True)


def call_text(function: Value, args: tuple[Value, ...], form: str = "", depth: int = 1) -> str:
    return f"{shown(function, depth)}{form}({_listing(args, depth)})"


def _listing(values: Sequence[Value], depth: int) -> str:
    more = ", ..." if len(values) > MAX_SHOWN_ITEMS else ""
    return ", ".join(shown(value, depth + 1) for value in values[:MAX_SHOWN_ITEMS]) + more


def shown(value: Value, depth: int) -> str:
    """``value`` as Python code, cut where it gets long or deep."""
    if type(value) is GlobalRef:
        return str(value)
    if isinstance(value, str | bytes | bytearray):
        return repr(value[:_MAX_STRING_CHARS]) + ("..." if len(value) > _MAX_STRING_CHARS else "")
    if type(value) is Number:
        return f"<an integer of {value.num_bytes:,} bytes>"
    if value is None or isinstance(value, int | float):
        return repr(value) if type(value) is not int or abs(value) < 1 << 64 else "<a large integer>"
    return "..." if depth > _MAX_SHOWN_DEPTH else _compound(value, depth)


def _compound(value: Value, depth: int) -> str:
    if type(value) is Made:
        return call_text(value.of, value.args, value.form, depth + 1)
    if type(value) is Pairs:
        items = [f"{shown(key, depth + 1)}: {shown(item, depth + 1)}" for key, item in items_of(_head(value))]
        return "{" + ", ".join(items) + (", ..." if len(value) > 2 * MAX_SHOWN_ITEMS else "") + "}"
    if type(value) is tuple:
        return f"({_listing(value, depth)}{',' if len(value) == 1 else ''})"
    if type(value) is Elements:
        return "{" + _listing(value, depth) + "}" if value else "set()"
    return f"[{_listing(value, depth)}]" if type(value) is list else type(value).__name__


def _head(pairs: Pairs) -> Pairs:
    return Pairs(pairs[: 2 * MAX_SHOWN_ITEMS])


def on_one_line(text: str) -> str:
    """One line without anything that a terminal would obey."""
    short = text if len(text) <= MAX_SHOWN_CHARS else text[:MAX_SHOWN_CHARS] + "..."
    return printable(short)

"""Numbers, sizes, names and values as text in messages. Imports nothing that costs time at start-up."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from heapq import nlargest
from itertools import islice
from math import ceil
from typing import Any

from ckpt_tools.credentials import mask_secrets

MAX_NAMES = 4
"""How many names a message lists before it says how many more there are."""

MAX_COMPARED = 2000
"""How many names are compared letter by letter to find the nearest: 2,000 take about 50 ms."""

NUM_NEAREST = 3


def printable(text: str) -> str:
    """``text`` on one line, without secrets, and with escapes for what a terminal would obey instead of showing, and
    for what cannot be encoded: a checkpoint chooses names."""
    text = mask_secrets(text)
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def count(number: int, noun: str, plural: str = "") -> str:
    """``1 file``, ``1,024 files``."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def tensor_count(by_role: Mapping[str, int], also: str = "") -> str:
    """``116 tensors (29 weights, 87 of the optimizer)``; the parts only if not all of them are weights."""
    words = {"weights": ("weight", ""), "masters": ("fp32 master", ""), "optimizer": ("of the optimizer",) * 2}
    words["others"] = "other", ""
    parts = [count(number, *words[role]) for role, number in by_role.items() if number]
    shown = ", ".join(parts) if any(number for role, number in by_role.items() if role != "weights") else ""
    within = "; ".join(filter(None, (shown, also)))
    return count(sum(by_role.values()), "tensor") + (f" ({within})" if within else "")


def ties(aliases: Mapping[str, str]) -> str:
    """``lm_head.weight is tied to embed_tokens.weight and stored once``."""
    each = [f"{alias} is tied to {owner}" for alias, owner in aliases.items()]
    return f"{listed(each)}; {'a tie is' if len(each) > 1 else 'it is'} stored once"


def size(num_bytes: float, *, at_least: bool = False) -> str:
    """Bytes as people read them: 4.49 GB; with ``at_least``, rounded up."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if num_bytes < 1000 or unit == "TB":
            shown = ceil(num_bytes * 100) / 100 if at_least else num_bytes
            return f"{shown:,.0f} {unit}" if unit == "B" else f"{shown:,.2f} {unit}"
        num_bytes /= 1000
    raise AssertionError("the loop returns")


def listed(names: Collection[str], limit: int = MAX_NAMES) -> str:
    """The first of ``names``, and how many more there are: ``a, b and 7 more``."""
    shown = [name for _, name in zip(range(limit), names, strict=False)]
    more = f" and {len(names) - len(shown):,} more" if len(names) > len(shown) else ""
    return ", ".join(shown) + more


def newest(names: Iterable[str], limit: int = MAX_NAMES) -> str:
    """Folders of a run, the newest first by the numbers in their names: ``epoch_12, epoch_11 and 10 more``."""
    return listed(sorted(names, key=natural, reverse=True), limit)


def natural(name: str) -> list[tuple[int, str]]:
    """A key that puts ``global_step9`` before ``global_step10``."""
    parts = re.split(r"([0-9]+)", name)
    return [(len(part.lstrip("0")), part.lstrip("0")) if number % 2 else (0, part) for number, part in enumerate(parts)]


def nearest(wanted: str, names: Collection[str]) -> Sequence[str]:
    """The names that look most like ``wanted``, the most alike first."""
    from difflib import get_close_matches

    parts = set(_parts(wanted))
    compared = names
    if len(names) > MAX_COMPARED:
        compared = nlargest(MAX_COMPARED, names, key=lambda name: sum(part in parts for part in _parts(name)))
    return get_close_matches(wanted, list(compared), n=NUM_NEAREST, cutoff=0.0)


def _parts(name: str) -> list[str]:
    return re.findall(r"[A-Za-z]+|[0-9]+", name)


def one_line(value: Any, limit: int) -> str:
    """A value that ``ShownValues`` made, as text: ``lr: 0.1, betas: [0.9, 0.95]``; cut at ``limit``."""
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


def of_ranks(ranks: Iterable[int]) -> str:
    """``ranks 0 and 1``."""
    numbers = sorted(ranks)
    return f"rank{'s' if len(numbers) > 1 else ''} {listed([str(rank) for rank in numbers])}"

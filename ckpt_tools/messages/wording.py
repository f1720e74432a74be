"""Numbers, sizes, names and values as text in messages. Imports nothing that costs time at start-up."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from heapq import nlargest
from itertools import islice
from math import ceil
from typing import Any

from ckpt_tools.process.credentials import mask_secrets

MAX_LISTED_NAMES = 4
"""How many names a message lists before it says how many more there are."""

MAX_COMPARED_NAMES = 2000
"""How many names are compared letter by letter to find the nearest: 2,000 take about 50 ms."""

NUM_SUGGESTIONS = 3


def escape_unprintable(text: str) -> str:
    """``text`` on one line, without secrets, and with escapes for what a terminal would obey instead of showing, and
    for what cannot be encoded: a checkpoint chooses names."""
    text = mask_secrets(text)
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def format_count(number: int, noun: str, plural: str = "") -> str:
    """``1 file``, ``1,024 files``."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def format_tensor_count(by_role: Mapping[str, int], note: str = "") -> str:
    """``116 tensors (29 weights, 87 of the optimizer)``; the parts only if not all of them are weights."""
    noun_by_role = {"weights": ("weight", ""), "masters": ("fp32 master", ""), "optimizer": ("of the optimizer",) * 2}
    noun_by_role["others"] = "other", ""
    role_counts = [format_count(number, *noun_by_role[role]) for role, number in by_role.items() if number]
    shown = ", ".join(role_counts) if any(number for role, number in by_role.items() if role != "weights") else ""
    details = "; ".join(filter(None, (shown, note)))
    return format_count(sum(by_role.values()), "tensor") + (f" ({details})" if details else "")


def format_ties(aliases: Mapping[str, str]) -> str:
    """``lm_head.weight is tied to embed_tokens.weight and stored once``."""
    each = [f"{alias} is tied to {owner}" for alias, owner in aliases.items()]
    return f"{join_names(each)}; {'a tie is' if len(each) > 1 else 'it is'} stored once"


def format_size(num_bytes: float, *, at_least: bool = False) -> str:
    """Bytes as people read them: 4.49 GB; with ``at_least``, rounded up."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if num_bytes < 1000 or unit == "TB":
            shown = ceil(num_bytes * 100) / 100 if at_least else num_bytes
            return f"{shown:,.0f} {unit}" if unit == "B" else f"{shown:,.2f} {unit}"
        num_bytes /= 1000
    raise AssertionError("the loop returns")


def join_names(names: Collection[str], limit: int = MAX_LISTED_NAMES) -> str:
    """The first of ``names``, and how many more there are: ``a, b and 7 more``."""
    shown = [name for _, name in zip(range(limit), names, strict=False)]
    more = f" and {len(names) - len(shown):,} more" if len(names) > len(shown) else ""
    return ", ".join(shown) + more


def join_newest(names: Iterable[str], limit: int = MAX_LISTED_NAMES) -> str:
    """Folders of a run, the newest first by the numbers in their names: ``epoch_12, epoch_11 and 10 more``."""
    return join_names(sorted(names, key=natural_sort_key, reverse=True), limit)


def natural_sort_key(name: str) -> list[tuple[int, str]]:
    """A key that puts ``global_step9`` before ``global_step10``."""
    parts = re.split(r"([0-9]+)", name)
    return [(len(part.lstrip("0")), part.lstrip("0")) if number % 2 else (0, part) for number, part in enumerate(parts)]


def find_nearest(unknown_name: str, names: Collection[str]) -> Sequence[str]:
    """The names that look most like ``unknown_name``, the most alike first."""
    from difflib import get_close_matches

    name_words = set(_split_words(unknown_name))
    candidates = names
    if len(names) > MAX_COMPARED_NAMES:

        def count_common_words(name: str) -> int:
            return sum(word in name_words for word in _split_words(name))

        candidates = nlargest(MAX_COMPARED_NAMES, names, key=count_common_words)
    return get_close_matches(unknown_name, list(candidates), n=NUM_SUGGESTIONS, cutoff=0.0)


def _split_words(name: str) -> list[str]:
    return re.findall(r"[A-Za-z]+|[0-9]+", name)


def format_one_line(value: Any, limit: int) -> str:
    """A value that ``BoundedValues`` made, as text: ``lr: 0.1, betas: [0.9, 0.95]``; cut at ``limit``."""
    text = _format_without_braces(value, limit)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def _format_without_braces(value: Any, limit: int) -> str:
    """A dict without its braces."""
    if isinstance(value, dict) and not _is_placeholder(value):
        return ", ".join(f"{name}: {_format_value(part, limit)}" for name, part in islice(value.items(), limit))
    return _format_value(value, limit)


def _format_value(value: Any, limit: int) -> str:
    if isinstance(value, dict):
        return _format_placeholder(value) if _is_placeholder(value) else f"{{{_format_without_braces(value, limit)}}}"
    if isinstance(value, list):
        return f"[{', '.join(_format_value(part, limit) for part in islice(value, limit))}]"
    return "none" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)


def _is_placeholder(value: dict[str, Any]) -> bool:
    return len(value) == 1 and next(iter(value)).startswith("$")


def _format_placeholder(value: dict[str, Any]) -> str:
    name, what = next(iter(value.items()))
    units = {"$bytes": "byte", "$int": "bit"}
    if type(what) is int:
        return f"<{name[1:]} of {format_count(what, units.get(name, 'item'))}>"
    return f"<{name[1:]} {what}>" if name == "$tensor" else str(what)


def format_ranks(ranks: Iterable[int]) -> str:
    """``ranks 0 and 1``."""
    numbers = sorted(ranks)
    return f"rank{'s' if len(numbers) > 1 else ''} {join_names([str(rank) for rank in numbers])}"

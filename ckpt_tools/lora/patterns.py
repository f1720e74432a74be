"""Names and patterns in ``adapter_config.json``, looked up in time that grows with their number and not its product
with that of a model's modules."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from math import comb
from typing import Any

MAX_STEPS = 5e8
"""A pattern that may need more of them for all names takes minutes."""

_PLAIN = re.compile(r"[\w.-]*")
_PLAIN_STEPS = 100
_MAX_CHOICES = 60


@dataclass(frozen=True, slots=True)
class Ends:
    """Names that others end with."""

    names: Mapping[str, None] = field(default_factory=dict)
    lengths: tuple[int, ...] = ()

    @classmethod
    def of(cls, names: Iterable[str]) -> Ends:
        found = dict.fromkeys(names)
        return cls(found, tuple(sorted(set(map(len, found)))))

    def ends(self, name: str, stop: int | None = None, *, after_dot: bool = True) -> bool:
        """Whether ``name``, up to ``stop``, is one of the names or ends with one; with ``after_dot`` after a dot."""
        stop = len(name) if stop is None else stop
        for length in self.lengths:
            start = stop - length
            if start < 0:
                return False
            if name[start:stop] in self.names and (not after_dot or start == 0 or name[start - 1] == "."):
                return True
        return False

    def holds(self, module: str, *, after_dot: bool = True) -> bool:
        """Whether ``module`` or one that it is in ends so."""
        stops = [*(at for at, letter in enumerate(module) if letter == "."), len(module)]
        return bool(self.names) and any(self.ends(module, stop, after_dot=after_dot) for stop in stops)


NO_ENDS = Ends()


class Patterns:
    """``rank_pattern`` or ``alpha_pattern``, by PEFT's ``get_pattern_key``: each is a regular expression for the end of
    a name after a dot, or for all of it, and the first one counts. In a plain name any letter may stand for a dot, so
    such names are found by their parts, for each of the lengths that these have."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values
        self.plain: dict[tuple[int, ...], dict[tuple[str, ...], tuple[int, Any]]] = {}
        self.regexes: list[tuple[int, re.Pattern[str], Any]] = []
        for number, (pattern, value) in enumerate(values.items()):
            if is_plain(pattern):
                parts = tuple(pattern.split("."))
                self.plain.setdefault(tuple(map(len, parts)), {}).setdefault(parts, (number, value))
            else:
                self.regexes.append((number, re.compile(rf"(.*\.)?({pattern})$"), value))

    def value(self, key: str, default: Any) -> Any:
        found = [hit for lengths in self.plain if (hit := self._plain(key, lengths)) is not None]
        found += islice(((number, value) for number, regex, value in self.regexes if regex.match(key)), 1)
        return min(found)[1] if found else self.values.get(key, default)

    def _plain(self, key: str, lengths: tuple[int, ...]) -> tuple[int, Any] | None:
        start = len(key) - sum(lengths) - len(lengths) + 1
        if start < 0 or (start and key[start - 1] != "."):
            return None
        parts = []
        for length in lengths:
            parts.append(key[start : start + length])
            start += length + 1
        return self.plain[lengths].get(tuple(parts))

    def is_quick(self, names: Collection[str]) -> bool:
        """Whether the values of all names are found in time."""
        regexes = [regex.pattern for _, regex, _ in self.regexes]
        return _PLAIN_STEPS * len(self.plain) * len(names) <= MAX_STEPS and is_quick(regexes, names)


def is_plain(pattern: str) -> bool:
    return _PLAIN.fullmatch(pattern) is not None


def is_quick(patterns: Iterable[str], names: Collection[str]) -> bool:
    """False if trying all ways to match all names may take more than ``MAX_STEPS``."""
    longest = max(map(len, names), default=0)
    return sum(_num_steps(pattern, longest) for pattern in patterns) * len(names) <= MAX_STEPS


def _num_steps(pattern: str, length: int) -> float:
    """The most steps of matching a name: each repetition can end at any letter, and each group take any of its
    alternatives. Infinite for a repeated group, and for what begins with ``(?`` but for ``(?:``."""
    plain = re.sub(r"\\.|\[\^?\]?[^\]]*\]", "x", pattern.removeprefix(r"(.*\.)?")).replace("(?:", "(")
    choices = plain.count("(") + plain.count("?")
    if choices > _MAX_CHOICES or re.search(r"\)[*+{]|\(\?", plain):
        return float("inf")
    alternatives = choices + plain.count("|") + plain.count("?")
    repetitions = len(re.findall(r"[*+{]", plain)) + pattern.startswith(r"(.*\.)?")
    ways = float(alternatives / choices) ** choices if choices else 1 + plain.count("|")
    run = 1 + max(map(len, re.split(r"[*+?{}()|]", plain)))
    return comb(length + repetitions, repetitions) * run * ways

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

_PLAIN_NAME = re.compile(r"[\w.-]*")
_PLAIN_STEPS = 100
_MAX_CHOICES = 60


@dataclass(frozen=True, slots=True)
class NameSuffixes:
    """Names that others end with."""

    names: Mapping[str, None] = field(default_factory=dict)
    lengths: tuple[int, ...] = ()

    @classmethod
    def of(cls, names: Iterable[str]) -> NameSuffixes:
        unique_names = dict.fromkeys(names)
        return cls(unique_names, tuple(sorted(set(map(len, unique_names)))))

    def does_match_name(self, name: str, stop: int | None = None, *, after_dot: bool = True) -> bool:
        """Whether ``name``, up to ``stop``, is one of the names or ends with one; with ``after_dot`` after a dot."""
        stop = len(name) if stop is None else stop
        for length in self.lengths:
            start = stop - length
            if start < 0:
                return False
            if name[start:stop] in self.names and (not after_dot or start == 0 or name[start - 1] == "."):
                return True
        return False

    def does_match_path(self, module: str, *, after_dot: bool = True) -> bool:
        """Whether the name of ``module``, or of a module around it, matches as in ``does_match_name``."""
        stops = [*(at for at, letter in enumerate(module) if letter == "."), len(module)]
        return bool(self.names) and any(self.does_match_name(module, stop, after_dot=after_dot) for stop in stops)


NO_SUFFIXES = NameSuffixes()


class PatternValues:
    """``rank_pattern`` or ``alpha_pattern``, by PEFT's ``get_pattern_key``: each is a regular expression for the end of
    a name after a dot, or for all of it, and the first one counts. In a plain name any letter may stand for a dot, so
    such names are found by their parts, for each of the lengths that these have."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values_by_pattern = values
        self.plain_by_lengths: dict[tuple[int, ...], dict[tuple[str, ...], tuple[int, Any]]] = {}
        self.regexes: list[tuple[int, re.Pattern[str], Any]] = []
        for number, (pattern, value) in enumerate(values.items()):
            if is_plain_name(pattern):
                parts = tuple(pattern.split("."))
                self.plain_by_lengths.setdefault(tuple(map(len, parts)), {}).setdefault(parts, (number, value))
            else:
                self.regexes.append((number, re.compile(rf"(.*\.)?({pattern})$"), value))

    def find_value(self, key: str, default: Any) -> Any:
        hits = [hit for lengths in self.plain_by_lengths if (hit := self._find_plain_value(key, lengths)) is not None]
        hits += islice(((number, value) for number, regex, value in self.regexes if regex.match(key)), 1)
        return min(hits)[1] if hits else self.values_by_pattern.get(key, default)

    def _find_plain_value(self, key: str, lengths: tuple[int, ...]) -> tuple[int, Any] | None:
        # In the regular expression "q.proj" the dot matches any letter, so the key is cut at the lengths of its parts:
        # (1, 4) gives key[-6:-5] and key[-4:]. There is one look-up for each distinct tuple of lengths.
        start = len(key) - sum(lengths) - len(lengths) + 1
        if start < 0 or (start and key[start - 1] != "."):
            return None
        parts = []
        for length in lengths:
            parts.append(key[start : start + length])
            start += length + 1
        return self.plain_by_lengths[lengths].get(tuple(parts))

    def is_fast_to_match(self, names: Collection[str]) -> bool:
        """Whether the values of all names are found in time."""
        regexes = [regex.pattern for _, regex, _ in self.regexes]
        return _PLAIN_STEPS * len(self.plain_by_lengths) * len(names) <= MAX_STEPS and is_fast_to_match(regexes, names)


def is_plain_name(pattern: str) -> bool:
    return _PLAIN_NAME.fullmatch(pattern) is not None


def is_fast_to_match(patterns: Iterable[str], names: Collection[str]) -> bool:
    """False if trying all ways to match all names may take more than ``MAX_STEPS``."""
    longest = max(map(len, names), default=0)
    return sum(_count_steps(pattern, longest) for pattern in patterns) * len(names) <= MAX_STEPS


def _count_steps(pattern: str, length: int) -> float:
    """The most steps of matching a name: each repetition can end at any letter, and each group take any of its
    alternatives. Infinite for a repeated group, and for what begins with ``(?`` but for ``(?:``."""
    # An upper bound of backtracking: r repetitions that end at any of n letters are C(n + r, r) ways, times the choices
    # of the groups, times the longest literal that is compared each time.
    simplified = re.sub(r"\\.|\[\^?\]?[^\]]*\]", "x", pattern.removeprefix(r"(.*\.)?")).replace("(?:", "(")
    choices = simplified.count("(") + simplified.count("?")
    if choices > _MAX_CHOICES or re.search(r"\)[*+{]|\(\?", simplified):
        return float("inf")
    alternatives = choices + simplified.count("|") + simplified.count("?")
    repetitions = len(re.findall(r"[*+{]", simplified)) + pattern.startswith(r"(.*\.)?")
    num_alternatives = float(alternatives / choices) ** choices if choices else 1 + simplified.count("|")
    longest_literal = 1 + max(map(len, re.split(r"[*+?{}()|]", simplified)))
    return comb(length + repetitions, repetitions) * longest_literal * num_alternatives

"""Patterns of tensor names: ``model.layers.{layer}.mlp.experts.{expert}.w1.weight``. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property

from ckpt_tools.errors import UsageError

_VARIABLE = re.compile(r"\{([A-Za-z_]\w*)(\.\.\.)?\}", re.ASCII)

_NUMBER = "0|[1-9][0-9]{0,17}"

MAX_LONG = 2
"""How many ``{prefix...}`` a pattern may have: the time to match a name is its length to that power."""


@dataclass(frozen=True)
class NamePattern:
    """A name with variables. ``{layer}`` is one part of a name, without dots; ``{prefix...}`` is any text, also none.
    Variables of ``numbers`` match numbers alone.

    Raises:
        UsageError: a brace or a star is not part of a variable, or a name could be read in many ways.
    """

    text: str
    numbers: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        rest = _VARIABLE.sub("", self.text)
        if not self.text or any(sign in rest for sign in "{}* "):
            raise UsageError(f"{self.text!r} is not a name; variables are written as {{layer}} or {{prefix...}}")
        if "}{" in self.text or self.text.count("...}") > MAX_LONG:
            raise UsageError(
                f"{self.text!r} can match a name in several ways; put text between variables, and write at most "
                f"{MAX_LONG} as {{prefix...}}"
            )

    @cached_property
    def variables(self) -> tuple[str, ...]:
        """The variables in the order of their first occurrence."""
        return tuple(dict.fromkeys(found[1] for found in _VARIABLE.finditer(self.text)))

    @cached_property
    def _regex(self) -> re.Pattern[str]:
        parts, end, seen = [], 0, set[str]()
        for found in _VARIABLE.finditer(self.text):
            parts.append(re.escape(self.text[end : found.start()]))
            name, is_long = found[1], found[2]
            matched = _NUMBER if name in self.numbers else ".*" if is_long else "[^.]+"
            parts.append(f"(?P={name})" if name in seen else f"(?P<{name}>{matched})")
            seen.add(name)
            end = found.end()
        return re.compile("".join([*parts, re.escape(self.text[end:])]), re.DOTALL)

    def match(self, name: str) -> Mapping[str, str] | None:
        """The values of the variables; None if the name does not match."""
        found = self._regex.fullmatch(name)
        return None if found is None else found.groupdict()

    def filled(self, values: Mapping[str, str]) -> str:
        """The name with these values."""
        return _VARIABLE.sub(lambda found: values[found[1]], self.text)

    def with_numbers(self, names: Collection[str]) -> NamePattern:
        """The same pattern whose variables ``names`` are numbers."""
        return NamePattern(self.text, frozenset(names) & frozenset(self.variables))

    @property
    def letters(self) -> str:
        """The pattern without its variables, to find the nearest name."""
        return _VARIABLE.sub("0", self.text)

"""Patterns of tensor names: ``model.layers.{layer}.mlp.experts.{expert}.w1.weight``. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from ckpt_tools.errors import UsageError

_VARIABLE_PATTERN = re.compile(r"\{([A-Za-z_]\w*)(\.\.\.|\+[A-Za-z_]\w*)?\}", re.ASCII)

_NUMBER_REGEX = "0|[1-9][0-9]{0,17}"

MAX_LONG_VARIABLES = 2
"""How many ``{prefix...}`` a pattern may have: the time to match a name is its length to that power."""


@dataclass(frozen=True)
class NamePattern:
    """A name with variables. ``{layer}`` is one part of a name, without dots; ``{prefix...}`` is any text, also none.
    ``{mtp+L}`` is a number that counts from the size ``L``: of ``L`` it is 0. Variables of ``numeric_variables`` match
    numbers alone. ``sizes`` has the values of such sizes; while one is not known, the pattern takes any number.

    Raises:
        UsageError: a brace or a star is not part of a variable, or a name could be read in many ways.
    """

    text: str
    numeric_variables: frozenset[str] = frozenset()
    sizes: Mapping[str, int] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        rest = _VARIABLE_PATTERN.sub("", self.text)
        if not self.text or any(sign in rest for sign in "{}* "):
            raise UsageError(
                f"{self.text!r} is not a name; variables are written as {{layer}}, {{prefix...}} or {{mtp+L}}"
            )
        if "}{" in self.text or self.text.count("...}") > MAX_LONG_VARIABLES:
            raise UsageError(
                f"{self.text!r} can match a name in several ways; put text between variables, and write at most "
                f"{MAX_LONG_VARIABLES} as {{prefix...}}"
            )

    @cached_property
    def variables(self) -> tuple[str, ...]:
        """The variables in the order of their first occurrence."""
        return tuple(dict.fromkeys(found[1] for found in _VARIABLE_PATTERN.finditer(self.text)))

    @cached_property
    def _regex(self) -> re.Pattern[str]:
        parts, end, seen = [], 0, set[str]()
        for found in _VARIABLE_PATTERN.finditer(self.text):
            parts.append(re.escape(self.text[end : found.start()]))
            name, is_long = found[1], found[2]
            is_number = name in self.numeric_variables or name in self.offset_sizes
            matched = _NUMBER_REGEX if is_number else ".*" if is_long else "[^.]+"
            parts.append(f"(?P={name})" if name in seen else f"(?P<{name}>{matched})")
            seen.add(name)
            end = found.end()
        return re.compile("".join([*parts, re.escape(self.text[end:])]), re.DOTALL)

    def match_name(self, name: str) -> Mapping[str, str] | None:
        """The values of the variables; None if the name does not match."""
        found = self._regex.fullmatch(name)
        if found is None:
            return None
        values = found.groupdict()
        for variable, size in self.offset_sizes.items():
            number = int(values[variable]) - self.sizes.get(size, 0)
            if number < 0:
                return None
            values[variable] = str(number)
        return values

    def fill_variables(self, values: Mapping[str, str]) -> str:
        """The name with these values."""
        numbers = {name: str(int(values[name]) + self.sizes.get(size, 0)) for name, size in self.offset_sizes.items()}
        return _VARIABLE_PATTERN.sub(lambda found: numbers.get(found[1], values[found[1]]), self.text)

    @cached_property
    def offset_sizes(self) -> Mapping[str, str]:
        """The size from which a variable counts."""
        return {
            found[1]: found[2][1:]
            for found in _VARIABLE_PATTERN.finditer(self.text)
            if (found[2] or "").startswith("+")
        }

    @property
    def unknown_sizes(self) -> frozenset[str]:
        """Sizes from which a variable counts, and whose values are not known."""
        return frozenset(self.offset_sizes.values()) - self.sizes.keys()

    def with_sizes(self, env: Mapping[str, int]) -> NamePattern:
        """The same pattern, whose variables count from the sizes of ``env``."""
        if not self.offset_sizes:
            return self
        return replace(self, sizes={size: env[size] for size in self.offset_sizes.values() if size in env})

    def with_numbers(self, names: Collection[str]) -> NamePattern:
        """The same pattern whose variables ``names`` are numbers."""
        return replace(self, numeric_variables=frozenset(names) & frozenset(self.variables))

    @property
    def text_without_variables(self) -> str:
        """The pattern without its variables, to find the nearest name."""
        return _VARIABLE_PATTERN.sub("0", self.text)

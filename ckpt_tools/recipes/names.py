"""Patterns of tensor names: ``model.layers.{layer}.mlp.experts.{expert}.w1.weight``. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from ckpt_tools.errors import UsageError

_VARIABLE = re.compile(r"\{([A-Za-z_]\w*)(\.\.\.|\+[A-Za-z_]\w*)?\}", re.ASCII)

_NUMBER = "0|[1-9][0-9]{0,17}"

MAX_LONG = 2
"""How many ``{prefix...}`` a pattern may have: the time to match a name is its length to that power."""


@dataclass(frozen=True)
class NamePattern:
    """A name with variables. ``{layer}`` is one part of a name, without dots; ``{prefix...}`` is any text, also none.
    ``{mtp+L}`` is a number that counts from the size ``L``: of ``L`` it is 0. Variables of ``numbers`` match numbers
    alone. ``sizes`` has the values of such sizes; while one is not known, the pattern takes any number.

    Raises:
        UsageError: a brace or a star is not part of a variable, or a name could be read in many ways.
    """

    text: str
    numbers: frozenset[str] = frozenset()
    sizes: Mapping[str, int] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        rest = _VARIABLE.sub("", self.text)
        if not self.text or any(sign in rest for sign in "{}* "):
            raise UsageError(
                f"{self.text!r} is not a name; variables are written as {{layer}}, {{prefix...}} or {{mtp+L}}"
            )
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
            is_number = name in self.numbers or name in self.offsets
            matched = _NUMBER if is_number else ".*" if is_long else "[^.]+"
            parts.append(f"(?P={name})" if name in seen else f"(?P<{name}>{matched})")
            seen.add(name)
            end = found.end()
        return re.compile("".join([*parts, re.escape(self.text[end:])]), re.DOTALL)

    def match(self, name: str) -> Mapping[str, str] | None:
        """The values of the variables; None if the name does not match."""
        found = self._regex.fullmatch(name)
        if found is None:
            return None
        values = found.groupdict()
        for variable, size in self.offsets.items():
            number = int(values[variable]) - self.sizes.get(size, 0)
            if number < 0:
                return None
            values[variable] = str(number)
        return values

    def filled(self, values: Mapping[str, str]) -> str:
        """The name with these values."""
        return _VARIABLE.sub(lambda found: self._shown(found[1], values[found[1]]), self.text)

    def _shown(self, variable: str, value: str) -> str:
        size = self.offsets.get(variable)
        return value if size is None else str(int(value) + self.sizes.get(size, 0))

    @cached_property
    def offsets(self) -> Mapping[str, str]:
        """The size from which a variable counts."""
        return {found[1]: found[2][1:] for found in _VARIABLE.finditer(self.text) if (found[2] or "").startswith("+")}

    @property
    def unknown(self) -> frozenset[str]:
        """Sizes from which a variable counts, and whose values are not known."""
        return frozenset(self.offsets.values()) - self.sizes.keys()

    def with_sizes(self, env: Mapping[str, int]) -> NamePattern:
        """The same pattern, whose variables count from the sizes of ``env``."""
        if not self.offsets:
            return self
        return replace(self, sizes={size: env[size] for size in self.offsets.values() if size in env})

    def with_numbers(self, names: Collection[str]) -> NamePattern:
        """The same pattern whose variables ``names`` are numbers."""
        return replace(self, numbers=frozenset(names) & frozenset(self.variables))

    @property
    def letters(self) -> str:
        """The pattern without its variables, to find the nearest name."""
        return _VARIABLE.sub("0", self.text)

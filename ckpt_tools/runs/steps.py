"""Choice of the checkpoints of a run that are converted, and the destination of each. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ckpt_tools.core.option_names import format_option
from ckpt_tools.errors import UsageError

Item = TypeVar("Item")

_PLACEHOLDER = re.compile(r"\{([^{}]*)\}")
_PLACEHOLDER_NAMES = ("step", "name")


def check_number(name: str, number: object, least: int = 1) -> None:
    """Raises UsageError if the option ``name`` has a value that is not a whole number from ``least`` on."""
    if number is not None and (type(number) is not int or number < least):
        raise UsageError(f"{format_option(name, number)} is not a number from {least} on")


@dataclass(frozen=True, slots=True)
class StepSelection:
    """The steps to convert: those in ``steps``, if there are any; multiples of ``every``; of these, the ``last`` ones.

    Raises:
        UsageError: a value is not a number of its kind.
    """

    steps: Sequence[int] = ()
    every: int | None = None
    last: int | None = None

    def __post_init__(self) -> None:
        for step in self.steps:
            check_number("steps", step, least=0)
        check_number("every", self.every)
        check_number("last", self.last)

    @property
    def needs_steps(self) -> bool:
        """Whether a checkpoint without a step cannot be judged."""
        return bool(self.steps) or self.every is not None

    def includes(self, step: int | None) -> bool:
        """Whether a checkpoint of this step may be chosen, but for ``last``."""
        if step is None:
            return not self.needs_steps
        return (not self.steps or step in self.steps) and (self.every is None or step % self.every == 0)

    def choose_items(self, items: Sequence[Item], get_step: Callable[[Item], int | None]) -> list[Item]:
        """The chosen of ``items``, in the order of their steps. Those without a step keep their order, before all
        others."""
        included = [each for each in items if self.includes(get_step(each))]
        included.sort(key=lambda each: -1 if (step := get_step(each)) is None else step)
        return included if self.last is None else included[-self.last :]


@dataclass(frozen=True, slots=True)
class DestinationTemplate:
    """A path or URL in which ``{step}`` or ``{name}`` stands for what differs between the checkpoints of a run.

    Raises:
        UsageError: it has neither, or another one.
    """

    text: str

    def __post_init__(self) -> None:
        names = _PLACEHOLDER.findall(self.text)
        unknown_names = [each for each in names if each not in _PLACEHOLDER_NAMES]
        if unknown_names:
            raise UsageError(f"{self.text}: {{{unknown_names[0]}}} is neither {{step}} nor {{name}}")
        if not names:
            raise UsageError(f"{self.text} is one place for all checkpoints; write {{step}} or {{name}} in it")

    def make_destination(self, step: int | None, name: str) -> str:
        """The destination of a checkpoint; ``name`` is its path in the run, whose last part, without the ending of a
        file, stands for ``{name}``. Raises UsageError if ``{step}`` is in the template and ``step`` is None."""
        if step is None and "{step}" in self.text:
            raise UsageError(f"{name} says no step; write {{name}} instead of {{step}} in {self.text}")
        values = {"step": str(step), "name": re.sub(r"\.(?:ckpt|pt|pth|bin|safetensors)$", "", name.rpartition("/")[2])}
        return _PLACEHOLDER.sub(lambda found: values[found[1]], self.text)

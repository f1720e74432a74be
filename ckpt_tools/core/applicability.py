"""Rules of which options apply to what, so that no option is ignored in silence. Pure.

The rules about formats are in ``formats.applicability``.

An option that is given and does not apply is an error that says what it is for. An option that is not given, or has
its default, asks for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ckpt_tools.core.option_names import expand_option_template, format_option
from ckpt_tools.errors import UsageError


@dataclass(frozen=True, slots=True)
class OptionContext:
    """The facts about a command that rules look at.

    ``source_format`` and ``target_format`` are the formats that are read and written, for ``verify`` those of SRC and
    DST; ``reader_options`` and ``writer_options`` are the options that they take. ``has_masters`` says that the source
    keeps fp32 masters, ``keeps_both_copies`` that the target keeps them beside the weights, ``has_state`` that
    optimizer state is written.
    """

    source_format: str = ""
    target_format: str = ""
    reader_options: tuple[str, ...] = ()
    writer_options: tuple[str, ...] = ()
    is_weights_alone: bool = False
    has_masters: bool = False
    keeps_both_copies: bool = False
    has_state: bool = False
    has_destination: bool = False
    has_digests: bool = False
    has_public_key: bool = False
    prints_digests: bool = False
    has_recipe: bool = False
    has_stats: bool = False


@dataclass(frozen=True, slots=True)
class ApplicabilityRule:
    """``options`` apply to ``purpose``, if ``applies`` says so; with ``checked_value``, only that value is checked."""

    options: tuple[str, ...]
    applies: Callable[[OptionContext], bool]
    purpose: str | Callable[[], str]
    describe_context: Callable[[OptionContext], str]
    checked_value: Any = None

    def check_options(self, option_values: Mapping[str, Any], case: OptionContext) -> None:
        """Raises UsageError for an option that is given and does not apply."""
        for name in self.options:
            value = option_values.get(name)
            if value and self.checked_value in (None, value) and not self.applies(case):
                what = self.purpose if isinstance(self.purpose, str) else self.purpose()
                purpose, context = expand_option_template(what), self.describe_context(case)
                raise UsageError.of(name, f"{format_option(name)} is for {purpose}; {context}")


TWO_COPIES_RULE = ApplicabilityRule(
    ("weights",),
    lambda case: not (case.has_masters and case.keeps_both_copies),
    "checkpoints of which one alone keeps fp32 masters, or for {state:model}",
    lambda case: "here both keep them, and both copies are compared",
    checked_value="model",
)
"""Of two checkpoints, or one and a list of digests; ``keeps_both_copies`` says that masters are compared too."""

RECIPE_CONFIG_RULE = ApplicabilityRule(
    ("config",),
    lambda case: case.has_recipe,
    "the sizes of a recipe, with {recipe}, and for {dequantize}",
    lambda case: "no recipe is named",
)
"""Of every command that writes no model's files."""

_SELECTION_OPTIONS = ("state", "weights", "include", "exclude", "rename", "key_map")

COMMAND_RULES: Mapping[str, tuple[ApplicabilityRule, ...]] = {
    "inspect": (
        ApplicabilityRule(
            ("sample", "memory", "workers"),
            lambda case: case.has_stats,
            "statistics, with {stats}",
            lambda case: "headers alone are read",
        ),
    ),
    "verify": (
        ApplicabilityRule(
            ("digests", "public_key", "signature"),
            lambda case: not case.has_destination,
            "verify with one checkpoint",
            lambda case: "two are compared with each other",
        ),
        ApplicabilityRule(
            ("signature",),
            lambda case: case.has_public_key,
            "checking a signature",
            lambda case: f"name the key too, with {format_option('public_key')}",
        ),
        ApplicabilityRule(
            _SELECTION_OPTIONS,
            lambda case: case.has_destination or case.has_digests,
            "verify with {dst} or {digests}",
            lambda case: "a checkpoint alone is checked whole, as it is stored",
        ),
        ApplicabilityRule(
            ("dtype", "buffers"),
            lambda case: case.has_destination,
            "verify with {dst}",
            lambda case: "digests are of elements before a cast, and a checkpoint alone is checked as it is stored",
        ),
        ApplicabilityRule(
            ("strip", "recipe", "dequantize", "config", "like", "untie", "quantize", "keep", "drop", "fill"),
            lambda case: case.has_destination,
            "verify with {dst}",
            lambda case: (
                "digests are of whole tensors before a recipe, and a checkpoint alone is checked as it is stored"
            ),
        ),
    ),
    "checksum": (
        ApplicabilityRule(
            ("overwrite",),
            lambda case: not case.prints_digests,
            "digests that are written to a file",
            lambda case: f"with {format_option('output', '-')} they are not written",
        ),
    ),
}
"""By command, what its arguments alone tell before anything is opened."""


def check_applicability(
    rules: Iterable[ApplicabilityRule], option_values: Mapping[str, Any], case: OptionContext
) -> None:
    """Raises UsageError for the first option of ``option_values`` that does not apply to ``case``."""
    for rule in rules:
        rule.check_options(option_values, case)

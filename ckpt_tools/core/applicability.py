"""Rules of which options apply to what, so that no option is ignored in silence. Pure.

The rules about formats are in ``formats.applicability``.

An option that is given and does not apply is an error that says what it is for. An option that is not given, or has
its default, asks for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ckpt_tools.core.option_names import option, spelled
from ckpt_tools.errors import UsageError


@dataclass(frozen=True, slots=True)
class Case:
    """The facts about a command that rules look at.

    ``source`` and ``target`` are the formats that are read and written, for ``verify`` those of SRC and DST; ``reads``
    and ``writes`` are the options that they take. ``has_masters`` says that the source keeps fp32 masters,
    ``keeps_both`` that the target keeps them beside the weights, ``has_state`` that optimizer state is written.
    """

    source: str = ""
    target: str = ""
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    is_weights_alone: bool = False
    has_masters: bool = False
    keeps_both: bool = False
    has_state: bool = False
    has_destination: bool = False
    has_digests: bool = False
    has_key: bool = False
    is_printed: bool = False
    is_remote: bool = False
    has_recipe: bool = False
    has_stats: bool = False


@dataclass(frozen=True, slots=True)
class Rule:
    """``options`` apply to ``what``, if ``applies`` says so; with ``value``, only that value is checked."""

    options: tuple[str, ...]
    applies: Callable[[Case], bool]
    what: str | Callable[[], str]
    here: Callable[[Case], str]
    value: Any = None

    def check(self, given: Mapping[str, Any], case: Case) -> None:
        """Raises UsageError for an option that is given and does not apply."""
        for name in self.options:
            value = given.get(name)
            if value and self.value in (None, value) and not self.applies(case):
                what = self.what if isinstance(self.what, str) else self.what()
                raise UsageError.of(name, f"{option(name)} is for {spelled(what)}; {self.here(case)}")


OF_TWO_COPIES = Rule(
    ("weights",),
    lambda case: not (case.has_masters and case.keeps_both),
    "checkpoints of which one alone keeps fp32 masters, or for {state:model}",
    lambda case: "here both keep them, and both copies are compared",
    value="model",
)
"""Of two checkpoints, or one and a list of digests; ``keeps_both`` says that masters are compared too."""

OF_RECIPES = Rule(
    ("config",),
    lambda case: case.has_recipe,
    "the sizes of a recipe, with {recipe}, and for {dequantize}",
    lambda case: "no recipe is named",
)
"""Of every command that writes no model's files."""

_CHOOSING = ("state", "weights", "include", "exclude", "rename", "key_map")

ARGUMENTS: Mapping[str, tuple[Rule, ...]] = {
    "inspect": (
        Rule(
            ("sample", "memory", "workers"),
            lambda case: case.has_stats,
            "statistics, with {stats}",
            lambda case: "headers alone are read",
        ),
    ),
    "verify": (
        Rule(
            ("digests", "public_key", "signature"),
            lambda case: not case.has_destination,
            "verify with one checkpoint",
            lambda case: "two are compared with each other",
        ),
        Rule(
            ("signature",),
            lambda case: case.has_key,
            "checking a signature",
            lambda case: f"name the key too, with {option('public_key')}",
        ),
        Rule(
            _CHOOSING,
            lambda case: case.has_destination or case.has_digests,
            "verify with {dst} or {digests}",
            lambda case: "a checkpoint alone is checked whole, as it is stored",
        ),
        Rule(
            ("dtype", "buffers"),
            lambda case: case.has_destination,
            "verify with {dst}",
            lambda case: "digests are of elements before a cast, and a checkpoint alone is checked as it is stored",
        ),
        Rule(
            ("strip", "recipe", "dequantize", "config", "like", "untie"),
            lambda case: case.has_destination,
            "verify with {dst}",
            lambda case: (
                "digests are of whole tensors before a recipe, and a checkpoint alone is checked as it is stored"
            ),
        ),
    ),
    "checksum": (
        Rule(
            ("overwrite",),
            lambda case: not case.is_printed,
            "digests that are written to a file",
            lambda case: f"with {option('output', '-')} they are not written",
        ),
    ),
}
"""By command, what its arguments alone tell before anything is opened."""

STORES = (
    Rule(
        ("storage_options",),
        lambda case: case.is_remote,
        "URLs of stores, such as s3://bucket/folder",
        lambda case: "only local paths are named here",
    ),
)
"""Of every command that opens stores."""


def check(rules: Iterable[Rule], given: Mapping[str, Any], case: Case) -> None:
    """Raises UsageError for the first option of ``given`` that does not apply to ``case``."""
    for rule in rules:
        rule.check(given, case)

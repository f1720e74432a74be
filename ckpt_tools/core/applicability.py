"""Which options apply to what: one table, so that nothing that a user asked for is ignored in silence. Pure.

An option that is given and does not apply is an error that says what it is for. An option that is not given, or has
its default, asks for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ckpt_tools.core.option_names import option, spelled
from ckpt_tools.errors import UsageError

RANKED = ("dcp", "zero1", "zero2", "zero3", "megatron", "sharded")
"""Formats that are written for a number of ranks."""
SHARDED = ("safetensors", "torch")
"""Formats whose output is cut into shards of at most a given size."""
TAGGED = ("zero1", "zero2", "zero3", "universal")
"""Formats whose checkpoints lie in a folder each, named by its tag."""
WEIGHTS_ALONE = ("gguf", "npz")
"""Formats that hold a model's weights and nothing else."""
_READ_BY_TAG = (*TAGGED, "zero0")
"""Formats that are read from such a folder."""
TREES = ("dcp", "sharded", "torch", "orbax", "safetensors")
"""Formats in which model and optimizer lie in a tree. A safetensors file has one only with whole state."""


@dataclass(frozen=True, slots=True)
class Case:
    """The facts about a command that rules look at.

    ``target`` is the format that is written, for ``verify`` that of DST. ``has_masters`` says that the source keeps
    fp32 masters, ``keeps_both`` that the target keeps them beside the weights, ``has_state`` that optimizer state is
    written. ``reader_takes`` and ``writer_takes`` are options that the formats of plug-ins ask for.
    """

    source: str = ""
    target: str = ""
    is_tree: bool = False
    has_masters: bool = False
    keeps_both: bool = False
    has_state: bool = False
    has_destination: bool = False
    has_digests: bool = False
    has_key: bool = False
    is_printed: bool = False
    is_remote: bool = False
    reader_takes: tuple[str, ...] = ()
    writer_takes: tuple[str, ...] = ()

    @property
    def formats(self) -> str:
        """For messages: what is read, and what is written."""
        return f"this reads {self.source}" + (f" and writes {self.target}" if self.target else "")

    @property
    def reads_tag(self) -> bool:
        return self.source in _READ_BY_TAG or "tag" in self.reader_takes

    @property
    def reads_keys(self) -> bool:
        is_tree = self.source in TREES and (self.is_tree or self.source != "safetensors")
        return is_tree or bool({"model_key", "optim_key"} & {*self.reader_takes})

    def takes(self, option: str) -> bool:
        """Whether the format of a plug-in asks for ``option``."""
        return option in self.reader_takes or option in self.writer_takes


@dataclass(frozen=True, slots=True)
class Rule:
    """``options`` apply to ``what``, if ``applies`` says so; with ``value``, only that value is checked."""

    options: tuple[str, ...]
    applies: Callable[[Case], bool]
    what: str
    here: Callable[[Case], str]
    value: Any = None

    def check(self, given: Mapping[str, Any], case: Case) -> None:
        """Raises UsageError for an option that is given and does not apply."""
        for name in self.options:
            value = given.get(name)
            if value and self.value in (None, value) and not (self.applies(case) or case.takes(name)):
                raise UsageError(f"{option(name)} is for {spelled(self.what)}; {self.here(case)}")


def _listed(names: Iterable[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last}"


def _writes(case: Case) -> str:
    return f"this writes {case.target}"


def _formats(case: Case) -> str:
    return case.formats


_TAGS = Rule(
    ("tag",),
    lambda case: case.reads_tag or case.target in TAGGED,
    f"DeepSpeed's formats ({_listed(TAGGED)})",
    _formats,
)
_MODEL_KEY = Rule(
    ("model_key",),
    lambda case: case.reads_keys or case.target == "dcp",
    f"checkpoints that are trees ({_listed(TREES)} with whole state), and for writing dcp",
    _formats,
)
_OPTIM_KEY = Rule(
    ("optim_key",),
    lambda case: case.reads_keys or (case.target == "dcp" and case.has_state),
    f"checkpoints that are trees ({_listed(TREES)} with whole state), and for writing optimizer state to dcp",
    _formats,
)
_PARAM_ORDER = Rule(
    ("param_order",),
    lambda case: case.reads_keys,
    f"optimizers that number their parameters, in checkpoints that are trees ({_listed(TREES)} with whole state)",
    _formats,
)
_WEIGHTS = Rule(
    ("weights",),
    lambda case: not (case.has_masters and case.keeps_both),
    "outputs that hold one copy of each weight; choose {state:model}, or leave it out",
    lambda case: f"{case.target} keeps the fp32 masters and the model's weights",
    value="model",
)

READING = (_TAGS, _MODEL_KEY, _OPTIM_KEY, _PARAM_ORDER)
"""Of every command that reads one checkpoint, once its format is known."""

WRITING = (
    *READING,
    Rule(
        ("world_size",),
        lambda case: case.target in RANKED,
        f"formats that are written for a number of ranks ({_listed(RANKED)})",
        _writes,
    ),
    Rule(
        ("max_shard_size",),
        lambda case: case.target in SHARDED,
        f"formats that are cut into shards of a size ({_listed(SHARDED)})",
        _writes,
    ),
    Rule(
        ("config",),
        lambda case: case.target in SHARDED,
        f"folders that from_pretrained opens ({_listed(SHARDED)})",
        _writes,
    ),
    Rule(
        ("state",),
        lambda case: case.target not in WEIGHTS_ALONE,
        "formats that can hold a whole state",
        lambda case: f"{case.target} holds weights alone",
        value="all",
    ),
    _WEIGHTS,
)
"""Of ``convert`` and its like, once the formats are known."""

COMPARING = (*READING, _WEIGHTS)
"""Of ``verify`` with two checkpoints, once their formats are known."""

OF_TWO_COPIES = Rule(
    ("weights",),
    lambda case: not (case.has_masters and case.keeps_both),
    "checkpoints of which one alone keeps fp32 masters, or for {state:model}",
    lambda case: "here both keep them, and both copies are compared",
    value="model",
)
"""Of two checkpoints, or one and a list of digests; ``keeps_both`` says that masters are compared too."""

DIFFING = (*READING, OF_TWO_COPIES)
"""Of ``diff``, once both checkpoints are read."""

_CHOOSING = ("state", "weights", "include", "exclude", "rename", "key_map")

ARGUMENTS: Mapping[str, tuple[Rule, ...]] = {
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

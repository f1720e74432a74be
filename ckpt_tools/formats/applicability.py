"""Options that apply to some formats alone, as the formats themselves state."""

from __future__ import annotations

from collections.abc import Callable

from ckpt_tools.core.applicability import OF_TWO_COPIES, Case, Rule
from ckpt_tools.formats.base import Format
from ckpt_tools.formats.index import built_in


def _reading(name: str) -> Callable[[Format], bool]:
    return lambda form: name in form.reading_options


def _writing(name: str) -> Callable[[Format], bool]:
    return lambda form: name in form.writing_options


def _names(is_one: Callable[[Format], bool]) -> str:
    """The built-in formats for which ``is_one`` is true: ``dcp, megatron and sharded``."""
    *first, last = (form.name for form in built_in() if is_one(form))
    return f"{', '.join(first)} and {last}" if first else last


def _trees() -> str:
    return f"checkpoints that are trees ({_names(_reading('model_key'))}, if they hold one)"


def _writes(case: Case) -> str:
    return f"this writes {case.target}"


def _formats(case: Case) -> str:
    return f"this reads {case.source}" + (f" and writes {case.target}" if case.target else "")


_WEIGHTS = Rule(
    ("weights",),
    lambda case: not (case.has_masters and case.keeps_both),
    lambda: "outputs that hold one copy of each weight; choose {state:model}, or leave it out",
    lambda case: f"{case.target} keeps the fp32 masters and the model's weights",
    value="model",
)

READING = (
    Rule(
        ("tag",),
        lambda case: "tag" in (*case.reads, *case.writes),
        lambda: f"DeepSpeed's formats ({_names(_writing('tag'))})",
        _formats,
    ),
    Rule(
        ("model_key",),
        lambda case: "model_key" in (*case.reads, *case.writes),
        lambda: f"{_trees()}, and for writing {_names(_writing('model_key'))}",
        _formats,
    ),
    Rule(
        ("optim_key",),
        lambda case: "optim_key" in case.reads or ("optim_key" in case.writes and case.has_state),
        lambda: f"{_trees()}, and for writing optimizer state to {_names(_writing('optim_key'))}",
        _formats,
    ),
    Rule(
        ("param_order",),
        lambda case: "optim_key" in case.reads,
        lambda: f"optimizers that number their parameters, in {_trees()}",
        _formats,
    ),
)
"""Of every command that reads one checkpoint, once its format is known."""

WRITING = (
    *READING,
    Rule(
        ("world_size",),
        lambda case: "world_size" in case.writes,
        lambda: f"formats that are written for a number of ranks ({_names(_writing('world_size'))})",
        _writes,
    ),
    Rule(
        ("max_shard_size",),
        lambda case: "max_shard_size" in case.writes,
        lambda: f"formats that are cut into shards of a size ({_names(_writing('max_shard_size'))})",
        _writes,
    ),
    Rule(
        ("config",),
        lambda case: "config" in case.writes,
        lambda: f"folders that from_pretrained opens ({_names(_writing('config'))})",
        _writes,
    ),
    Rule(
        ("state",),
        lambda case: not case.is_weights_alone,
        lambda: "formats that can hold a whole state",
        lambda case: f"{case.target} holds weights alone",
        value="all",
    ),
    _WEIGHTS,
)
"""Of ``convert`` and its like, once the formats are known."""

COMPARING = (*READING, _WEIGHTS)
"""Of ``verify`` with two checkpoints, once their formats are known."""

DIFFING = (*READING, OF_TWO_COPIES)
"""Of ``diff``, once both checkpoints are read."""

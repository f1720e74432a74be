"""Options that apply to some formats alone, as the formats themselves state."""

from __future__ import annotations

from ckpt_tools.core.applicability import OF_RECIPES, OF_TWO_COPIES, Case, Rule
from ckpt_tools.formats.index import built_in


def _names(name: str, *, reading: bool = False) -> str:
    """The built-in formats that take the option ``name``: ``dcp, megatron and sharded``."""
    taken = ((form.name, form.reading_options if reading else form.writing_options) for form in built_in())
    *first, last = (form for form, options in taken if name in options)
    return f"{', '.join(first)} and {last}" if first else last


def _trees() -> str:
    return f"checkpoints that are trees ({_names('model_key', reading=True)}, if they hold one)"


def _written(name: str, formats: str) -> Rule:
    """The rule of an option for writing ``formats``, which are described in words."""
    return Rule(
        (name,),
        lambda case: name in case.writes,
        lambda: f"{formats} ({_names(name)})",
        lambda case: f"this writes {case.target}",
    )


def _formats(case: Case) -> str:
    return f"this reads {case.source}" + (f" and writes {case.target}" if case.target else "")


_WEIGHTS = Rule(
    ("weights",),
    lambda case: not (case.has_masters and case.keeps_both),
    lambda: "outputs that hold one copy of each weight; choose {state:model}, or leave it out",
    lambda case: f"{case.target} keeps the fp32 masters and the model's weights",
    value="model",
)

_CONFIG = Rule(
    ("config",),
    lambda case: "config" in case.writes or case.has_recipe,
    lambda: f"folders that from_pretrained opens ({_names('config')}), for sizes of a recipe, and for {{dequantize}}",
    lambda case: f"this writes {case.target}",
)

READING = (
    Rule(
        ("tag",),
        lambda case: "tag" in (*case.reads, *case.writes),
        lambda: f"DeepSpeed's formats ({_names('tag')})",
        _formats,
    ),
    Rule(
        ("model_key",),
        lambda case: "model_key" in (*case.reads, *case.writes),
        lambda: f"{_trees()}, and for writing {_names('model_key')}",
        _formats,
    ),
    Rule(
        ("optim_key",),
        lambda case: "optim_key" in case.reads or ("optim_key" in case.writes and case.has_state),
        lambda: f"{_trees()}, and for writing optimizer state to {_names('optim_key')}",
        _formats,
    ),
    Rule(
        ("param_order",),
        lambda case: "optim_key" in case.reads,
        lambda: f"optimizers that number their parameters, in {_trees()}",
        _formats,
    ),
)
"""Rules of every command that reads one checkpoint, checked once its format is known."""

WRITING = (
    *READING,
    _written("world_size", "formats that are written for a number of ranks"),
    _written("max_shard_size", "formats that are cut into shards of a size"),
    _CONFIG,
    Rule(
        ("state",),
        lambda case: not case.is_weights_alone,
        lambda: "formats that can hold a whole state",
        lambda case: f"{case.target} holds weights alone",
        value="all",
    ),
    _WEIGHTS,
)
"""Rules of ``convert`` and ``plan``, checked once the formats are known."""

COMPARING = (*READING, _WEIGHTS, _CONFIG)
"""Rules of ``verify`` with two checkpoints, checked once their formats are known."""

DIFFING = (*READING, OF_TWO_COPIES, OF_RECIPES)
"""Rules of ``diff``, checked once both checkpoints are read."""

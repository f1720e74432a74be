"""Options that apply to some formats alone, as the formats themselves state."""

from __future__ import annotations

from ckpt_tools.core.applicability import RECIPE_CONFIG_RULE, TWO_COPIES_RULE, ApplicabilityRule, OptionContext
from ckpt_tools.formats.index import built_in


def _names(name: str, *, reading: bool = False) -> str:
    """The built-in formats that take the option ``name``: ``dcp, megatron and sharded``."""
    taken = ((form.name, form.reading_options if reading else form.writing_options) for form in built_in())
    *first, last = (form for form, options in taken if name in options)
    return f"{', '.join(first)} and {last}" if first else last


def _trees() -> str:
    return f"checkpoints that are trees ({_names('model_key', reading=True)}, if they hold one)"


def _written(name: str, formats: str) -> ApplicabilityRule:
    """The rule of an option for writing ``formats``, which are described in words."""
    return ApplicabilityRule(
        (name,),
        lambda case: name in case.writer_options,
        lambda: f"{formats} ({_names(name)})",
        lambda case: f"this writes {case.target_format}",
    )


def _formats(case: OptionContext) -> str:
    return f"this reads {case.source_format}" + (f" and writes {case.target_format}" if case.target_format else "")


_WEIGHTS = ApplicabilityRule(
    ("weights",),
    lambda case: not (case.has_masters and case.keeps_both_copies),
    lambda: "outputs that hold one copy of each weight; choose {state:model}, or leave it out",
    lambda case: f"{case.target_format} keeps the fp32 masters and the model's weights",
    checked_value="model",
)

_CONFIG = ApplicabilityRule(
    ("config",),
    lambda case: "config" in case.writer_options or case.has_recipe,
    lambda: f"folders that from_pretrained opens ({_names('config')}), for sizes of a recipe, and for {{dequantize}}",
    lambda case: f"this writes {case.target_format}",
)

READING = (
    ApplicabilityRule(
        ("tag",),
        lambda case: "tag" in (*case.reader_options, *case.writer_options),
        lambda: f"DeepSpeed's formats ({_names('tag')})",
        _formats,
    ),
    ApplicabilityRule(
        ("model_key",),
        lambda case: "model_key" in (*case.reader_options, *case.writer_options),
        lambda: f"{_trees()}, and for writing {_names('model_key')}",
        _formats,
    ),
    ApplicabilityRule(
        ("optim_key",),
        lambda case: "optim_key" in case.reader_options or ("optim_key" in case.writer_options and case.has_state),
        lambda: f"{_trees()}, and for writing optimizer state to {_names('optim_key')}",
        _formats,
    ),
    ApplicabilityRule(
        ("param_order",),
        lambda case: "optim_key" in case.reader_options,
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
    ApplicabilityRule(
        ("state",),
        lambda case: not case.is_weights_alone,
        lambda: "formats that can hold a whole state",
        lambda case: f"{case.target_format} holds weights alone",
        checked_value="all",
    ),
    _WEIGHTS,
)
"""Rules of ``convert`` and ``plan``, checked once the formats are known."""

COMPARING = (*READING, _WEIGHTS, _CONFIG)
"""Rules of ``verify`` with two checkpoints, checked once their formats are known."""

DIFFING = (*READING, TWO_COPIES_RULE, RECIPE_CONFIG_RULE)
"""Rules of ``diff``, checked once both checkpoints are read."""

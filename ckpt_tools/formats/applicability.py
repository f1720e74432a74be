"""Options that apply to some formats alone, as the formats themselves state."""

from __future__ import annotations

from ckpt_tools.core.applicability import RECIPE_CONFIG_RULE, TWO_COPIES_RULE, ApplicabilityRule, OptionContext
from ckpt_tools.formats.builtin import FORMATS


def _list_formats_taking(option_name: str, *, for_reading: bool = False) -> str:
    """The built-in formats that take the option ``option_name``: ``dcp, megatron and sharded``."""
    taken = ((form.name, form.reading_options if for_reading else form.writing_options) for form in FORMATS.values())
    *first, last = (form for form, options in taken if option_name in options)
    return f"{', '.join(first)} and {last}" if first else last


def _describe_tree_formats() -> str:
    return f"checkpoints that are trees ({_list_formats_taking('model_key', for_reading=True)}, if they hold one)"


def _make_writing_rule(option_name: str, formats: str) -> ApplicabilityRule:
    """The rule of an option for writing ``formats``, which are described in words."""
    return ApplicabilityRule(
        (option_name,),
        lambda case: option_name in case.writer_options,
        lambda: f"{formats} ({_list_formats_taking(option_name)})",
        lambda case: f"this writes {case.target_format}",
    )


def _describe_formats(case: OptionContext) -> str:
    return f"this reads {case.source_format}" + (f" and writes {case.target_format}" if case.target_format else "")


_WEIGHTS_RULE = ApplicabilityRule(
    ("weights",),
    lambda case: not (case.has_masters and case.keeps_both_copies),
    lambda: "outputs that hold one copy of each weight; choose {state:model}, or leave it out",
    lambda case: f"{case.target_format} keeps the fp32 masters and the model's weights",
    checked_value="model",
)

_CONFIG_RULE = ApplicabilityRule(
    ("config",),
    lambda case: "config" in case.writer_options or case.has_recipe,
    lambda: (
        f"folders that from_pretrained opens ({_list_formats_taking('config')}), for sizes of a recipe, and for "
        f"{{dequantize}}"
    ),
    lambda case: f"this writes {case.target_format}",
)

_QUANTIZE_RULE = ApplicabilityRule(
    ("quantize",),
    lambda case: "quantize" in case.writer_options,
    "folders of safetensors, which loaders of quantized models read",
    lambda case: f"this writes {case.target_format}",
)

READING_RULES = (
    ApplicabilityRule(
        ("tag",),
        lambda case: "tag" in (*case.reader_options, *case.writer_options),
        lambda: f"DeepSpeed's formats ({_list_formats_taking('tag')})",
        _describe_formats,
    ),
    ApplicabilityRule(
        ("model_key",),
        lambda case: "model_key" in (*case.reader_options, *case.writer_options),
        lambda: f"{_describe_tree_formats()}, and for writing {_list_formats_taking('model_key')}",
        _describe_formats,
    ),
    ApplicabilityRule(
        ("optim_key",),
        lambda case: "optim_key" in case.reader_options or ("optim_key" in case.writer_options and case.has_state),
        lambda: f"{_describe_tree_formats()}, and for writing optimizer state to {_list_formats_taking('optim_key')}",
        _describe_formats,
    ),
    ApplicabilityRule(
        ("param_order",),
        lambda case: "optim_key" in case.reader_options,
        lambda: f"optimizers that number their parameters, in {_describe_tree_formats()}",
        _describe_formats,
    ),
)
"""Rules of every command that reads one checkpoint, checked once its format is known."""

WRITING_RULES = (
    *READING_RULES,
    _make_writing_rule("world_size", "formats that are written for a number of ranks"),
    _make_writing_rule("max_shard_size", "formats that are cut into shards of a size"),
    _CONFIG_RULE,
    _QUANTIZE_RULE,
    ApplicabilityRule(
        ("state",),
        lambda case: not case.is_weights_alone,
        lambda: "formats that can hold a whole state",
        lambda case: f"{case.target_format} holds weights alone",
        checked_value="all",
    ),
    _WEIGHTS_RULE,
)
"""Rules of ``convert`` and ``plan``, checked once the formats are known."""

COMPARING_RULES = (*READING_RULES, _WEIGHTS_RULE, _CONFIG_RULE, _QUANTIZE_RULE)
"""Rules of ``verify`` with two checkpoints, checked once their formats are known."""

DIFFING_RULES = (*READING_RULES, TWO_COPIES_RULE, RECIPE_CONFIG_RULE)
"""Rules of ``diff``, checked once both checkpoints are read."""

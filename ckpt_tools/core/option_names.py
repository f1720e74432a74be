"""Options by name: the values that are accepted, the defaults, and how a message spells them.

The command line and the functions of the API both take them from here. This module imports nothing that costs time.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, TypeAlias, get_args

WrittenFormat: TypeAlias = Literal[
    "safetensors",
    "torch",
    "dcp",
    "zero1",
    "zero2",
    "zero3",
    "universal",
    "sharded",
    "megatron",
    "meta",
    "gguf",
    "npz",
    "peft",
]
"""What ``to`` accepts."""
ReadFormat: TypeAlias = Literal[
    "dcp",
    "universal",
    "deepspeed",
    "safetensors",
    "torch",
    "zero1",
    "zero2",
    "zero3",
    "sharded",
    "megatron",
    "meta",
    "gguf",
    "npz",
    "orbax",
    "nanotron",
    "peft",
]
"""What ``from_`` accepts; ``deepspeed`` is any ZeRO stage."""
State: TypeAlias = Literal["model", "all"]
Weights: TypeAlias = Literal["master", "model"]
DTypeName: TypeAlias = Literal["float32", "bfloat16", "float16"]
FormatAlias: TypeAlias = Literal["hf", "fsdp2", "pt"]
DTypeAlias: TypeAlias = Literal["fp32", "bf16", "fp16"]
Quantization: TypeAlias = Literal["fp8-block", "fp8", "int8"]
Runner: TypeAlias = Literal["threads", "ray"]
Io: TypeAlias = Literal["auto", "direct", "buffered"]

READ_FORMATS: tuple[str, ...] = get_args(ReadFormat)
WRITTEN_FORMATS: tuple[str, ...] = get_args(WrittenFormat)
STATES: tuple[str, ...] = get_args(State)
WEIGHTS: tuple[str, ...] = get_args(Weights)
"""The copies of a weight: the fp32 master of the optimizer, or the model's own."""
DTYPE_NAMES: tuple[str, ...] = get_args(DTypeName)
"""The dtypes that weights can be cast to."""
QUANTIZATIONS: tuple[str, ...] = get_args(Quantization)
OPTION_VALUE_ALIASES: Mapping[str, Mapping[str, str]] = {
    "dtype": {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"},
    "to": {"hf": "safetensors", "fsdp2": "dcp", "pt": "torch"},
    "from_": {"hf": "safetensors", "fsdp2": "dcp", "pt": "torch"},
}
"""Short values by option. Reports have the name that each stands for."""
RUNNERS: tuple[str, ...] = get_args(Runner)
IO_MODES: tuple[str, ...] = get_args(Io)
"""Where tasks run: in threads of this process, or in processes of a Ray cluster."""

DEFAULT_WEIGHTS: Weights = "master"
DEFAULT_MEMORY = "512MiB"
DEFAULT_RUNNER: Runner = "threads"
DEFAULT_IO: Io = "auto"
DEFAULT_POLL_SECONDS = 10.0

_POSITIONAL_ARGUMENTS = {"src": "SRC", "dst": "DST", "run": "RUN", "a": "A", "b": "B", "url": "URL"}
_POSITIONAL_ARGUMENTS |= {
    "base": "BASE",
    "adapter": "ADAPTER",
    "sources": "SRC",
    "old": "OLD",
    "new": "NEW",
    "out": "OUT",
}
"""Parameters that are places, given without a flag."""
_IRREGULAR_FLAGS = {
    "from_": "--from",
    "storage_options": "--storage-option",
    "adapter_name": "--adapter",
    "optimizer_file": "--optimizer",
    "tensors": "inspect --tensors",
    "name": "NAME",
}
"""Flags that are not named as their parameter is."""
_PYTHON_SPELLINGS = {"tensors": "inspect(...).tensors"}
"""What Python has in the place of an option of the command line."""


def resolve_alias(name: str | None, value: Any) -> Any:
    """``value`` of the parameter ``name``; if it is an alias, the value that it stands for."""
    return OPTION_VALUE_ALIASES.get(name or "", {}).get(value, value) if isinstance(value, str) else value


def format_with_aliases(name: str, values: Iterable[str]) -> str:
    """``values`` of the option ``name`` as a help lists them: ``safetensors (hf), torch (pt), zero1``."""
    alias_by_value = {long: alias for alias, long in OPTION_VALUE_ALIASES[name].items()}
    return ", ".join(f"{value} ({alias_by_value[value]})" if value in alias_by_value else value for value in values)


_is_command_line = False
"""How messages spell options. It is of the process and not of a thread: worker threads raise errors too."""


@contextmanager
def use_command_line_spelling() -> Iterator[None]:
    """While the block runs, messages spell options as the command line does."""
    global _is_command_line
    before, _is_command_line = _is_command_line, True
    try:
        yield
    finally:
        _is_command_line = before


def is_location(name: str) -> bool:
    """Whether the parameter ``name`` is a path or URL of a checkpoint or run, and has no flag on the command line."""
    return name in _POSITIONAL_ARGUMENTS


def format_flag(name: str) -> str:
    """The parameter ``name`` as the command line spells it: ``--max-shard-size``, or ``DST`` for an argument."""
    return _POSITIONAL_ARGUMENTS.get(name) or _IRREGULAR_FLAGS.get(name) or f"--{name.replace('_', '-')}"


def format_option(name: str, value: object = None) -> str:
    """The parameter ``name``, with a value if there is one, as the reader of a message types it.

    Python callers read ``weights='model'``, users of the command line ``--weights model``.
    """
    return _format_for_command_line(name, value) if _is_command_line else _format_for_python(name, value)


def expand_option_template(template: str) -> str:
    """``template`` with ``{weights}`` and ``{weights:model}`` as ``format_option`` gives them."""
    return re.sub(r"\{(\w+)(?::([^}]+))?\}", lambda match: format_option(match[1], match[2]), template)


def _format_for_python(name: str, value: object) -> str:
    if name in _POSITIONAL_ARGUMENTS or name in _PYTHON_SPELLINGS:
        return _PYTHON_SPELLINGS.get(name, name)
    if value is None:
        return f"{name}="
    return f"{name}={value if isinstance(value, int | Mapping) else str(value)!r}"


def _format_for_command_line(name: str, value: object) -> str:
    if value is None or value is True:
        return format_flag(name)
    if isinstance(value, Mapping):
        return " ".join(_format_for_command_line(name, f"{key}={each}") for key, each in value.items())
    from shlex import quote

    return f"{format_flag(name)} {quote(str(value))}"

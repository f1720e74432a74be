"""Models to serve and the options of each: ``--model NAME=URL``, and tables of a TOML file."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ckpt_tools.errors import FormatError, SourceNotFoundError, StoreError, UsageError
from ckpt_tools.process.text_files import read_text

from ..models.options import DEFAULT_OPTIONS, ModelOptions

MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
DEFAULT_NAME = "model"

TEXT, NUMBER, FLAG, TEXTS = "a text", "a number", "true or false", "a list of texts"

KINDS: Mapping[str, str] = {
    **dict.fromkeys(("architecture", "device", "dtype", "exact", "model_key", "key_map", "recipe", "config"), TEXT),
    **dict.fromkeys(("max_batch", "max_new_tokens", "max_pixels"), NUMBER),
    **dict.fromkeys(("embeddings", "inverse", "dequantize"), FLAG),
    **dict.fromkeys(("include", "exclude", "rename"), TEXTS),
}
"""Options of a model, and their values."""


@dataclass(frozen=True, slots=True)
class NamedSource:
    """``NAME=URL`` of the command line, and how it is loaded. Several with one name are versions of one model."""

    name: str
    url: str
    options: ModelOptions = DEFAULT_OPTIONS


def parse_source(text: str, options: ModelOptions) -> NamedSource:
    """The model of ``[NAME=]URL``. A path that exists is a path, also with ``=`` in it. Raises UsageError."""
    name, equals, url = text.partition("=")
    if Path(text).exists():
        return NamedSource(DEFAULT_NAME, text, options)
    if equals and not (name and url):
        raise UsageError(f"--model {text} has an empty {'URL' if name else 'NAME'}; it is NAME=URL")
    has_name = equals and MODEL_NAME.fullmatch(name)
    return NamedSource(name, url, options) if has_name else NamedSource(DEFAULT_NAME, text, options)


def read_sources(file: Path, defaults: ModelOptions) -> list[NamedSource]:
    """The model of each table of a TOML file: ``url``, and options. Raises SourceNotFoundError, StoreError or
    FormatError if it cannot be read. UsageError for anything else in it."""
    try:
        tables = tomllib.loads(read_text(file))
    except FileNotFoundError as error:
        raise SourceNotFoundError(f"--models: there is no file {file}") from error
    except OSError as error:
        raise StoreError(f"--models: {file} cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise FormatError(f"--models: {file} is not TOML ({error})") from error
    return [_read_table(name, table, defaults, f"--models {file}, {name}") for name, table in tables.items()]


def _read_table(name: str, table: object, defaults: ModelOptions, where: str) -> NamedSource:
    if not isinstance(table, dict) or not isinstance(table.get("url"), str):
        raise UsageError(f"{where} is not a table with a url")
    if not MODEL_NAME.fullmatch(name):
        raise UsageError(f"{where} is not a name of a model, which has letters, digits, ., _ and -")
    given = {key: value for key, value in table.items() if key != "url"}
    for key, value in given.items():
        if key not in KINDS:
            raise UsageError(f"{where}: {key!r} is not an option of a model; there are {', '.join(KINDS)}")
        if not _is_of_kind(KINDS[key], value):
            raise UsageError(f"{where}: {key} is {KINDS[key]}, not {value!r}")
    reading: dict[str, Any] = {
        key: tuple(value) if KINDS[key] == TEXTS else value for key, value in _select_options(given, defaults.reading)
    }
    try:
        options = replace(
            defaults, reading=replace(defaults.reading, **reading), **dict(_select_options(given, defaults))
        )
    except UsageError as error:
        raise UsageError(f"{where}: {error.message}") from error
    return NamedSource(name, table["url"], options)


def _select_options(given: Mapping[str, Any], holder: Any) -> Iterable[tuple[str, Any]]:
    return ((key, value) for key, value in given.items() if key in holder.__dataclass_fields__)


def _is_of_kind(kind: str, value: object) -> bool:
    if kind == TEXTS:
        return isinstance(value, list) and all(isinstance(each, str) for each in value)
    return type(value) is {TEXT: str, NUMBER: int, FLAG: bool}[kind]

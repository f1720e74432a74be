"""Bundled configuration files, and ``--config``: a TOML file whose keys are spelled like the options."""

from __future__ import annotations

import tomllib
from importlib.resources import files
from pathlib import Path
from typing import Any

import click

from . import PACKAGE

CONFIGS = "configs"
SUFFIX = ".toml"


def shipped(suffix: str) -> list[str]:
    """Names of the bundled files with that ending."""
    found = files(PACKAGE).joinpath(CONFIGS).iterdir()
    return sorted(entry.name.removesuffix(suffix) for entry in found if entry.name.endswith(suffix))


def shipped_text(name: str) -> str:
    """Content of a bundled file."""
    return files(PACKAGE).joinpath(CONFIGS, name).read_text()


def read_defaults(context: click.Context, parameter: click.Parameter, value: str | None) -> None:
    """Make the file's options the defaults of the command line. Raises ``click.BadParameter``."""
    if not value:
        return  # the command refuses an empty name
    given = _parsed(value)
    known = {option.name: option for option in context.command.params if option is not parameter}
    for key in given:
        if key.replace("-", "_") not in known or "_" in key:
            raise click.BadParameter(f"{value}: {key} is not an option of a run")
    context.default_map = {key.replace("-", "_"): entry for key, entry in given.items()}


def _parsed(value: str) -> dict[str, Any]:
    try:
        return tomllib.loads(shipped_text(value + SUFFIX) if value in shipped(SUFFIX) else Path(value).read_text())
    except OSError as error:
        names = ", ".join(shipped(SUFFIX))
        raise click.BadParameter(f"{value} is not a file that can be read, nor one of {names}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise click.BadParameter(f"{value} is not TOML: {error}") from error

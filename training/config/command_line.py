"""Command line of a run: options from words and a ``--config`` file, and a check of the installed libraries."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, Field
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import click

from ckpt_tools.arguments import check_has_scheme, check_not_empty
from ckpt_tools.errors import CkptError, UsageError
from ckpt_tools.messages.help_text import GroupedCommand
from ckpt_tools.process.credentials import mask_output, mask_raised_errors, remember_secrets, remember_secrets_in_words
from ckpt_tools.process.text_files import read_text

from . import PACKAGE
from .model_names import folder_of
from .options import Option, describe_options, option_name
from .references import format_arguments, make_path_absolute
from .train_config import REFERENCES, TrainConfig

CONFIGS = "configs"
SUFFIX = ".toml"


def bundled_names(suffix: str) -> list[str]:
    entries = files(PACKAGE).joinpath(CONFIGS).iterdir()
    return sorted(entry.name.removesuffix(suffix) for entry in entries if entry.name.endswith(suffix))


def read_bundled(name: str) -> str:
    return files(PACKAGE).joinpath(CONFIGS, name).read_text()


def read_defaults(context: click.Context, parameter: click.Parameter, value: str | None) -> None:
    """Make the file's options the defaults of the command line. Raises ``click.BadParameter``."""
    if not value:
        return  # the command refuses an empty name
    entries = _parse_file(value)
    remember_secrets(entries.values())
    known: dict[str, Any] = {str(each.name): each for each in context.command.params if each is not parameter}
    for key in entries:
        if key.replace("-", "_") not in known or "_" in key:
            raise click.BadParameter(f"{value}: {key} is not an option of a run")
    context.default_map = {
        key.replace("-", "_"): _as_typed(value, key, entry, is_repeatable=known[key.replace("-", "_")].multiple)
        for key, entry in entries.items()
    }


def _as_typed(file: str, key: str, entry: Any, *, is_repeatable: bool) -> str | list[str]:
    """The entry as it would be typed, which click then checks as the command line. Raises ``click.BadParameter``."""
    if isinstance(entry, dict) and is_repeatable:
        return format_arguments(entry)
    if isinstance(entry, list) != is_repeatable or isinstance(entry, dict):
        raise click.BadParameter(f"{file}: {key} is {'a list' if is_repeatable else 'one value'}, not {entry!r}")
    return list(map(str, entry)) if is_repeatable else str(entry)


def _parse_file(value: str) -> dict[str, Any]:
    try:
        return tomllib.loads(read_bundled(value + SUFFIX) if value in bundled_names(SUFFIX) else read_text(Path(value)))
    except OSError as error:
        names = ", ".join(bundled_names(SUFFIX))
        raise click.BadParameter(f"{value} is not a file that can be read, nor one of {names}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise click.BadParameter(f"{value} is not TOML: {error}") from error


CONTEXT_SETTINGS = {"show_default": True}
CONTEXT_BEFORE_OPTIONS = CONTEXT_SETTINGS | {"ignore_unknown_options": True}
"""Context of a command whose last argument is the options of a run."""


class CheckedCommand(GroupedCommand):
    """A command that refuses empty values, on the command line and in its ``--config`` file, and shows no credential.
    The values are checked as text, because ``click.Path(path_type=Path)`` turns an empty one into the current folder.
    """

    def main(self, *args: Any, **settings: Any) -> Any:
        mask_output()
        return super().main(*args, **settings)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        words = list(args)
        rest = super().parse_args(ctx, args)
        typed, _, _ = self.make_parser(ctx).parse_args(words)
        try:
            for each in self.params:
                name, is_argument = str(each.name), isinstance(each, click.Argument)
                label = name.upper() if is_argument else max(each.opts, key=len)
                for values in (typed, ctx.default_map or {}):
                    check_not_empty(label, values.get(name), is_required=is_argument)
        except UsageError as error:
            raise click.UsageError(error.message, ctx) from error
        return rest

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """Messages of click repeat what was typed."""
        remember_secrets_in_words(args)
        with mask_raised_errors():
            return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        """Errors of ``ckpt_tools`` end the command with one sentence and their exit code."""
        try:
            return super().invoke(ctx)
        except CkptError as error:
            click.echo(f"Error: {error}", err=True)
            sys.exit(error.exit_code)


def make_click_options() -> list[click.Parameter]:
    file = click.Option(
        ["--config"],
        metavar="FILE|NAME",
        callback=read_defaults,
        is_eager=True,
        expose_value=False,
        help="TOML file of options, or the name of a bundled file, such as full_shard; the command line wins.",
    )
    return [file, *(_run_option(*each) for each in describe_options())]


def _run_option(field: Field[Any], kind: Any, option: Option) -> click.Option:
    default: dict[str, Any] = {"required": True} if field.default is MISSING else {"default": field.default}
    return click.Option(
        [f"--{option_name(field.name)}"],
        is_flag=kind is bool or None,  # with False, click takes an option without its value for a flag
        type=_click_type(kind),
        metavar=option.metavar,
        help=option.help,
        **({"multiple": True} if get_origin(kind) is tuple else default),
    )


def _click_type(kind: Any) -> Any:
    if get_origin(kind) is Literal:
        return click.Choice(get_args(kind))
    if kind is Path:
        return click.Path(path_type=Path)
    return str if get_origin(kind) is tuple else kind


def config_of(options: dict[str, Any]) -> TrainConfig:
    """The run with these options; relative paths are those of the current folder. Raises ``UsageError``."""
    check_has_scheme(options["out"])
    paths = {name: options[name].absolute() for name in ("out", "data_root", "deepspeed_config") if options[name]}
    if options["init_from"] and "://" not in options["init_from"]:
        paths["init_from"] = str(Path(options["init_from"]).expanduser().absolute())
    functions = {name: make_path_absolute(options[name]) for name in REFERENCES if name != "callback"}
    functions["callback"] = tuple(map(make_path_absolute, options["callback"]))
    return TrainConfig(**(options | paths | functions))


def parse_options(words: Sequence[str]) -> dict[str, Any]:
    """Values of the options of a run. Raises ``click.ClickException``."""
    return CheckedCommand("training", params=make_click_options()).make_context("training", list(words)).params


INSTALL = "pip install 'ckpt-tools[train]'"
DISTRIBUTIONS = {"sklearn": "scikit-learn"}  # names to install, where they differ from the module


def check_installed(config: TrainConfig) -> None:
    """Raises ``UsageError`` with the command that installs what is missing."""
    needed = {
        "ray": config.launcher == "ray",
        "pyarrow": config.launcher == "ray",
        "deepspeed": config.sharding.framework == "deepspeed",
        "sklearn": config.dataset == "digits",
        "transformers": folder_of(config.model) is not None,
        "peft": bool(config.lora),
        "tensorboardX": config.tensorboard,
    }
    check_modules(["torch", "torchvision", *(name for name, is_needed in needed.items() if is_needed)])


def check_modules(names: Iterable[str]) -> None:
    """Raises ``UsageError`` as :func:`check_installed`."""
    missing = [DISTRIBUTIONS.get(name, name) for name in names if not _is_installed(name)]
    if missing:
        raise UsageError(f"this run needs {', '.join(missing)}, not installed here; install with: {INSTALL}")


def _is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ImportError:
        return False

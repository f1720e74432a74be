"""Command line of a run: its options, parsed from words and from a ``--config`` file."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import MISSING
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import click

from ckpt_tools.arguments import check_not_empty
from ckpt_tools.errors import CkptError, UsageError

from .config_files import read_defaults
from .options import described, spelt
from .train_config import TrainConfig

CONTEXT = {"show_default": True, "help_option_names": ["-h", "--help"]}
CONTEXT_BEFORE_OPTIONS = CONTEXT | {"ignore_unknown_options": True}
"""Context of a command whose last argument is the options of a run."""


class Command(click.Command):
    """A command that refuses empty values, on the command line and in its ``--config`` file.

    The values are checked as text, because ``click.Path(path_type=Path)`` turns an empty one into the current folder.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        words = list(args)
        rest = super().parse_args(ctx, args)
        typed, _, _ = self.make_parser(ctx).parse_args(words)
        try:
            for label, name, is_required in self._parameters():
                for given in (typed, ctx.default_map or {}):
                    check_not_empty(label, given.get(name), is_required=is_required)
        except UsageError as error:
            raise click.UsageError(error.message, ctx) from error
        return rest

    def invoke(self, ctx: click.Context) -> Any:
        """Errors of ``ckpt_tools`` end the command with one sentence and their exit code."""
        try:
            return super().invoke(ctx)
        except CkptError as error:
            click.echo(f"error: {error}", err=True)
            sys.exit(error.exit_code)

    def _parameters(self) -> Iterator[tuple[str, str, bool]]:
        """Spelling and name of each parameter, and whether it is an argument."""
        for each in self.params:
            is_argument = isinstance(each, click.Argument)
            label = str(each.name).upper() if is_argument else max(each.opts, key=len)
            yield label, str(each.name), is_argument


def run_options() -> list[click.Parameter]:
    """The options of ``ckpt-tools train``."""
    file = click.Option(
        ["--config"],
        metavar="FILE|NAME",
        callback=read_defaults,
        is_eager=True,
        expose_value=False,
        help="TOML file of options, or the name of a bundled file, such as full_shard; the command line wins.",
    )
    return [file, *_run_options()]


def _run_options() -> Iterator[click.Option]:
    for field, kind, option in described():
        default: dict[str, Any] = {"required": True} if field.default is MISSING else {"default": field.default}
        if get_origin(kind) is tuple:
            default = {"multiple": True}
        yield click.Option(
            [f"--{spelt(field.name)}"],
            is_flag=kind is bool,
            type=_click_type(kind, option.choices),
            metavar=option.metavar,
            help=option.help,
            **default,
        )


def _click_type(kind: Any, choices: Sequence[str]) -> Any:
    if choices or get_origin(kind) is Literal:
        return click.Choice(choices or get_args(kind))
    if kind is Path:
        return click.Path(path_type=Path)
    return str if get_origin(kind) is tuple else kind


def config_of(options: dict[str, Any]) -> TrainConfig:
    """The run with these options; relative paths are those of the current folder. Raises ``UsageError``."""
    paths = {name: options[name].absolute() for name in ("out", "data_root", "deepspeed_config") if options[name]}
    return TrainConfig(**(options | paths))


def parsed(words: Sequence[str]) -> dict[str, Any]:
    """Values of the options of a run. Raises ``click.ClickException``."""
    return Command("training", params=run_options()).make_context("training", list(words)).params

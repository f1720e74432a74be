"""Options of the command line: those of the table in ``core.options``, and what commands share about printing."""

from __future__ import annotations

from collections.abc import Callable, Container
from functools import wraps
from typing import Any, TypeVar, cast

import click

from ckpt_tools.cli import reporting
from ckpt_tools.cli.reporting import PROGRESS_MODES, is_typed, store_progress_mode
from ckpt_tools.core.option_names import (
    DEFAULT_IO,
    DEFAULT_RUNNER,
    DTYPE_NAMES,
    IO_MODES,
    QUANTIZATIONS,
    RUNNERS,
    STATES,
    WEIGHTS,
    format_flag,
    resolve_alias,
)
from ckpt_tools.core.options import NAMES, OUTPUT, READING, RUNNING, SAFETY, ConvertRequest
from ckpt_tools.errors import UsageError
from ckpt_tools.messages.help_text import GroupedCommand, Headings

Decorated = TypeVar("Decorated", bound=Callable[..., Any])

TABLE = {name: each for name, each in ConvertRequest.__dataclass_fields__.items() if "text" in each.metadata}
"""The options of conversions by parameter, as ``core.options`` describes them."""


def _list_names_under(heading: str) -> tuple[str, ...]:
    return tuple(name for name, each in TABLE.items() if each.metadata["text"].heading == heading)


HEADINGS: Headings = {
    READING: (*_list_names_under(READING), "against"),
    "What is averaged": ("coefficients", "decay"),
    NAMES: _list_names_under(NAMES),
    "What stays": ("keep_last", "keep_every", "keep_best", "healthy"),
    "Which checkpoints": ("steps", "last", "every", "follow", "until", "poll", "then"),
    OUTPUT: (
        *("to", *_list_names_under(OUTPUT), "output", "tensors", "tree", "depth", "stats", "sample", "slot", "top"),
        *("script", "list_all", "form", "shows_card", "as_json"),
    ),
    RUNNING: (*_list_names_under(RUNNING), "progress", "quiet", "verbose", "log_format", "help"),
    SAFETY: (
        *(
            "dry_run",
            "yes",
            *_list_names_under(SAFETY),
            "incomplete",
            "allow_less",
            "allow",
            "allow_configuration",
            "ignore",
        ),
        *("digests", "public_key", "private_key", "signature"),
    ),
}
"""Parameters by heading of the help: those of the table, and those of single commands."""


class ConverterCommand(GroupedCommand):
    """A command of the converter."""

    headings = HEADINGS


class DTypeChoice(click.Choice[str]):
    """The dtypes of ``--dtype``, and their aliases."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return super().convert(resolve_alias("dtype", value), param, ctx)


def combine_decorators(*decorators: Callable[[Any], Any]) -> Callable[[Decorated], Decorated]:
    """One decorator for several options, in their order."""

    def decorate(command: Decorated) -> Decorated:
        for decorator in reversed(decorators):
            command = decorator(command)
        return command

    return decorate


def _parse_pairs(context: click.Context, option: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    pairs = [each.partition("=") for each in values]
    for name, equals, _ in pairs:
        if not name or not equals:
            raise click.BadParameter("it is not KEY=VALUE")
    names = [name for name, _, _ in pairs]
    for name in names:
        if names.count(name) > 1:
            raise click.BadParameter(f"{name!r} is given twice")
    return {name: value for name, _, value in pairs}


_CLICK_SETTINGS: dict[object, dict[str, Any]] = {
    "bool": {"is_flag": True},
    "int | None": {"type": click.IntRange(min=1)},
    "Sequence[str]": {"multiple": True},
    "Mapping[str, Any] | None": {"multiple": True, "callback": _parse_pairs},
    "State | None": {"type": click.Choice(STATES)},
    "Weights | None": {"type": click.Choice(WEIGHTS)},
    "DTypeLike | None": {"type": DTypeChoice(DTYPE_NAMES)},
    "Quantization | None": {"type": click.Choice(QUANTIZATIONS)},
    "Runner": {"type": click.Choice(RUNNERS), "default": DEFAULT_RUNNER, "show_default": True},
    "Io": {"type": click.Choice(IO_MODES), "default": DEFAULT_IO, "show_default": True},
}
"""How click parses an option, by the annotation of its field. Others are texts, and paths if they stand for a file."""


def number_list_option(
    name: str, metavar: str, convert: Callable[[str], float], example: str, help_text: str
) -> Callable[[Decorated], Decorated]:
    """An option of numbers with commas between them, a tuple; empty without the option."""

    def parse_numbers(context: click.Context, option: click.Parameter, text: str | None) -> tuple[float, ...]:
        try:
            return () if text is None else tuple(map(convert, text.split(",")))
        except ValueError:
            raise click.BadParameter(f"{text!r} is not a list of numbers such as {example}") from None

    return click.option(name, metavar=metavar, callback=parse_numbers, help=help_text)


def option_of(name: str, help_text: str = "", **settings: Any) -> Callable[[Decorated], Decorated]:
    """The option of the parameter ``name``, as the table describes it; ``help_text`` stands in place of its help."""
    text = TABLE[name].metadata["text"]
    path_type = {"type": click.Path()} if text.metavar == "FILE" else {}
    return click.option(
        format_flag(name),
        name,
        metavar=text.metavar,
        help=help_text or text.help,
        **{**path_type, **_CLICK_SETTINGS.get(TABLE[name].type, {}), **settings},
    )


def options_of(*keywords: type, without: Container[str] = (), **help_texts: str) -> Callable[[Decorated], Decorated]:
    """The options for all keywords of TypedDicts of ``core.options``; ``help_texts`` stand in place of their help."""
    names = [name for each in keywords for name in each.__annotations__ if name in TABLE and name not in without]
    return combine_decorators(*(option_of(name, help_texts.get(name, "")) for name in names))


source_argument = click.argument("src", metavar="SRC")

SIZES_CONFIG_HELP = (
    "The folder of config.json, for the sizes of a recipe and for --dequantize. Default: beside the source."
)
"""Of ``config`` in commands that write no files of a model."""

DEFAULT_TOP = 20
"""As many differences fit on a screen with their summary."""


def _resolve_top(command: Decorated) -> Decorated:
    """Give the command ``top``: how many differences it lists, None for all."""

    @wraps(command)
    def run(*, top: int | None, list_all: bool, **keywords: Any) -> Any:
        if top is not None and list_all:
            context = click.get_current_context()
            is_typed_by_option = [is_typed(context, name) for name in ("top", "list_all")]
            if all(is_typed_by_option):
                raise click.UsageError("--top and --all cannot be combined: --all lists every difference", context)
            list_all = is_typed_by_option != [True, False]
        return command(top=None if list_all else top or DEFAULT_TOP, **keywords)

    return cast("Decorated", run)


listing_options = combine_decorators(
    click.option(
        "--top",
        type=click.IntRange(min=1),
        metavar="N",
        help=f"List the N largest differences. Default: {DEFAULT_TOP}.",
    ),
    click.option("--all", "list_all", is_flag=True, help="List every difference."),
    _resolve_top,
)


def form_option(*names: str) -> Callable[[Decorated], Decorated]:
    """Give the command ``form``, one of ``names``. The first is the default."""

    def decorate(command: Decorated) -> Decorated:
        @wraps(command)
        def run(*, form: str | None, as_json: bool, **keywords: Any) -> Any:
            if as_json and form not in (None, "json"):
                raise UsageError.of("as_json", f"--json and --format {form} contradict each other; give one of them")
            return command(form="json" if as_json else form or names[0], **keywords)

        short_form = click.option("--json", "as_json", is_flag=True, help="The same as --format json.")
        format_option = click.option(
            "--format", "form", type=click.Choice(names), help=f"How to print the result. Default: {names[0]}."
        )
        return cast("Decorated", format_option(short_form(run)))

    return decorate


json_option = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")


def _set_log_format(context: click.Context, option: click.Parameter, form: str | None) -> None:
    """Set the format. Words before the command are stronger than settings."""
    if is_typed(context, "log_format") or not is_typed(context.find_root(), "log_format"):
        reporting.set_log_options(form=form)


def _set_verbose(context: click.Context, option: click.Parameter, is_verbose: bool) -> None:
    reporting.set_log_options(verbose=is_verbose)


verbosity_options = combine_decorators(
    click.option(
        "--verbose",
        "-v",
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=_set_verbose,
        help="Show decisions, where settings are from, and the traceback of an error.",
    ),
    click.option(
        "--log-format",
        type=click.Choice(reporting.LOG_FORMATS),
        is_eager=True,
        expose_value=False,
        callback=_set_log_format,
        help="Write errors and notices on stderr as text or as a line of JSON each. Default: text.",
    ),
)

quiet_option = click.option("--quiet", "-q", is_flag=True, help="Show no progress and no lines about retries.")

output_options = combine_decorators(quiet_option, verbosity_options)

transfer_options = combine_decorators(
    click.option(
        "--progress",
        type=click.Choice(PROGRESS_MODES),
        expose_value=False,
        callback=store_progress_mode,
        metavar="MODE",
        help="Show progress as a bar on a terminal and lines elsewhere (auto), as lines (plain), as JSON on a line "
        "each (json), or not (none). Default: auto.",
    ),
    output_options,
)
"""Of commands that move bytes."""

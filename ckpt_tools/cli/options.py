"""Options that several commands share, each written once."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast, get_args

import click

from ckpt_tools.cli import reporting
from ckpt_tools.cli.render import PROGRESS_MODES, is_typed, store_progress_mode
from ckpt_tools.core.option_names import (
    DEFAULT_MEMORY,
    DEFAULT_RUNNER,
    DEFAULT_WEIGHTS,
    DTYPE_NAMES,
    RUNNERS,
    STATES,
    WEIGHTS,
    ReadFormat,
    format_with_aliases,
    resolve_alias,
)
from ckpt_tools.messages.help_text import GroupedCommand, Headings

Decorated = TypeVar("Decorated", bound=Callable[..., Any])

HEADINGS: Headings = {
    "What to read": ("from_", "tag", "model_key", "optim_key", "param_order", "optimizer_file", "storage_options"),
    "Names and selection": (
        "include",
        "exclude",
        "rename",
        "key_map",
        "strip",
        "recipe",
        "inverse",
        "weights",
        "state",
        "adapter_name",
    ),
    "What stays": ("keep_last", "keep_every", "keep_best"),
    "Output": (
        "to",
        "dequantize",
        "dtype",
        "buffers",
        "world_size",
        "max_shard_size",
        "untie",
        "config",
        "like",
        "output",
        "tensors",
        "tree",
        "depth",
        "stats",
        "sample",
        "slot",
        "top",
        "list_all",
        "form",
        "as_json",
    ),
    "Running": ("memory", "workers", "runner", "address", "progress", "quiet", "verbose", "log_format", "help"),
    "Safety": (
        "dry_run",
        "yes",
        "overwrite",
        "resume",
        "strict",
        "fsync",
        "checksum",
        "incomplete",
        "allow_less",
        "allow_missing",
        "allow",
        "allow_configuration",
        "digests",
        "public_key",
        "private_key",
        "signature",
    ),
}
"""Parameters by heading of the help; those of conversions as in the docstring of ``ckpt_tools.convert``."""


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


storage_option = click.option(
    "--storage-option",
    "storage_options",
    multiple=True,
    metavar="KEY=VALUE",
    callback=_parse_pairs,
    help="An option of the store, e.g. endpoint_url=http://host:9000. Repeatable.",
)

source_argument = combine_decorators(click.argument("src", metavar="SRC"), storage_option)

reading_options = combine_decorators(
    click.option(
        "--from",
        "from_",
        metavar="FORMAT",
        help=f"The source's format: {format_with_aliases('from_', get_args(ReadFormat))}, or a plug-in's. "
        "Default: detected.",
    ),
    click.option("--tag", help="The checkpoint of a DeepSpeed folder. Default: the tag named in the file latest."),
    click.option("--model-key", help="The key of the model in a DCP tree, e.g. app.model. Default: detected."),
    click.option("--optim-key", help="The key of the optimizer in a DCP tree. Default: detected."),
    click.option(
        "--param-order",
        type=click.Path(),
        metavar="FILE",
        help="Parameter names in the optimizer's order or in the model's, if it numbers its parameters.",
    ),
    click.option(
        "--optimizer",
        "optimizer_file",
        metavar="FILE",
        help="The file of torch.save with the optimizer, if it is apart from the model in SRC.",
    ),
)


def state_option(help_text: str) -> Callable[[Decorated], Decorated]:
    """``--state`` with the help that a command gives it."""
    return click.option("--state", type=click.Choice(STATES), help=help_text)


weights_option = click.option(
    "--weights",
    type=click.Choice(WEIGHTS),
    help=f"The copy of a weight to use: its fp32 master if there is one, or the model's. Default: {DEFAULT_WEIGHTS}.",
)

naming_options = combine_decorators(
    click.option("--include", multiple=True, metavar="GLOB", help="Take only tensors whose names match. Repeatable."),
    click.option("--exclude", multiple=True, metavar="GLOB", help="Leave out tensors whose names match. Repeatable."),
    click.option(
        "--rename",
        multiple=True,
        metavar="REGEX=REPL",
        help="Rename tensors. Several rules apply in the given order. Repeatable.",
    ),
    click.option("--key-map", type=click.Path(), metavar="FILE", help="A JSON file that maps old names to new names."),
    click.option(
        "--strip",
        metavar="auto|PREFIX",
        help="Take a prefix off the names of the source, before all other options: auto for those of wrappers.",
    ),
    click.option(
        "--recipe",
        metavar="NAME|FILE",
        help="Map tensors to another model layout, by a built-in recipe (see recipes) or a TOML file. "
        "The options above name the tensors that it makes.",
    ),
    click.option("--inverse", is_flag=True, help="Read the recipe from right to left."),
    click.option(
        "--dequantize",
        is_flag=True,
        help="Make floating-point weights of quantized ones, as quantization_config in config.json says. "
        "Comes before all other options that name tensors.",
    ),
)

like_option = click.option(
    "--like",
    metavar="DIR",
    help="A model that the output is to be like: its names, shapes, dtypes, files and config.json, and the recipe that "
    "leads to them.",
)

untie_option = click.option(
    "--untie",
    is_flag=True,
    help="Write embeddings and head as two tensors, and tie_word_embeddings in config.json as false.",
)

sizes_config_option = click.option(
    "--config",
    metavar="DIR",
    help="The folder of config.json, for the sizes of a recipe and for --dequantize. Default: beside the source.",
)

selection_options = combine_decorators(
    click.option(
        "--dtype",
        type=DTypeChoice(DTYPE_NAMES),
        metavar="DTYPE",
        help=f"Cast the weights to this type, and nothing else: {format_with_aliases('dtype', DTYPE_NAMES)}.",
    ),
    weights_option,
    click.option("--buffers", multiple=True, metavar="GLOB", help="Tensors that are buffers of the model. Repeatable."),
    naming_options,
)

workers_option = click.option(
    "--workers", type=click.IntRange(min=1), metavar="N", help="Number of threads. Default: one for each processor."
)

execution_options = combine_decorators(
    click.option(
        "--memory",
        metavar="SIZE",
        help=f"Peak memory of the whole process. Default: {DEFAULT_MEMORY}, or more if the index needs more.",
    ),
    workers_option,
)

cluster_options = combine_decorators(
    click.option(
        "--runner",
        type=click.Choice(RUNNERS),
        default=DEFAULT_RUNNER,
        show_default=True,
        help="Run in threads of this process, or in processes of a Ray cluster. Each process has --memory.",
    ),
    click.option(
        "--address", metavar="ADDR", help="The address of the Ray cluster. Default: start one on this machine."
    ),
)

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

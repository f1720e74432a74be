"""Options that several commands share, each written once."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast, get_args

import click

from ckpt_tools.core.option_names import (
    DEFAULT_MEMORY,
    DEFAULT_RUNNER,
    DEFAULT_WEIGHTS,
    DTYPE_NAMES,
    RUNNERS,
    STATES,
    WEIGHTS,
    ReadFormat,
)

Command = TypeVar("Command", bound=Callable[..., Any])

HEADINGS = {
    "What to read": ("from_", "tag", "model_key", "optim_key", "param_order", "storage_options"),
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
    ),
    "Output": ("to", "dequantize", "dtype", "buffers", "world_size", "max_shard_size", "config", "like"),
    "Running": ("memory", "workers", "runner", "address"),
    "Safety": ("overwrite", "resume", "strict", "fsync", "checksum"),
}
"""The options of a conversion by heading of its help, as in the docstring of ``ckpt_tools.convert``."""


class Grouped(click.Command):
    """A command whose help lists options under ``HEADINGS``, and the others under Options."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        given = [each for each in self.get_params(ctx) if isinstance(each, click.Option)]
        rows = {each.name: row for each in given if (row := each.get_help_record(ctx)) is not None}
        groups = {title: [rows.pop(name) for name in names if name in rows] for title, names in HEADINGS.items()}
        for title, group in {**groups, "Options": list(rows.values())}.items():
            if group:
                with formatter.section(title):
                    formatter.write_dl(group)


def together(*decorators: Callable[[Any], Any]) -> Callable[[Command], Command]:
    """One decorator for several options, in their order."""

    def apply(command: Command) -> Command:
        for decorator in reversed(decorators):
            command = decorator(command)
        return command

    return apply


def _pairs(context: click.Context, option: click.Parameter, given: tuple[str, ...]) -> dict[str, str]:
    pairs = [each.partition("=") for each in given]
    for name, equals, _ in pairs:
        if not name or not equals:
            raise click.BadParameter("it is not KEY=VALUE")
    names = [name for name, _, _ in pairs]
    for name in names:
        if names.count(name) > 1:
            raise click.BadParameter(f"{name!r} is given twice")
    return {name: value for name, _, value in pairs}


storage = click.option(
    "--storage-option",
    "storage_options",
    multiple=True,
    metavar="KEY=VALUE",
    callback=_pairs,
    help="An option of the store, e.g. endpoint_url=http://host:9000. Repeatable.",
)

source = together(click.argument("src", metavar="SRC"), storage)

reading = together(
    click.option(
        "--from",
        "from_",
        metavar="FORMAT",
        help=f"The source's format: {', '.join(get_args(ReadFormat))}, or a plug-in's. Default: detected.",
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
)


def state(text: str) -> Callable[[Command], Command]:
    """``--state`` with the help that a command gives it."""
    return click.option("--state", type=click.Choice(STATES), help=text)


weights = click.option(
    "--weights",
    type=click.Choice(WEIGHTS),
    help=f"The copy of a weight to use: its fp32 master if there is one, or the model's. Default: {DEFAULT_WEIGHTS}.",
)

naming = together(
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

like = click.option(
    "--like",
    metavar="DIR",
    help="A model that the output is to be like: its names, shapes, dtypes, files and config.json, and the recipe that "
    "leads to them.",
)

sizes = click.option(
    "--config",
    metavar="DIR",
    help="The folder of config.json, for the sizes of a recipe and for --dequantize. Default: beside the source.",
)

choosing = together(
    click.option("--dtype", type=click.Choice(DTYPE_NAMES), help="Cast the weights to this type, and nothing else."),
    weights,
    click.option("--buffers", multiple=True, metavar="GLOB", help="Tensors that are buffers of the model. Repeatable."),
    naming,
)

workers = click.option(
    "--workers", type=click.IntRange(min=1), help="Number of threads. Default: one for each processor."
)

running = together(
    click.option(
        "--memory",
        metavar="SIZE",
        help=f"Peak memory of the whole process. Default: {DEFAULT_MEMORY}, or more if the index needs more.",
    ),
    workers,
)

clustering = together(
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


def _one_listing(context: click.Context, option: click.Parameter, is_all: bool) -> bool:
    if is_all and context.params.get("top") is not None:
        raise click.UsageError("--top and --all cannot be combined: --all lists every difference", context)
    return is_all


def _top(command: Command) -> Command:
    """Give the command ``top``: how many differences it lists, None for all."""

    @wraps(command)
    def run(*, top: int | None, list_all: bool, **chosen: Any) -> Any:
        return command(top=None if list_all else top or DEFAULT_TOP, **chosen)

    return cast("Command", run)


listing = together(
    click.option(
        "--top",
        type=click.IntRange(min=1),
        metavar="N",
        help=f"List the N largest differences. Default: {DEFAULT_TOP}.",
    ),
    click.option("--all", "list_all", is_flag=True, callback=_one_listing, help="List every difference."),
    _top,
)

as_json = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")

verbose = click.option("--verbose", "-v", is_flag=True, expose_value=False, help="Show the traceback of an error.")

talking = together(
    click.option("--quiet", "-q", is_flag=True, help="Show no progress and no lines about retries."),
    verbose,
)

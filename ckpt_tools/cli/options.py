"""Options that several commands share, each written once."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import click

from ckpt_tools.core.option_names import DEFAULT_MEMORY, DTYPE_NAMES, RUNNERS

Command = TypeVar("Command", bound=Callable[..., Any])


def _all(*decorators: Callable[[Any], Any]) -> Callable[[Command], Command]:
    def apply(command: Command) -> Command:
        for decorator in reversed(decorators):
            command = decorator(command)
        return command

    return apply


def _pairs(context: click.Context, option: click.Parameter, given: tuple[str, ...]) -> dict[str, str]:
    pairs = [each.partition("=") for each in given]
    for name, equals, _ in pairs:
        if not name or not equals:
            raise click.BadParameter(f"{name!r} is no KEY=VALUE")
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
    help="How a store is reached, e.g. endpoint_url=http://host:9000. Repeatable.",
)

source = _all(click.argument("src", metavar="SRC"), storage)

reading = _all(
    click.option("--from", "from_", metavar="FORMAT", help="The source's format, where it is not detected."),
    click.option("--tag", help="Which checkpoint of a DeepSpeed folder. Default: the one that its file latest names."),
    click.option("--model-key", help="Where the model lives in a DCP tree, e.g. app.model. Default: found out."),
    click.option("--optim-key", help="Where the optimizer lives in a DCP tree. Default: found out."),
)

weights = click.option(
    "--weights",
    type=click.Choice(["master", "model"]),
    help="Which copy of a weight: the fp32 master if there is one, or the model's own. Default: master.",
)

naming = _all(
    click.option("--include", multiple=True, metavar="GLOB", help="Only tensors of matching names. Repeatable."),
    click.option("--exclude", multiple=True, metavar="GLOB", help="No tensors of matching names. Repeatable."),
    click.option("--rename", multiple=True, metavar="REGEX=REPL", help="Rewrite names, in this order. Repeatable."),
    click.option("--key-map", type=click.Path(), metavar="FILE", help="JSON object of old names to new ones."),
)

choosing = _all(
    click.option("--dtype", type=click.Choice(DTYPE_NAMES), help="Cast the weights, and nothing else."),
    weights,
    naming,
)

workers = click.option("--workers", type=click.IntRange(min=1), help="Threads. Default: one for each processor.")

running = _all(
    click.option(
        "--memory",
        metavar="SIZE",
        help=f"Peak memory of the whole process; default: {DEFAULT_MEMORY}, or what a larger index needs.",
    ),
    workers,
)

clustering = _all(
    click.option(
        "--runner",
        type=click.Choice(RUNNERS),
        default=RUNNERS[0],
        show_default=True,
        help="Where the work is done: threads of this process, or processes of a Ray cluster, each with --memory.",
    ),
    click.option("--address", metavar="ADDR", help="The Ray cluster; one of this machine alone if left out."),
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

    return cast(Command, run)


listing = _all(
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

talking = _all(
    click.option("--quiet", "-q", is_flag=True, help="No progress, and no lines about retries."),
    verbose,
)

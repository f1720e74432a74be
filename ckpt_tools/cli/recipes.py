"""``ckpt-tools recipes``, ``recipes show`` and ``recipes check``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ckpt_tools.cli import options
from ckpt_tools.cli.group import SubGroup
from ckpt_tools.cli.render import is_typed, print_json, show_notes
from ckpt_tools.cli.wrapping import echo, say, say_columns
from ckpt_tools.core.wording import count, listed, printable
from ckpt_tools.errors import UsageError

if TYPE_CHECKING:
    from ckpt_tools.recipes.report import MappedTensor, RecipeMap

WEIGHT = "weight"
"""The slot of a weight."""


def _named(context: click.Context, argument: click.Parameter, given: str) -> str:
    if not given:
        raise UsageError("RECIPE is empty; name a recipe or a file")
    return given


_recipe = click.argument("recipe", metavar="RECIPE", callback=_named)


@click.group(
    "recipes", cls=SubGroup, headings=options.HEADINGS, invoke_without_command=True, examples=("ckpt-tools recipes",)
)
@options.as_json
@click.pass_context
def recipes_command(context: click.Context, as_json: bool) -> None:
    """List the recipes, which map tensors from one model layout to another.

    convert --recipe NAME writes the layout on the right, --recipe NAME --inverse the one on the left.
    """
    if context.invoked_subcommand is not None:
        if as_json and is_typed(context, "as_json"):
            raise click.UsageError(f"give --json behind {context.invoked_subcommand}", context)
        return
    from ckpt_tools import list_recipes

    found = list_recipes()
    if as_json:
        print_json([{name: value for name, value in each.to_json().items() if name != "text"} for each in found])
        return
    rows = [
        (each.name, each.left, each.right, f"{each.about}; also {', '.join(each.also)}" if each.also else each.about)
        for each in found
    ]
    say_columns(("recipe", "left", "right", "description"), [tuple(map(printable, row)) for row in rows])


@recipes_command.command("show", cls=options.Command, examples=("ckpt-tools recipes show mixtral",))
@_recipe
@options.verbose
def recipes_show_command(recipe: str) -> None:
    """Print the file of a recipe.

    RECIPE is the name of a built-in recipe, or a TOML file.
    """
    from ckpt_tools import show_recipe

    echo(show_recipe(recipe).text.rstrip("\n"))


@recipes_command.command("check", cls=options.Command, examples=("ckpt-tools recipes check mixtral run/step-1000",))
@_recipe
@options.source
@click.option("--inverse", is_flag=True, help="Read the recipe from right to left.")
@options.sizes
@options.reading
@options.state("Map the weights alone, or the whole training state. Default: model.")
@options.as_json
@options.talking
def recipes_check_command(recipe: str, src: str, as_json: bool, quiet: bool, **chosen: Any) -> None:
    """Show the tensors that a recipe makes of SRC, and those that each is from. Nothing is written.

    RECIPE is the name of a built-in recipe, or a TOML file.
    """
    from ckpt_tools import check_recipe

    found = check_recipe(recipe, src, **chosen)
    if as_json:
        print_json(found.to_json())
    else:
        _show(found)


def _show(found: RecipeMap) -> None:
    used, weights = found.recipe, [each for each in found.tensors if each.slot == WEIGHT]
    sources = {name for each in weights for name in each.sources}
    tensors = f"{count(len(sources), 'tensor')} to {count(len(weights), 'tensor')}"
    say(printable(f"{used.name}: {used.before} to {used.after}, {tensors}"))
    say_columns(("tensor", "dtype", "shape", "from"), map(_row, weights))
    if len(found.tensors) > len(weights):
        more = count(len(found.tensors) - len(weights), "more tensor")
        say(f"and {more} of the optimizer, beside their weights; --json lists them")
    show_notes(found.notes)


def _row(tensor: MappedTensor) -> tuple[str, ...]:
    shape = " x ".join(map(str, tensor.shape)) or "scalar"
    return tuple(map(printable, (tensor.name, tensor.dtype, shape, listed(tensor.sources))))

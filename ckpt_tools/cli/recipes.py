"""``ckpt-tools recipes``, ``recipes show`` and ``recipes check``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ckpt_tools.cli import options
from ckpt_tools.cli.group import CommandGroup
from ckpt_tools.cli.output import echo, print_json, print_result, print_table, print_wrapped, show_notes
from ckpt_tools.cli.reporting import is_typed
from ckpt_tools.core.options import ReadKeywords
from ckpt_tools.errors import UsageError
from ckpt_tools.messages.wording import escape_unprintable, format_count, join_names

if TYPE_CHECKING:
    from ckpt_tools.recipes.report import RecipeInfo, RecipeMap

WEIGHT = "weight"
"""The slot of a weight."""


def _check_recipe_name(context: click.Context, argument: click.Parameter, recipe_name: str) -> str:
    if not recipe_name:
        raise UsageError("RECIPE is empty; name a recipe or a file")
    return recipe_name


_recipe_argument = click.argument("recipe", metavar="RECIPE", callback=_check_recipe_name)


@click.group(
    "recipes",
    cls=CommandGroup,
    headings=options.HEADINGS,
    invoke_without_command=True,
    examples=("ckpt-tools recipes",),
)
@options.json_option
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

    recipes = list_recipes()
    if as_json:
        left_out = ("text", "card")
        print_json(
            [{name: value for name, value in each.to_json().items() if name not in left_out} for each in recipes]
        )
        return
    rows = [
        (each.name, each.left, each.right, f"{each.about}; also {', '.join(each.also)}" if each.also else each.about)
        for each in recipes
    ]
    print_table(("recipe", "left", "right", "description"), [tuple(map(escape_unprintable, row)) for row in rows])


@recipes_command.command("show", cls=options.ConverterCommand, examples=("ckpt-tools recipes show mixtral",))
@_recipe_argument
@click.option(
    "--card",
    "shows_card",
    is_flag=True,
    help="Print which frameworks judged the recipe, on which models, and how exactly.",
)
@options.json_option
@options.verbosity_options
def recipes_show_command(recipe: str, shows_card: bool, as_json: bool) -> None:
    """Print the file of a recipe, or its card.

    RECIPE is the name of a built-in recipe, or a TOML file. --json prints both.
    """
    from ckpt_tools import show_recipe

    shown = show_recipe(recipe)
    if as_json:
        print_json(shown.to_json())
    elif shows_card:
        _show_card(shown)
    else:
        echo(shown.text.rstrip("\n"))


def _show_card(shown: RecipeInfo) -> None:
    print_wrapped(escape_unprintable(f"{shown.name}: {shown.left} to {shown.right}"))
    if shown.card.no_judge:
        print_wrapped(f"no judge: {shown.card.no_judge}")
        return
    ways = {"forward": f"to {shown.right}", "inverse": f"to {shown.left}", "both": "both"}
    rows = [
        (
            ", ".join(each.judges),
            ways[each.way],
            "yes" if each.optimizer else "no",
            f"{each.bound:g}" if each.bound else "0: bit for bit",
            f"ckpt-tools {each.version}, {each.date}",
            f"{each.model}: {each.compared}",
        )
        for each in shown.card.proofs
    ]
    print_table(("judge", "way", "optimizer", "largest difference", "proved by", "of"), rows)


@recipes_command.command(
    "check", cls=options.ConverterCommand, examples=("ckpt-tools recipes check mixtral run/step-1000",)
)
@_recipe_argument
@options.source_argument
@options.options_of(ReadKeywords)
@options.option_of("inverse")
@options.option_of("config", options.SIZES_CONFIG_HELP)
@options.option_of("state", "Map the weights alone, or the whole training state. Default: model.")
@options.json_option
@options.output_options
def recipes_check_command(recipe: str, src: str, as_json: bool, quiet: bool, **keywords: Any) -> None:
    """Show the tensors that a recipe makes of SRC, and those that each is from. Nothing is written.

    RECIPE is the name of a built-in recipe, or a TOML file.
    """
    from ckpt_tools import check_recipe

    print_result(check_recipe(recipe, src, **keywords), as_json, _show_recipe_map)


def _show_recipe_map(recipe_map: RecipeMap) -> None:
    used_recipe, weights = recipe_map.recipe, [each for each in recipe_map.tensors if each.slot == WEIGHT]
    sources = {name for each in weights for name in each.sources}
    tensors = f"{format_count(len(sources), 'tensor')} to {format_count(len(weights), 'tensor')}"
    print_wrapped(escape_unprintable(f"{used_recipe.name}: {used_recipe.before} to {used_recipe.after}, {tensors}"))
    rows = [
        (each.name, each.dtype, " x ".join(map(str, each.shape)) or "scalar", join_names(each.sources))
        for each in weights
    ]
    print_table(("tensor", "dtype", "shape", "from"), [tuple(map(escape_unprintable, row)) for row in rows])
    if len(recipe_map.tensors) > len(weights):
        more = format_count(len(recipe_map.tensors) - len(weights), "more tensor")
        print_wrapped(f"and {more} of the optimizer, beside their weights; --json lists them")
    show_notes(recipe_map.notes)

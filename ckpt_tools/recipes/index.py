"""Recipes by name: those of this package, and those that other distributions add.

A distribution adds recipes by an entry point of the group ``ckpt_tools.recipes`` that names a package with TOML files.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt_tools.core.entry_points import describe_distribution, index_plugins_by_name, list_entry_points
from ckpt_tools.core.option_names import format_option
from ckpt_tools.errors import UsageError
from ckpt_tools.messages.wording import find_nearest
from ckpt_tools.recipes.pages import list_built_in_names, read_built_in_page
from ckpt_tools.recipes.reading import parse_recipe, read_recipe
from ckpt_tools.recipes.recipe import Recipe

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

ENTRY_POINT_GROUP = "ckpt_tools.recipes"


def load_recipe(recipe: str | Path, *, inverse: bool = False) -> Recipe:
    """The recipe of that name or in that file, or its inverse. A name may also be one of those that it is known as.

    Raises:
        UsageError: there is no such name, or the file is not a recipe. SourceNotFoundError: there is no such file.
    """
    named_recipe = _find_recipe(recipe)
    if inverse and not named_recipe.has_way_back:
        raise UsageError(
            f"{format_option('inverse', True)}: the recipe {named_recipe.name} copies or grows tensors, and has no way "
            "back"
        )
    return named_recipe.inverse() if inverse else named_recipe


def _find_recipe(recipe: str | Path) -> Recipe:
    if isinstance(recipe, Path) or recipe.endswith(".toml") or "/" in recipe:
        return read_recipe(Path(recipe).expanduser())
    # A plug-in is looked up if no built-in recipe has the name.
    if recipe in list_built_in_names():
        return _read_built_in(recipe)
    if recipe in _list_plugin_files():
        return read_recipe(_list_plugin_files()[recipe])
    recipes_of_model = [each for each in list_recipes() if recipe in each.model_aliases]
    if len(recipes_of_model) == 1:
        return recipes_of_model[0]
    if recipes_of_model:
        names = ", ".join(each.name for each in recipes_of_model)
        raise UsageError(f"{format_option('recipe', recipe)} is a model of several recipes; choose one of {names}")
    recipes = list_recipes()
    known = {each.name for each in recipes}.union(*(each.model_aliases for each in recipes))
    suggestion = f"the nearest are {', '.join(find_nearest(recipe, known))}" if known else "none is installed"
    raise UsageError(f"there is no recipe {recipe!r}; {suggestion}; a file's name ends in .toml")


@cache
def list_recipes() -> tuple[Recipe, ...]:
    """All recipes by name, the built-in ones first. Raises UsageError if one of a plug-in cannot be read."""
    return (*map(_read_built_in, list_built_in_names()), *map(read_recipe, _list_plugin_files().values()))


def list_other_names(recipe: Recipe) -> tuple[str, ...]:
    """The names of models by which :func:`load_recipe` finds it. Raises as ``list_recipes``."""
    counts = Counter(name for each in list_recipes() for name in {each.name, *each.model_aliases})
    return tuple(sorted(name for name in recipe.model_aliases - {recipe.name} if counts[name] == 1))


def _read_built_in(name: str) -> Recipe:
    return parse_recipe(read_built_in_page(name), name, name)


@cache
def _list_plugin_files() -> Mapping[str, Path]:
    """Raises UsageError if two distributions give one name, or one gives a name that is built in."""
    added = (
        (path.stem, entry, path) for entry in list_entry_points(ENTRY_POINT_GROUP) for path in _find_entry_files(entry)
    )
    return index_plugins_by_name(added, "recipe", list_built_in_names())


def _find_entry_files(entry: EntryPoint) -> list[Path]:
    """The files of the package that an entry point names. It is found and not run; one that lies in another is, because
    Python imports that to find it. Raises UsageError."""
    from importlib.util import find_spec

    provider = f"the recipes of {describe_distribution(entry)}"
    try:
        spec = find_spec(entry.value)
    except Exception as error:
        raise UsageError(f"{provider} cannot be found ({type(error).__name__}: {error})") from error
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    toml_files = sorted(path for folder in folders for path in Path(folder).glob("*.toml"))
    if not toml_files:
        raise UsageError(f"{provider} cannot be found: there is no package {entry.value} with TOML files")
    return toml_files

"""Recipes by name: those of this package, and those that other distributions add.

A distribution adds recipes by an entry point of the group ``ckpt_tools.recipes`` that names a package with TOML files.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from ckpt_tools.core.option_names import option
from ckpt_tools.core.wording import nearest
from ckpt_tools.errors import UsageError
from ckpt_tools.recipes.reading import read_recipe
from ckpt_tools.recipes.recipe import Recipe

GROUP = "ckpt_tools.recipes"

_BUILT_IN = Path(__file__).parent / "builtin"


def load_recipe(recipe: str | Path, *, inverse: bool = False) -> Recipe:
    """The recipe of that name or in that file, or its inverse. A name may also be one of a recipe's ``models``.

    Raises:
        UsageError: there is no such name, or the file is not a recipe. SourceNotFoundError: there is no such file.
    """
    found = _found(recipe)
    return found.inverse() if inverse else found


def _found(recipe: str | Path) -> Recipe:
    if isinstance(recipe, Path) or recipe.endswith(".toml") or "/" in recipe:
        return read_recipe(Path(recipe).expanduser())
    recipes = list_recipes()
    for named in recipes:
        if named.name == recipe:
            return named
    of_model = [each for each in recipes if recipe in each.models]
    if len(of_model) == 1:
        return of_model[0]
    if of_model:
        names = ", ".join(each.name for each in of_model)
        raise UsageError(f"{option('recipe', recipe)} is a model of several recipes; choose one of {names}")
    known = [*(each.name for each in recipes), *(model for each in recipes for model in each.models)]
    near = ", ".join(nearest(recipe, known)) or "none is installed"
    raise UsageError(f"there is no recipe {recipe!r}; the nearest are {near}; a file's name ends in .toml")


@cache
def list_recipes() -> tuple[Recipe, ...]:
    """All recipes by name, the built-in ones first."""
    paths = sorted(_BUILT_IN.glob("*.toml"))
    return tuple(read_recipe(path) for path in (*paths, *_of_plugins()))


def _of_plugins() -> list[Path]:
    from importlib.metadata import entry_points
    from importlib.resources import files

    folders = [Path(str(files(each.value))) for each in entry_points(group=GROUP)]
    return sorted(path for folder in folders for path in folder.glob("*.toml"))

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
from ckpt_tools.core.wording import find_nearest
from ckpt_tools.errors import UsageError
from ckpt_tools.recipes.reading import read_recipe
from ckpt_tools.recipes.recipe import Recipe

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "ckpt_tools.recipes"

_BUILT_IN = Path(__file__).parent / "builtin"


def load_recipe(recipe: str | Path, *, inverse: bool = False) -> Recipe:
    """The recipe of that name or in that file, or its inverse. A name may also be one of those that it is known as.

    Raises:
        UsageError: there is no such name, or the file is not a recipe. SourceNotFoundError: there is no such file.
    """
    found = _found(recipe)
    return found.inverse() if inverse else found


def _found(recipe: str | Path) -> Recipe:
    if isinstance(recipe, Path) or recipe.endswith(".toml") or "/" in recipe:
        return read_recipe(Path(recipe).expanduser())
    # A plug-in is looked up if no built-in recipe has the name.
    path = _built_in().get(recipe) or _of_plugins().get(recipe)
    if path is not None:
        return read_recipe(path)
    of_model = [each for each in list_recipes() if recipe in each.known_as]
    if len(of_model) == 1:
        return of_model[0]
    if of_model:
        names = ", ".join(each.name for each in of_model)
        raise UsageError(f"{format_option('recipe', recipe)} is a model of several recipes; choose one of {names}")
    recipes = list_recipes()
    known = {each.name for each in recipes}.union(*(each.known_as for each in recipes))
    near = f"the nearest are {', '.join(find_nearest(recipe, known))}" if known else "none is installed"
    raise UsageError(f"there is no recipe {recipe!r}; {near}; a file's name ends in .toml")


@cache
def list_recipes() -> tuple[Recipe, ...]:
    """All recipes by name, the built-in ones first. Raises UsageError if one of a plug-in cannot be read."""
    return tuple(map(read_recipe, [*_built_in().values(), *_of_plugins().values()]))


def other_names(recipe: Recipe) -> tuple[str, ...]:
    """The names of models by which :func:`load_recipe` finds it. Raises as ``list_recipes``."""
    counts = Counter(name for each in list_recipes() for name in {each.name, *each.known_as})
    return tuple(sorted(name for name in recipe.known_as - {recipe.name} if counts[name] == 1))


@cache
def _built_in() -> Mapping[str, Path]:
    return {path.stem: path for path in sorted(_BUILT_IN.glob("*.toml"))}


@cache
def _of_plugins() -> Mapping[str, Path]:
    """Raises UsageError if two distributions give one name, or one gives a name that is built in."""
    added = ((path.stem, entry, path) for entry in list_entry_points(GROUP) for path in _files(entry))
    return index_plugins_by_name(added, "recipe", _built_in())


def _files(entry: EntryPoint) -> list[Path]:
    """The files of the package that an entry point names. It is found and not run; one that lies in another is, because
    Python imports that to find it. Raises UsageError."""
    from importlib.util import find_spec

    who = f"the recipes of {describe_distribution(entry)}"
    try:
        spec = find_spec(entry.value)
    except Exception as error:
        raise UsageError(f"{who} cannot be found ({type(error).__name__}: {error})") from error
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    found = sorted(path for folder in folders for path in Path(folder).glob("*.toml"))
    if not found:
        raise UsageError(f"{who} cannot be found: there is no package {entry.value} with TOML files")
    return found

"""Cards of recipes: what proves each, as the tests in which frameworks judge the built-in ones wrote into
``cards.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_tools.recipes.pages import list_built_in_names, read_built_in_page

if TYPE_CHECKING:
    from ckpt_tools.recipes.recipe import Recipe

CARDS_FILE = Path(__file__).with_name("cards.json")
"""By name of a recipe, a list of proofs, or text that says why there is none."""


@dataclass(frozen=True, slots=True)
class RecipeProof:
    """A test that converts a model by a recipe and has frameworks judge the result.

    ``judges`` are the frameworks, with their versions; ``model`` is what was converted. What is ``compared`` differs by
    at most ``bound``, a part of the largest value: 0 is bit for bit. ``way`` is ``forward``, ``inverse`` or ``both``,
    and ``optimizer`` is true if optimizer state was judged too. ``version`` of ckpt-tools and ``date`` are those of the
    run of ``test`` that wrote this.
    """

    judges: tuple[str, ...]
    model: str
    compared: str
    bound: float
    way: str
    optimizer: bool
    version: str
    date: str
    test: str


@dataclass(frozen=True, slots=True)
class RecipeCard:
    """Proofs of a recipe. If there are none, ``no_judge`` says why."""

    proofs: tuple[RecipeProof, ...]
    no_judge: str

    @classmethod
    def of(cls, recipe: Recipe) -> RecipeCard:
        is_built_in = recipe.name in list_built_in_names() and recipe.text == read_built_in_page(recipe.name)
        found = read_cards()[recipe.name] if is_built_in else "it is not built in, and no test of ckpt-tools has it"
        if isinstance(found, str):
            return cls((), found)
        return cls(tuple(RecipeProof(**{**each, "judges": tuple(each["judges"])}) for each in found), "")


@cache
def read_cards() -> Mapping[str, list[dict[str, Any]] | str]:
    """The content of ``CARDS_FILE``."""
    cards: dict[str, list[dict[str, Any]] | str] = json.loads(CARDS_FILE.read_text())
    return cards

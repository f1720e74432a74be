"""Recipes: one model in the names and shapes of another trainer or library. Pure.

A recipe pairs names and shapes (``recipe``, read by ``reading``). ``groups`` finds the tensors that become each other,
``moves`` turns a pair with sizes into boxes, ``tables`` moves shards by them, ``manifest_builder`` makes the new
manifest of these, and ``apply`` adds the ties of both sides.
"""

from ckpt_tools.recipes.apply import apply_recipe
from ckpt_tools.recipes.index import list_recipes, load_recipe
from ckpt_tools.recipes.recipe import Recipe

__all__ = ["Recipe", "apply_recipe", "list_recipes", "load_recipe"]

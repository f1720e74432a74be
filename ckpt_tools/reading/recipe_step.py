"""The step of a conversion that applies a recipe, with the sizes in the model's ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpt_tools.core.manifest import Manifest
from ckpt_tools.core.options import ConvertOptions
from ckpt_tools.core.transforms import Transformed
from ckpt_tools.reading.model_files import find_model_files
from ckpt_tools.recipes import Recipe, apply_recipe, load_recipe
from ckpt_tools.recipes.report import UsedRecipe
from ckpt_tools.stores.source import Source, Store
from ckpt_tools.stores.wrappers import Overlay


@dataclass(frozen=True, slots=True)
class RecipeStep:
    """Applies ``recipe``. ``config`` is the content of ``config.json``; None if there is none."""

    recipe: Recipe
    config: Mapping[str, Any] | None

    @classmethod
    def of(cls, url: str | Path, source: Source, manifest: Manifest, options: ConvertOptions) -> RecipeStep:
        """The step of ``options.recipe``. Raises CkptError if a file that it needs cannot be read."""
        assert options.recipe is not None
        recipe = load_recipe(options.recipe, inverse=options.inverse)
        found = find_model_files(url, source, manifest, config=options.config, storage_options=options.storage_options)
        return cls(recipe, None if found is None else found.config)

    @property
    def used(self) -> UsedRecipe:
        """The recipe as reports name it."""
        return UsedRecipe.of(self.recipe)

    def served(self, store: Store, manifest: Manifest) -> Store:
        """``store`` with the padding of ``manifest``, which the step made."""
        return Overlay(store, manifest.literals)

    def __call__(self, manifest: Manifest) -> Transformed:
        return apply_recipe(manifest, self.recipe, self.config)

"""The step of a conversion that applies a recipe, with the sizes in the model's ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpt_tools.core.manifest import Manifest
from ckpt_tools.core.notes import Note
from ckpt_tools.core.options import ConvertOptions
from ckpt_tools.core.transforms import Transformed
from ckpt_tools.reading.model_files import config_in, find_model_files
from ckpt_tools.reading.own_sizes import own_config
from ckpt_tools.recipes import Recipe, apply_recipe, load_recipe
from ckpt_tools.recipes.families import is_known
from ckpt_tools.recipes.prefixes import strip
from ckpt_tools.recipes.report import UsedRecipe
from ckpt_tools.stores.source import Source
from ckpt_tools.stores.urls import is_remote, open_source


@dataclass(frozen=True, slots=True)
class RecipeStep:
    """Dequantizes if ``dequantizes``, takes off the prefix ``strip`` and applies ``recipe``, each if it is not None.
    ``config`` is the content of ``config.json``; None if there is none."""

    dequantizes: bool
    strip: str | None
    recipe: Recipe | None
    config: Mapping[str, Any] | None

    @classmethod
    def of(cls, url: str | Path, source: Source, manifest: Manifest, options: ConvertOptions) -> RecipeStep:
        """The step of ``options``. Sizes of a recipe, and how the model is quantized, are in ``options.config``, beside
        the source, in ``options.like``, or in what the checkpoint says of itself. Raises CkptError if a file
        that it needs cannot be read."""
        if not options.needs_config:
            return cls(False, options.strip, None, None)
        stores = options.storage_options
        recipe = None if options.recipe is None else load_recipe(options.recipe, inverse=options.inverse)
        found = find_model_files(url, source, manifest, config=options.config, storage_options=stores)
        config = None if found is None else found.config
        if config is None and options.like is not None:
            config = config_in(open_source(options.like, stores if is_remote(options.like) else None))
        if config is None:
            config = own_config(source, manifest)
        return cls(options.dequantize, options.strip, recipe, config)

    @property
    def used(self) -> UsedRecipe | None:
        """The recipe as reports name it; None if there is none."""
        return None if self.recipe is None else UsedRecipe.of(self.recipe)

    def __call__(self, manifest: Manifest) -> Transformed:
        notes: tuple[Note, ...] = ()
        if self.dequantizes:
            from ckpt_tools.recipes.dequantize import dequantize

            manifest, notes = dequantize(manifest, self.config)
        if self.strip is not None:
            manifest, more = strip(manifest, self.strip, is_known)
            notes += more
        if self.recipe is not None:
            manifest, more = apply_recipe(manifest, self.recipe, self.config)
            notes += more
        return manifest, notes

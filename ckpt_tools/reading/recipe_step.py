"""The step of a conversion that applies a recipe, with the sizes in the model's ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ckpt_tools.core import renaming
from ckpt_tools.core.manifest import Kind, Manifest
from ckpt_tools.core.names import MODEL_PREFIX, collect_model_names, has_model_attribute_prefix
from ckpt_tools.core.notes import Note, Outcome
from ckpt_tools.core.option_names import format_option
from ckpt_tools.core.options import ConvertOptions
from ckpt_tools.core.ties import make_untied_config
from ckpt_tools.core.transforms import TransformResult
from ckpt_tools.errors import UnsupportedError, UsageError
from ckpt_tools.reading.halves import check_parameter_names
from ckpt_tools.reading.model_files import read_model_config
from ckpt_tools.reading.opened import OpenedCheckpoint
from ckpt_tools.reading.own_sizes import derive_config, refuse_rank_interleaving
from ckpt_tools.recipes.apply import apply_recipe, apply_recipe_ties, exclude_unknown
from ckpt_tools.recipes.copying import copy_tensors
from ckpt_tools.recipes.growing import grow_tensors
from ckpt_tools.recipes.index import load_recipe
from ckpt_tools.recipes.recipe import Recipe
from ckpt_tools.recipes.report import UsedRecipe
from ckpt_tools.recipes.search import are_known_names
from ckpt_tools.stores.urls import open_source

AUTO_PREFIX = "auto"


@dataclass(frozen=True, slots=True)
class RecipeStep:
    """Dequantizes if ``does_dequantize``, takes off the prefix ``strip`` and applies ``recipe``, each if it is not
    None. ``config`` is the content of ``config.json``; None if there is none. ``exclude`` leaves out what the recipe
    does not know, under the names of the source."""

    does_dequantize: bool
    strip: str | None
    recipe: Recipe | None
    config: Mapping[str, Any] | None
    exclude: tuple[str, ...] = ()

    @classmethod
    def of(cls, opened: OpenedCheckpoint, options: ConvertOptions) -> RecipeStep:
        """The step of ``options``. Sizes of a recipe, and how the model is quantized, are in ``options.config``, beside
        the source, in ``options.like``, or in what the checkpoint says of itself. Raises CkptError if a file
        that it needs cannot be read."""
        if not options.needs_config:
            return cls(False, options.strip, None, None)
        recipe = None if options.recipe is None else load_recipe(options.recipe, inverse=options.inverse)
        if recipe is not None:
            refuse_rank_interleaving(opened.source, opened.manifest)
        config = opened.find_config()
        if config is None and options.like is not None:
            config = read_model_config(open_source(options.like, options.storage_options))
        if config is None:
            config = derive_config(opened.source, opened.manifest)
        if options.untie and config is not None:
            config = make_untied_config(config)
        return cls(options.dequantize, options.strip, recipe, config, tuple(options.exclude))

    @property
    def used_recipe(self) -> UsedRecipe | None:
        """The recipe as reports name it; None if there is none."""
        return None if self.recipe is None else UsedRecipe.of(self.recipe)

    def __call__(self, manifest: Manifest) -> TransformResult:
        """Raises UsageError if the recipe does not fit; UnsupportedError if it does not lead the optimizer state of a
        checkpoint with ``unjoined_state`` to names and shapes of its weights."""
        if manifest.unjoined_state and self.recipe is not None:
            if not self.recipe.has_way_back:
                way = f"convert the weights alone, with {format_option('state', 'model')}"
                raise UnsupportedError(
                    f"{manifest.unjoined_state}, and a recipe that copies or grows tensors does not join them; {way}"
                )
            return self._join_renamed(manifest, self.recipe)
        notes: tuple[Note, ...] = ()
        if self.does_dequantize:
            from ckpt_tools.recipes.dequantize import dequantize

            manifest, notes = dequantize(manifest, self.config)
        if self.strip is not None:
            manifest, new_notes = _strip_prefix(manifest, self.strip)
            notes += new_notes
        if self.recipe is not None:
            manifest, exclusion_notes = exclude_unknown(manifest, self.recipe, self.exclude)
            manifest, new_notes = apply_recipe(manifest, self.recipe, self.config)
            notes += (*exclusion_notes, *new_notes)
            if self.recipe.copy_rules:
                manifest, new_notes = copy_tensors(manifest, self.recipe.copy_rules)
                notes += new_notes
            if self.recipe.grow_rules:
                manifest, new_notes = grow_tensors(manifest, self.recipe.grow_rules, self.recipe.bindings, self.config)
                notes += new_notes
        return manifest, notes

    def _join_renamed(self, manifest: Manifest, recipe: Recipe) -> TransformResult:
        """Weights and optimizer state under the names of the weights, then under those that ``recipe`` leads to."""
        weights, notes = replace(self, recipe=None)(_select_part(manifest, is_state=False))
        state, state_notes, applied_recipe = self._rename_like_weights(_select_part(manifest, is_state=True), recipe)
        check_parameter_names(state, weights, None, "the weights")
        tensors, literals = {**weights.tensors, **state.tensors}, {**weights.literals, **state.literals}
        must_equal = (*weights.must_equal, *state.must_equal)
        joined = replace(weights, tensors=tensors, groups=state.groups, literals=literals, must_equal=must_equal)
        notes += state_notes
        if applied_recipe is recipe:
            return apply_recipe_ties(joined, recipe, self.config), notes
        joined, state_notes = apply_recipe(joined, recipe, self.config)
        return joined, notes + state_notes

    def _rename_like_weights(self, state: Manifest, recipe: Recipe) -> tuple[Manifest, tuple[Note, ...], Recipe]:
        """Optimizer state after the recipe, or after its inverse if it is the weights that the recipe takes, and which
        of the two it was."""
        step = replace(self, does_dequantize=False)
        try:
            return *step(state), recipe
        except UsageError as error:
            inverse_recipe = recipe.inverse()
            try:
                return *replace(step, recipe=inverse_recipe)(state), inverse_recipe
            except UsageError:
                raise error from None


def _strip_prefix(manifest: Manifest, prefix: str) -> TransformResult:
    """Names without ``prefix``; for ``auto`` without the parts of wrappers, and without a ``model.`` that all names
    share if the model's own names do not have it. Raises UsageError if no name has the prefix."""
    if prefix != AUTO_PREFIX:
        return renaming.strip_prefix(manifest, prefix)
    bare, _ = renaming.strip_wrappers(manifest)
    if not has_model_attribute_prefix(collect_model_names(bare), are_known_names):
        return bare, ()
    why = f"all names begin with it; {format_option('strip', AUTO_PREFIX)} takes it off"
    return renaming.strip_prefix(bare, MODEL_PREFIX)[0], (
        Note(Outcome.DROPPED, f"the prefix {MODEL_PREFIX}", why, asked=True),
    )


def _select_part(manifest: Manifest, *, is_state: bool) -> Manifest:
    """The optimizer state of a checkpoint, or all else."""
    tensors = {key: entry for key, entry in manifest.tensors.items() if (entry.kind is Kind.STATE) is is_state}
    if is_state:
        return replace(manifest, tensors=tensors, aliases={}, unjoined_state="")
    return replace(manifest, tensors=tensors, groups=(), unjoined_state="")

"""Recipes, and their effect on a checkpoint, as results of the public functions."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from ckpt_tools.core.manifest import Kind, Manifest
from ckpt_tools.core.notes import Note
from ckpt_tools.core.shards import ByteRange, ShardTable
from ckpt_tools.messages.showing import DisplayableResult

if TYPE_CHECKING:
    from ckpt_tools.core.apply_options import ManifestStep
    from ckpt_tools.recipes.cards import RecipeCard
    from ckpt_tools.recipes.recipe import Recipe


@dataclass(frozen=True, slots=True, repr=False)
class RecipeInfo(DisplayableResult):
    """A recipe: ``left`` and ``right`` are the two namings, ``models`` the ``model_type`` that it is for, ``source`` is
    what it was made from, ``text`` the file, ``also`` its other names, ``card`` what proves it."""

    SHOWN: ClassVar[tuple[str, ...]] = ("name", "left", "right", "about")

    name: str
    left: str
    right: str
    about: str
    models: tuple[str, ...]
    source: str
    text: str
    also: tuple[str, ...]
    card: RecipeCard

    @classmethod
    def of(cls, recipe: Recipe) -> RecipeInfo:
        from ckpt_tools.recipes.cards import RecipeCard
        from ckpt_tools.recipes.index import list_other_names

        return cls(
            recipe.name,
            recipe.left,
            recipe.right,
            recipe.about,
            recipe.models,
            recipe.source,
            recipe.text,
            also=list_other_names(recipe),
            card=RecipeCard.of(recipe),
        )


@dataclass(frozen=True, slots=True)
class UsedRecipe:
    """The recipe of a conversion: its name, if it is read from right to left, and the namings before and after."""

    name: str
    inverse: bool
    before: str
    after: str

    @classmethod
    def of(cls, recipe: Recipe) -> UsedRecipe:
        return cls(recipe.name, recipe.is_inverse, recipe.left, recipe.right)


@dataclass(frozen=True, slots=True)
class MappedTensor:
    """A tensor that a recipe makes, and the names of those that its elements are from."""

    name: str
    slot: str
    shape: tuple[int, ...]
    dtype: str
    sources: tuple[str, ...]


@dataclass(frozen=True, slots=True, repr=False)
class RecipeMap(DisplayableResult):
    """Each tensor that a recipe makes of a checkpoint, and notes on what it leaves out."""

    recipe: UsedRecipe
    tensors: tuple[MappedTensor, ...]
    notes: tuple[Note, ...]


def make_recipe_map(manifest: Manifest, recipe: Recipe, step: ManifestStep) -> RecipeMap:
    """The map of ``recipe``, which ``step`` applies. Raises CkptError as it does."""
    # Each tensor is a file of its own here, so that the shards of a result name the tensors that they are from.
    names = {str(number): key.fqn for number, key in enumerate(manifest.tensors)}
    separate_entries = {}
    for file, (key, entry) in zip(names, manifest.tensors.items(), strict=True):
        dtype, framing = entry.shards.dtype, entry.shards.framing
        whole_file = ByteRange(file, 0, entry.numel * dtype.item_bytes)
        separate_entries[key] = replace(entry, shards=ShardTable.whole(entry.shape, dtype, whole_file, framing=framing))
    made, notes = step(replace(manifest, tensors=separate_entries))
    kept = made.select_kinds(Kind.PARAMETER, Kind.BUFFER, Kind.STATE)
    mapped = []
    for key, entry in kept.items():
        files = (entry.shards.files[number] for number in entry.shards.file_ids.tolist())
        source_names = tuple(dict.fromkeys(names[file] for file in files if file in names))
        mapped.append(MappedTensor(*key, entry.shape, entry.dtype.value, source_names))
    return RecipeMap(UsedRecipe.of(recipe), tuple(mapped), notes)

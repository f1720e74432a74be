"""The manifest as the options of a conversion make it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias

from ckpt_tools.core import transforms
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.expansion import check_expansion
from ckpt_tools.core.format_names import HEADER_ENTRY
from ckpt_tools.core.manifest import WEIGHT, Manifest, StateKey
from ckpt_tools.core.notes import ASSUMED_ORDER, Note, Outcome, without_gone
from ckpt_tools.core.options import ConvertOptions
from ckpt_tools.core.transforms import Transformed

Step: TypeAlias = Callable[[Manifest], Transformed]
"""From one manifest to another, with notes."""


@dataclass(frozen=True, slots=True)
class Applied:
    """A manifest as it is to be written, whose notes say what was left behind; ``uncast`` is the same in the dtypes
    that it had, ``renamed`` has the new names by the old ones."""

    manifest: Manifest
    uncast: Manifest
    renamed: Mapping[str, str]


class Likeness(Protocol):
    """The steps that make a manifest like a reference."""

    @property
    def excluded(self) -> frozenset[str]:
        """Names of the reference that ``exclude`` leaves out."""

    def named(self, manifest: Manifest) -> Transformed:
        """The names, shapes and ties of the reference."""

    def cast(self, manifest: Manifest) -> Transformed:
        """The dtypes of the reference."""


def apply_options(
    manifest: Manifest,
    options: ConvertOptions,
    *,
    whole: bool,
    holds_masters: bool,
    keeps_tree: bool = False,
    kept: tuple[str, ...] = (),
    recipe: Step | None = None,
    merge: Step | None = None,
    like: Likeness | None = None,
) -> Applied:
    """The manifest as ``options`` make it.

    ``whole`` says that all state is written, ``holds_masters`` that fp32 masters have a place beside the weights, as
    they have where the source keeps them in the optimizer's state.
    ``kept`` are entries that are written with the weights also if no other state is. ``recipe`` is the step of
    ``options.strip`` and ``options.recipe``; options that name tensors name those that it makes. ``merge`` is the step
    that merges an adapter into these. ``like`` comes last, so that the other options can leave out or rename what does
    not fit. ``keeps_tree`` says that the target is a tree as the source is one.

    Raises:
        UsageError: the options do not fit this checkpoint or each other. UnsupportedError: all state is written of
        weights and optimizer state under different names, and there is no recipe to join them.
    """
    before = _dtypes(manifest)
    notes = tuple(replace(note, asked=note.asked or options.state == "model") for note in manifest.notes)
    if manifest.parted:
        manifest, notes = _taken(manifest, notes, [] if recipe is None else [recipe])
        recipe = None
        if manifest.parted and whole:
            raise transforms.parted_error(manifest)
    copying: list[Step] = []
    weights = options.weight_copy(manifest)
    if not whole:
        copying = [
            lambda each: transforms.model_only(each, weights=weights, asked=options.state == "model", entries=kept),
            transforms.without_wrappers,
        ]
    elif not (holds_masters or manifest.keeps_masters):
        copying = [lambda each: transforms.one_copy(each, weights=weights)]
    manifest, notes = _taken(manifest, notes, copying)
    if manifest.values and (options.recipe is not None or merge is not None or like is not None):
        manifest, more = transforms.without_values(manifest, to="a recipe, an adapter or another model's layout")
        notes += more
    for step in (recipe, merge):
        if step is not None:
            manifest, more = step(manifest)
            notes = (*(note for note in notes if not _is_refuted(note, more)), *more)
    if like is not None:
        manifest = replace(manifest, left_out=manifest.left_out | like.excluded)
    manifest, notes = _taken(manifest, notes, _choosing(options))
    new_name = transforms.substitutions(options.rename, options.names)
    renamed = transforms.new_names(manifest, new_name) if options.rename or options.names else {}
    if renamed:
        manifest, _ = transforms.rename(manifest, new_name)
    if like is not None:
        manifest, more = like.named(manifest)
        notes += more
    if keeps_tree:
        manifest, more = _without_numbers(manifest, are_others=options.recipe is not None or like is not None)
        notes += more
    if not manifest.groups or (keeps_tree and manifest.tree is not None and manifest.tree.numbers):
        notes = tuple(note for note in notes if note.what != ASSUMED_ORDER)  # numbers, or nothing, is what is written
    check_expansion(manifest.tensors, manifest.stored_bytes)
    made, more = transforms.cast(manifest, options.target_dtype) if like is None else like.cast(manifest)
    if HEADER_ENTRY in made.extra and (merge is not None or _dtypes(made) != before):
        why = "carried as it is, and it may say of tensors what was true before this conversion"
        more = (*more, Note(Outcome.KEPT, HEADER_ENTRY, why))
    return Applied(replace(made, notes=notes + more), manifest, renamed)


def _dtypes(manifest: Manifest) -> Mapping[StateKey, DType]:
    return {key: entry.dtype for key, entry in manifest.tensors.items() if key.slot == WEIGHT}


def _without_numbers(manifest: Manifest, *, are_others: bool) -> Transformed:
    """The optimizer by names if it had numbers, and these would be of other parameters than in the source:
    ``are_others``, or some are left out."""
    numbers = () if manifest.tree is None else manifest.tree.numbers
    if manifest.tree is None or not manifest.groups or not numbers:
        return manifest, ()
    if not are_others and sum(len(group.params) for group in manifest.groups) == len(numbers):
        return manifest, ()
    why = "they are of other parameters than the source's; the optimizer has names, as get_optimizer_state_dict gives"
    note = Note(Outcome.DROPPED, "the numbers of the optimizer's parameters", why, len(numbers))
    return replace(manifest, tree=replace(manifest.tree, numbers=())), (note,)


def _items(manifest: Manifest) -> frozenset[str]:
    """Names of tensors, tied ones too, and of entries: what a note can say was kept."""
    return frozenset([*manifest.fqns, *manifest.aliases, *map(str, manifest.extra)])


def _taken(manifest: Manifest, notes: tuple[Note, ...], steps: Iterable[Step]) -> Transformed:
    """The manifest after ``steps``, with ``notes`` and theirs, but for those on items that a step left out."""
    before = _items(manifest)
    for step in steps:
        manifest, more = step(manifest)
        notes += more
    return manifest, without_gone(notes, before, _items(manifest))


def _is_refuted(note: Note, later: Collection[Note]) -> bool:
    """True if a part that was kept is left out by a recipe, as rows that are padding are."""
    is_left_out = any(each.outcome is Outcome.DROPPED and each.what.endswith(f" of {note.what}") for each in later)
    return note.outcome is Outcome.KEPT and is_left_out


def _choosing(options: ConvertOptions) -> list[Step]:
    """Steps that find tensors by their names."""
    steps: list[Step] = []
    if options.buffers:
        steps.append(lambda manifest: transforms.with_buffers(manifest, options.buffers))
    if options.rename or options.names:
        # Before names are chosen, so that a map of a whole model fits a part of it.
        steps.append(lambda manifest: transforms.check_renaming(manifest, options.rename, options.names))
    steps.append(
        lambda manifest: transforms.select(manifest, include=tuple(options.include), exclude=tuple(options.exclude))
    )
    return steps

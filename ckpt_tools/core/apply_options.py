"""The manifest as the options of a conversion make it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, TypeAlias

from ckpt_tools.core import renaming, transforms
from ckpt_tools.core.format_names import HEADER_ENTRY
from ckpt_tools.core.limits import check_expansion
from ckpt_tools.core.manifest import Manifest
from ckpt_tools.core.notes import ASSUMED_ORDER_ITEM, Note, Outcome, drop_stale_notes
from ckpt_tools.core.option_names import format_option
from ckpt_tools.core.options import ConvertOptions
from ckpt_tools.core.transforms import TransformResult
from ckpt_tools.errors import UsageError

if TYPE_CHECKING:
    from ckpt_tools.core.filling import FillStep

ManifestStep: TypeAlias = Callable[[Manifest], TransformResult]
"""From one manifest to another, with notes."""

CastManifestStep: TypeAlias = Callable[[Manifest, Manifest], TransformResult]
"""The same, from a manifest whose weights are cast and the one before the cast."""


@dataclass(frozen=True, slots=True)
class AppliedOptions:
    """The manifest to write, with notes on what was left out. ``uncast_manifest`` is the same before the cast to other
    dtypes, ``new_name_by_old`` has the names that were changed."""

    manifest: Manifest
    uncast_manifest: Manifest
    new_name_by_old: Mapping[str, str]


class ReferenceSteps(Protocol):
    """The steps that make a manifest like a reference."""

    @property
    def excluded_names(self) -> frozenset[str]:
        """Names of the reference that ``exclude`` leaves out."""

    def match_names(self, manifest: Manifest, fill: FillStep | None) -> TransformResult:
        """The names, shapes and ties of the reference, with what ``fill`` has of them."""

    def match_dtypes(self, manifest: Manifest) -> TransformResult:
        """The dtypes of the reference."""


def apply_options(
    manifest: Manifest,
    options: ConvertOptions,
    *,
    writes_all_state: bool,
    holds_masters: bool,
    keeps_tree: bool = False,
    kept_entries: tuple[str, ...] = (),
    recipe: ManifestStep | None = None,
    merge: ManifestStep | None = None,
    like: ReferenceSteps | None = None,
    quantize: CastManifestStep | None = None,
    fill: FillStep | None = None,
) -> AppliedOptions:
    """The manifest as ``options`` make it.

    ``writes_all_state`` says that all state is written, ``holds_masters`` that fp32 masters have a place beside the
    weights, as they have where the source keeps them in the optimizer's state.
    ``kept_entries`` are entries that are written with the weights also if no other state is. ``recipe`` is the step of
    ``options.strip`` and ``options.recipe``; options that name tensors name those that it makes. ``merge`` is the step
    that merges an adapter into these. ``like`` comes last, so that the other options can leave out or rename what does
    not fit. ``fill`` adds weights that are lacking then. ``keeps_tree`` says that the target is a tree as the source
    is one. ``quantize`` is the step after the cast.

    Raises:
        UsageError: the options do not fit this checkpoint or each other. UnsupportedError: all state is written of
        weights and optimizer state under different names, and there is no recipe to join them.
    """
    # Tensors dropped -> weights joined with state -> choice of copies -> recipe -> adapter -> selection -> renaming
    # -> reference, filling -> cast -> quantizing.
    # Notes that an item was kept are dropped where a later step leaves it out (_run_steps, _is_superseded).
    source_dtypes = manifest.weight_dtypes
    notes = tuple(replace(note, asked=note.asked or options.state == "model") for note in manifest.notes)
    if options.drop:
        manifest, notes = _run_steps(manifest, notes, [lambda each: transforms.drop_tensors(each, tuple(options.drop))])
    if manifest.unjoined_state:
        manifest, notes = _run_steps(manifest, notes, [] if recipe is None else [recipe])
        recipe = None
        if manifest.unjoined_state and writes_all_state:
            raise transforms.make_unjoined_state_error(manifest)
    copy_steps: list[ManifestStep] = []
    weight_copy = options.choose_weight_copy(manifest)
    if not writes_all_state:
        copy_steps = [
            lambda each: transforms.keep_model_only(
                each, weight_copy=weight_copy, is_requested=options.state == "model", entry_names=kept_entries
            ),
            renaming.strip_wrappers,
        ]
    elif not (holds_masters or manifest.keeps_masters):
        copy_steps = [lambda each: transforms.keep_one_copy(each, weight_copy=weight_copy)]
    manifest, notes = _run_steps(manifest, notes, copy_steps)
    if manifest.values and (options.recipe is not None or merge is not None or like is not None):
        target_name = "a recipe, an adapter or another model's layout"
        manifest, new_notes = transforms.drop_values(manifest, target_name=target_name)
        notes += new_notes
    for step in (recipe, merge):
        if step is not None:
            manifest, new_notes = step(manifest)
            notes = (*(note for note in notes if not _is_superseded(note, new_notes)), *new_notes)
    if like is not None:
        manifest = replace(manifest, unreadable_names=manifest.unreadable_names | like.excluded_names)
    if fill is not None:
        # A glob may name one of these alone.
        manifest = replace(manifest, unreadable_names=manifest.unreadable_names | fill.names)
    manifest, notes = _run_steps(manifest, notes, _make_selection_steps(options))
    new_name = renaming.make_renamer(options.rename, options.names)
    new_name_by_old = renaming.find_changed_names(manifest, new_name) if options.rename or options.names else {}
    if new_name_by_old:
        manifest, _ = renaming.rename_tensors(manifest, new_name)
    if like is not None:
        manifest, new_notes = like.match_names(manifest, fill)
        notes += new_notes
    elif fill is not None:
        manifest, new_notes = fill.fill_missing(manifest)
        notes += new_notes
    if fill is not None and not any(note.outcome is Outcome.FILLED for note in notes):
        raise UsageError(f"{format_option('fill', fill.location)} has no weight that the output lacks")
    if keeps_tree:
        params_changed = options.recipe is not None or like is not None
        manifest, new_notes = _drop_param_numbers(manifest, params_changed=params_changed)
        notes += new_notes
    if not manifest.groups or (keeps_tree and manifest.tree is not None and manifest.tree.numbers):
        # The output has the numbers themselves, or no optimizer: the names assumed for them are not written.
        notes = tuple(note for note in notes if note.what != ASSUMED_ORDER_ITEM)
    check_expansion(manifest.tensors, manifest.stored_bytes)
    if like is not None:
        cast_manifest, new_notes = like.match_dtypes(manifest)
    else:
        cast_manifest, new_notes = transforms.cast_weights(manifest, options.target_dtype)
    if quantize is not None:
        cast_manifest, quantization_notes = quantize(cast_manifest, manifest)
        new_notes += quantization_notes
    are_weights_changed = bool(manifest.computed) or cast_manifest.weight_dtypes != source_dtypes
    if HEADER_ENTRY in cast_manifest.extra and are_weights_changed:
        reason = "carried as it is, and it may say of tensors what was true before this conversion"
        new_notes = (*new_notes, Note(Outcome.KEPT, HEADER_ENTRY, reason))
    return AppliedOptions(replace(cast_manifest, notes=notes + new_notes), manifest, new_name_by_old)


def _drop_param_numbers(manifest: Manifest, *, params_changed: bool) -> TransformResult:
    """The manifest with an optimizer of names, if it had numbers that would be of other parameters than in the source:
    ``params_changed``, or some are left out."""
    numbers = () if manifest.tree is None else manifest.tree.numbers
    if manifest.tree is None or not manifest.groups or not numbers:
        return manifest, ()
    if not params_changed and sum(len(group.params) for group in manifest.groups) == len(numbers):
        return manifest, ()
    why = "they are of other parameters than the source's; the optimizer has names, as get_optimizer_state_dict gives"
    note = Note(Outcome.DROPPED, "the numbers of the optimizer's parameters", why, len(numbers))
    return replace(manifest, tree=replace(manifest.tree, numbers=())), (note,)


def _collect_item_names(manifest: Manifest) -> frozenset[str]:
    """Names of tensors, tied ones too, and of entries: the items that a note can name as kept."""
    return frozenset([*manifest.fqns, *manifest.aliases, *map(str, manifest.extra)])


def _run_steps(manifest: Manifest, notes: tuple[Note, ...], steps: Iterable[ManifestStep]) -> TransformResult:
    """The manifest after ``steps``, with ``notes`` and the notes of the steps, but for those on items that a step left
    out."""
    first_manifest = manifest
    for step in steps:
        manifest, new_notes = step(manifest)
        notes += new_notes
    if manifest is first_manifest or all(note.outcome is not Outcome.KEPT for note in notes):
        return manifest, notes
    return manifest, drop_stale_notes(notes, _collect_item_names(first_manifest), _collect_item_names(manifest))


def _is_superseded(note: Note, later_notes: Collection[Note]) -> bool:
    """True if a part that was kept is left out by a recipe, as rows that are padding are."""
    dropped_parts = [each.what for each in later_notes if each.outcome is Outcome.DROPPED]
    return note.outcome is Outcome.KEPT and any(part.endswith(f" of {note.what}") for part in dropped_parts)


def _make_selection_steps(options: ConvertOptions) -> list[ManifestStep]:
    """Steps that find tensors by their names."""
    steps: list[ManifestStep] = []
    if options.buffers:
        steps.append(lambda manifest: transforms.mark_buffers(manifest, options.buffers))
    if options.rename or options.names:
        # Before names are chosen, so that a map of a whole model fits a part of it.
        steps.append(lambda manifest: renaming.check_renaming(manifest, options.rename, options.names))
    include, exclude = tuple(options.include), tuple(options.exclude)
    return [*steps, lambda manifest: transforms.select_tensors(manifest, include=include, exclude=exclude)]

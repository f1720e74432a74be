"""The manifest as the options of a conversion make it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from ckpt_tools.core import transforms
from ckpt_tools.core.manifest import Manifest
from ckpt_tools.core.notes import without_gone
from ckpt_tools.core.options import ConvertOptions


@dataclass(frozen=True, slots=True)
class Applied:
    """A manifest as it is to be written, whose notes say what was left behind; ``uncast`` is the same in the dtypes
    that it had, ``renamed`` has the new names by the old ones."""

    manifest: Manifest
    uncast: Manifest
    renamed: Mapping[str, str]


def apply_options(
    manifest: Manifest, options: ConvertOptions, *, whole: bool, holds_masters: bool, kept: tuple[str, ...] = ()
) -> Applied:
    """The manifest as ``options`` make it.

    ``whole`` says that all state is written, ``holds_masters`` that fp32 masters have a place beside the weights.
    ``kept`` are entries that are written with the weights also if no other state is.

    Raises:
        UsageError: the options do not fit this checkpoint or each other.
    """
    notes = tuple(replace(note, asked=note.asked or options.state == "model") for note in manifest.notes)
    before = _items(manifest)
    for step in _steps(options, whole, holds_masters, kept):
        manifest, more = step(manifest)
        notes += more
    notes = without_gone(notes, before, _items(manifest))
    new_name = transforms.substitutions(options.rename, options.names)
    renamed = transforms.new_names(manifest, new_name) if options.rename or options.names else {}
    if renamed:
        manifest, _ = transforms.rename(manifest, new_name)
    made, more = transforms.cast(manifest, options.target_dtype)
    return Applied(replace(made, notes=notes + more), manifest, renamed)


def _items(manifest: Manifest) -> frozenset[str]:
    """Names of tensors, tied ones too, and of entries: what a note can say was kept."""
    return frozenset([*manifest.fqns, *manifest.aliases, *map(str, manifest.extra)])


def _steps(
    options: ConvertOptions, whole: bool, holds_masters: bool, kept: tuple[str, ...]
) -> list[Callable[[Manifest], transforms.Transformed]]:
    asked = options.state == "model"
    steps: list[Callable[[Manifest], transforms.Transformed]] = []
    if not whole:
        steps.append(
            lambda manifest: transforms.model_only(manifest, weights=options.weight_copy, asked=asked, entries=kept)
        )
        steps.append(transforms.without_wrappers)
    elif not holds_masters:
        steps.append(lambda manifest: transforms.one_copy(manifest, weights=options.weight_copy))
    if options.buffers:
        steps.append(lambda manifest: transforms.with_buffers(manifest, options.buffers))
    if options.rename or options.names:
        # Before names are chosen, so that a map of a whole model fits a part of it.
        steps.append(lambda manifest: transforms.check_renaming(manifest, options.rename, options.names))
    steps.append(
        lambda manifest: transforms.select(manifest, include=tuple(options.include), exclude=tuple(options.exclude))
    )
    return steps

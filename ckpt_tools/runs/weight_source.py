"""The weights of a checkpoint that is read beside the one that is converted."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from ckpt_tools.core.filling import FillStep
from ckpt_tools.core.manifest import Manifest
from ckpt_tools.core.notes import Note
from ckpt_tools.core.options import ConvertOptions, ReadOptions
from ckpt_tools.core.renaming import strip_wrappers
from ckpt_tools.core.transforms import keep_model_only
from ckpt_tools.reading.opened import OpenedCheckpoint
from ckpt_tools.runs.opening import open_checkpoint
from ckpt_tools.stores.wrappers import RedirectingStore


@dataclass(frozen=True, slots=True)
class WeightSource:
    """The weights of one source: ``manifest`` holds no other state. ``notes`` say what was left out, ``label`` is where
    it is."""

    label: str
    manifest: Manifest
    notes: tuple[Note, ...]

    @classmethod
    def of(cls, opened: OpenedCheckpoint, options: ConvertOptions) -> WeightSource:
        """The fp32 masters of ``opened`` where there are some, under the names of the bare model."""
        manifest, copy = opened.manifest, options.choose_weight_copy(opened.manifest)
        # Entries are dropped later, where the target has no place for them.
        model, notes = keep_model_only(manifest, weight_copy=copy, is_requested=True, entry_names=[*manifest.extra])
        model, name_notes = strip_wrappers(model)
        return cls(str(opened.url), model, (*manifest.notes, *notes, *name_notes))

    def with_file_prefix(self, prefix: str) -> WeightSource:
        """The same, whose files have ``prefix`` in front of their names."""
        tensors = {key: entry.with_file_prefix(prefix) for key, entry in self.manifest.tensors.items()}
        pairs = [
            replace(
                pair,
                what=f"{pair.what} of {self.label}",
                first=pair.first.with_file_prefix(prefix),
                second=pair.second.with_file_prefix(prefix),
            )
            for pair in self.manifest.must_equal
        ]
        return replace(self, manifest=replace(self.manifest, tensors=tensors, must_equal=tuple(pairs)))

    @property
    def files(self) -> frozenset[str]:
        """The files of all tensors, and of those that are compared."""
        compared = chain.from_iterable((pair.first, pair.second) for pair in self.manifest.must_equal)
        return self.manifest.files.union(*(entry.shards.files for entry in compared))

    def list_names(self) -> dict[str, list[str]]:
        """Each weight with all of its names: its own, and those that are tied to it."""
        names_by_owner = {name: [name] for name in self.manifest.weights}
        for alias, owner in self.manifest.aliases.items():
            if owner in names_by_owner:
                names_by_owner[owner].append(alias)
        return names_by_owner


def open_fill(opened: OpenedCheckpoint, options: ConvertOptions, url: str | Path) -> tuple[OpenedCheckpoint, FillStep]:
    """``opened`` with the files of the checkpoint at ``url`` too, and the step that takes weights from it. Raises
    CkptError as ``open_checkpoint``."""
    other = open_checkpoint(url, ReadOptions(state="model"), storage_options=options.storage_options)
    source, prefix, manifest = WeightSource.of(other, options), "fill:", opened.manifest
    store = RedirectingStore(opened.source.store, {prefix + file: (other.source.store, file) for file in source.files})
    manifest = replace(
        manifest,
        decoding_bytes=manifest.decoding_bytes + other.manifest.decoding_bytes,
        stored_bytes=manifest.stored_bytes + other.manifest.stored_bytes,
    )
    step = FillStep(
        source.label, source.with_file_prefix(prefix).manifest, tuple(options.include), tuple(options.exclude)
    )
    return replace(opened, source=replace(opened.source, store=store), manifest=manifest), step

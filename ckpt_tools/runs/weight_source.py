"""The weights of checkpoints that are read beside each other: to average, to compare and to fill in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from ckpt_tools.core.casts import CASTABLE
from ckpt_tools.core.filling import FillStep
from ckpt_tools.core.manifest import EqualPair, Manifest, TensorEntry
from ckpt_tools.core.notes import Note
from ckpt_tools.core.options import ConvertOptions, ReadOptions
from ckpt_tools.core.renaming import strip_wrappers
from ckpt_tools.core.transforms import keep_model_only
from ckpt_tools.errors import UsageError
from ckpt_tools.messages.wording import join_names
from ckpt_tools.reading.opened import OpenedCheckpoint
from ckpt_tools.runs.opening import open_checkpoint
from ckpt_tools.stores.wrappers import RedirectingStore

MAX_NAMED = 10
"""Sources, or differences between them, that a message names."""


@dataclass(frozen=True, slots=True)
class WeightSource:
    """The weights of one source: ``manifest`` holds no other state. ``notes`` say what was left out, ``label`` is where
    it is."""

    label: str
    manifest: Manifest
    notes: tuple[Note, ...]

    @classmethod
    def of(cls, opened: OpenedCheckpoint, options: ConvertOptions, *, drops_entries: bool = False) -> WeightSource:
        """The fp32 masters of ``opened`` where there are some, under the names of the bare model. Entries are dropped
        later, where the target has no place for them, or here with ``drops_entries``."""
        manifest, copy = opened.manifest, options.choose_weight_copy(opened.manifest)
        entries = () if drops_entries else tuple(manifest.extra)
        model, notes = keep_model_only(manifest, weight_copy=copy, is_requested=True, entry_names=entries)
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


def match_weights(
    sources: Sequence[WeightSource],
    base: WeightSource,
    names_by_owner: Mapping[str, Sequence[str]],
    is_wanted: Callable[[Iterable[str]], bool],
    advice: str = "",
) -> tuple[dict[str, list[TensorEntry]], list[EqualPair]]:
    """For each weight of ``base`` in ``names_by_owner``, with its names there, that of every source; and pairs of
    tensors of a source that ``base`` ties, and that must be equal. Weights without a wanted name may be missing.

    Raises:
        UsageError: names, shapes or dtypes differ; ``advice`` is the end of its sentence.
    """
    all_names = set(chain.from_iterable(base.list_names().values()))
    found = {owner: list[TensorEntry]() for owner in names_by_owner}
    pairs, differences = list[EqualPair](), list[str]()
    for source in sources:
        source_names, weights, missing_names = source.list_names(), source.manifest.weights, list[str]()
        owners = {name: owner for owner, names in source_names.items() for name in names}
        for name, names in names_by_owner.items():
            # More than one where the source has tensors of their own for what the base ties.
            own_names = list(dict.fromkeys(owners[each] for each in names if each in owners))
            if not own_names:
                missing_names.append(name)
                continue
            first_name, *tied_names = own_names
            entry, wanted = weights[first_name], base.manifest.weights[name]
            found[name].append(entry)
            is_castable = entry.dtype is wanted.dtype or {entry.dtype, wanted.dtype} <= CASTABLE
            if entry.shape != wanted.shape or not is_castable:
                actual, expected = (f"{list(each.shape)} of {each.dtype.value}" for each in (entry, wanted))
                differences.append(f"{name} is {actual} in {source.label} and {expected} in {base.label}")
            tied = f"of {source.label}, which {base.label} ties"
            pairs += [EqualPair(f"{first_name} and {each} {tied}", entry, weights[each]) for each in tied_names]
        other_names = [n for n, names in source_names.items() if is_wanted(names) and all_names.isdisjoint(names)]
        differences += [f"{source.label} lacks {join_names(missing_names)}"] if missing_names else []
        differences += [f"{base.label} lacks {join_names(other_names)} of {source.label}"] if other_names else []
    if differences:
        more = f"; and {len(differences) - MAX_NAMED:,} more" if len(differences) > MAX_NAMED else ""
        shown = "; ".join(differences[:MAX_NAMED])
        raise UsageError(f"the sources do not hold the same tensors: {shown}{more}{advice}")
    return found, pairs


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

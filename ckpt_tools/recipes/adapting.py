"""A manifest with the names, shapes and ties of a reference that it fits. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

import numpy as np

from ckpt_tools.core.boxes import Shape
from ckpt_tools.core.manifest import WEIGHT, EqualPair, Kind, Manifest, StateKey, TensorEntry
from ckpt_tools.core.notes import Note, Outcome
from ckpt_tools.core.option_names import format_option
from ckpt_tools.core.transforms import TransformResult
from ckpt_tools.errors import UnsupportedError, UsageError
from ckpt_tools.messages.wording import format_count, join_names
from ckpt_tools.recipes.fitting import ReferenceFit, select_weights
from ckpt_tools.recipes.manifest_builder import MAX_ITEM_BYTES, ZEROS_FILE
from ckpt_tools.recipes.moves import FillBox
from ckpt_tools.recipes.reference import Reference, ReferenceTensor
from ckpt_tools.recipes.tables import ShardBoxes, join_boxes, split_table

_EMBEDDING = re.compile(
    r"(?:.*\.)?(?:embed_tokens|wte|word_embeddings|embed_in|tok_embeddings|lm_head|embed_out)\.(?:weight|bias)"
    r"|shared\.weight"
)
_HEAD = re.compile(r"(?:.*\.)?(?:lm_head|embed_out)\.weight")
"""Names that models give to embeddings and heads; they are needed if there is only a ``config.json``."""


def derive_tensors_from_config(reference: Reference, manifest: Manifest) -> Reference:
    """``reference``, which is only a ``config.json``, with the tensors of ``manifest`` as it describes them: rows of
    embeddings and head, and ties.

    Raises:
        UsageError: it has a vocabulary, and no tensor is of tokens.
    """
    weights, sizes = select_weights(manifest), reference.vocabulary_sizes
    tensors = {
        name: ReferenceTensor(_resize_to_vocabulary(name, entry, sizes), entry.dtype)
        for name, entry in weights.items()
        if not (reference.is_tied and _HEAD.fullmatch(name))
    }
    if reference.is_tied is False:
        tensors |= {alias: tensors[owner] for alias, owner in manifest.aliases.items()}
    if sizes and not any(shape and shape[0] in sizes for shape, _ in tensors.values()):
        raise UsageError(
            f"{format_option('like', reference.location)} has a vocabulary of "
            f"{join_names([f'{each:,}' for each in sizes])} tokens, and no tensor of the source has so many rows"
        )
    return replace(reference, tensors=tensors)


def _resize_to_vocabulary(name: str, entry: TensorEntry, sizes: Collection[int]) -> Shape:
    is_resized = len(sizes) == 1 and entry.shape and _EMBEDDING.fullmatch(name)
    return (*sizes, *entry.shape[1:]) if is_resized else entry.shape


def adapt_to_reference(fit: ReferenceFit, reference: Reference) -> TransformResult:
    """The manifest with the names, ties and numbers of rows of ``reference``, as ``fit`` found them. Every name must
    fit."""
    manifest = fit.manifest
    shapes = {name: entry.shape for name, entry in select_weights(manifest).items()}
    rows = {fit.owners.get(name, name): number for name, number in fit.num_rows.items()}
    rows |= {name: rows[owner] for name, tie in fit.ties.items() if (owner := fit.owners.get(tie, tie)) in rows}
    resized = {
        key: _resize_entry(key, entry, shapes[key.fqn], rows[key.fqn])
        for key, entry in manifest.tensors.items()
        if key.fqn in rows and entry.kind is not Kind.EXTRA
    }
    tensors = {**manifest.tensors, **resized}
    weights = {StateKey(name): tensors[StateKey(fit.owners.get(name, name))] for name in reference.tensors}
    new_manifest = replace(
        manifest,
        tensors={**weights, **_reassign_state(tensors, fit.ties)},
        aliases=reference.aliases,
        groups=tuple(
            replace(group, params=tuple(dict.fromkeys(fit.ties.get(name, name) for name in group.params)))
            for group in manifest.groups
        ),
        literals={**manifest.literals, **({ZEROS_FILE: bytes(MAX_ITEM_BYTES)} if rows else {})},
        must_equal=(*manifest.must_equal, *_iter_unverified_ties(fit, tensors)),
    )
    return new_manifest, tuple(_iter_notes(fit, reference, shapes))


def _resize_entry(key: StateKey, entry: TensorEntry, shape: Shape, rows: int) -> TensorEntry:
    """A weight of ``shape`` with ``rows`` rows, or its optimizer state; numbers such as a step stay as they are.

    Raises:
        UnsupportedError: the state has another shape, so that its rows are not known.
    """
    if entry.shape == shape:
        return resize_rows(entry, rows)
    if entry.numel <= 1:
        return entry
    raise UnsupportedError(
        f"{key.slot} of {key.fqn} has the shape {list(entry.shape)}, and the weight {list(shape)}: it cannot follow "
        f"it to the reference's vocabulary; convert the weights alone with {format_option('state', 'model')}"
    )


def resize_rows(entry: TensorEntry, rows: int) -> TensorEntry:
    """``entry`` with its first ``rows`` rows, or with rows of zeros behind its own, of the literal ``ZEROS_FILE``.

    Raises:
        UnsupportedError: a recipe has split the axes of the tensor.
    """
    before, *rest = entry.shape
    shape = (rows, *rest)
    boxes_before = split_table(entry.shards, entry.shape, entry.shape)
    stops = np.minimum(boxes_before.stops, np.array(shape, np.int64))
    kept = (stops > boxes_before.starts).all(axis=1)
    columns = (
        column[kept]
        for column in (boxes_before.rows, boxes_before.starts, stops, boxes_before.strides, boxes_before.offsets)
    )
    boxes = ShardBoxes(boxes_before.table, *columns)
    fills = [FillBox((before, *(0 for _ in rest)), (rows - before, *rest))] if rows > before else []
    table = join_boxes([boxes], fills, shape, entry.shards.dtype, ZEROS_FILE)
    return replace(entry, shape=shape, shards=table)


def _reassign_state(tensors: Mapping[StateKey, TensorEntry], ties: Mapping[str, str]) -> dict[StateKey, TensorEntry]:
    """All tensors except weights; optimizer state of a tie becomes that of its owner.

    Raises:
        UsageError: both have such state, so that they are not tied.
    """
    reassigned: dict[StateKey, TensorEntry] = {}
    for key, entry in tensors.items():
        if key.slot == WEIGHT and entry.kind is not Kind.EXTRA:
            continue
        owner_key = StateKey(ties.get(key.fqn, key.fqn), key.slot) if entry.kind is Kind.STATE else key
        if owner_key != key and owner_key in tensors:
            raise UsageError(f"{key.fqn} has optimizer state of its own, so that it is not tied to {owner_key.fqn}")
        reassigned[owner_key] = entry
    return reassigned


def _iter_unverified_ties(fit: ReferenceFit, tensors: Mapping[StateKey, TensorEntry]) -> Iterator[EqualPair]:
    for name in sorted(fit.unverified_ties):
        owner = fit.ties[name]
        owner_entry = tensors[StateKey(fit.owners.get(owner, owner))]
        advice = (
            f"to write both, take {format_option('config')} and {format_option('untie')} instead of "
            f"{format_option('like')}"
        )
        yield EqualPair(f"{name} and {owner}, which the reference ties", tensors[StateKey(name)], owner_entry, advice)


def _iter_notes(fit: ReferenceFit, reference: Reference, shapes: Mapping[str, Shape]) -> Iterator[Note]:
    for name, owner in fit.ties.items():
        if name in reference.aliases:
            continue
        yield Note(Outcome.DROPPED, name, f"tied to {owner}, which the reference holds alone", asked=True)
    for name, owner in fit.owners.items():
        yield Note(Outcome.DEFAULTED, name, f"written as a copy of {owner}: they are tied")
    for name, rows in fit.num_rows.items():
        rows_before = shapes[fit.owners.get(name, name)][0]
        what = f"{name}, rows {min(rows_before, rows):,} to {max(rows_before, rows) - 1:,}"
        num_changed = abs(rows - rows_before)
        why = f"the reference has {format_count(rows, 'token')}"
        if rows < rows_before:
            yield Note(Outcome.DROPPED, what, f"{why}, the source {rows_before:,}", num_changed, asked=True)
        else:
            yield Note(Outcome.DEFAULTED, what, f"{why}, the source {rows_before:,}: zeros", num_changed)

"""A manifest with the names, shapes and ties of a reference that it fits. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from ckpt_tools.core.boxes import Shape
from ckpt_tools.core.manifest import WEIGHT, EqualPair, Kind, Manifest, StateKey, TensorEntry
from ckpt_tools.core.notes import Note, Outcome
from ckpt_tools.core.option_names import format_option
from ckpt_tools.core.transforms import TransformResult
from ckpt_tools.core.wording import format_count, join_names
from ckpt_tools.errors import UnsupportedError, UsageError
from ckpt_tools.recipes.apply import MAX_ITEM_BYTES, ZEROS
from ckpt_tools.recipes.fitting import Fit, weights_of
from ckpt_tools.recipes.reference import Reference, Wanted
from ckpt_tools.recipes.rows import with_rows

_EMBEDDING = re.compile(
    r"(?:.*\.)?(?:embed_tokens|wte|word_embeddings|embed_in|tok_embeddings|lm_head|embed_out)\.(?:weight|bias)"
    r"|shared\.weight"
)
_HEAD = re.compile(r"(?:.*\.)?(?:lm_head|embed_out)\.weight")
"""Names that models give to embeddings and heads; they are needed if there is only a ``config.json``."""


def described_by_config(reference: Reference, manifest: Manifest) -> Reference:
    """``reference``, which is only a ``config.json``, with the tensors of ``manifest`` as it describes them: rows of
    embeddings and head, and ties.

    Raises:
        UsageError: it has a vocabulary, and no tensor is of tokens.
    """
    weights, sizes = weights_of(manifest), reference.vocabularies
    tensors = {
        name: Wanted(_shape_of_tokens(name, entry, sizes), entry.dtype)
        for name, entry in weights.items()
        if not (reference.is_tied and _HEAD.fullmatch(name))
    }
    if reference.is_tied is False:
        tensors |= {alias: tensors[owner] for alias, owner in manifest.aliases.items()}
    if sizes and not any(shape and shape[0] in sizes for shape, _ in tensors.values()):
        raise UsageError(
            f"{format_option('like', reference.place)} has a vocabulary of "
            f"{join_names([f'{each:,}' for each in sizes])} tokens, "
            "and no tensor of the source has so many rows"
        )
    return replace(reference, tensors=tensors)


def _shape_of_tokens(name: str, entry: TensorEntry, sizes: Collection[int]) -> Shape:
    is_resized = len(sizes) == 1 and entry.shape and _EMBEDDING.fullmatch(name)
    return (*sizes, *entry.shape[1:]) if is_resized else entry.shape


def adapted(found: Fit, reference: Reference) -> TransformResult:
    """The manifest as ``found`` says: no name is missing or left over."""
    manifest = found.manifest
    sizes = {name: entry.shape for name, entry in weights_of(manifest).items()}
    rows = {found.given.get(name, name): number for name, number in found.rows.items()}
    rows |= {name: rows[owner] for name, tie in found.ties.items() if (owner := found.given.get(tie, tie)) in rows}
    resized = {
        key: _resized(key, entry, sizes[key.fqn], rows[key.fqn])
        for key, entry in manifest.tensors.items()
        if key.fqn in rows and entry.kind is not Kind.EXTRA
    }
    tensors = {**manifest.tensors, **resized}
    weights = {StateKey(name): tensors[StateKey(found.given.get(name, name))] for name in reference.tensors}
    made = replace(
        manifest,
        tensors={**weights, **_others(tensors, found.ties)},
        aliases=reference.aliases,
        groups=tuple(
            replace(group, params=tuple(dict.fromkeys(found.ties.get(name, name) for name in group.params)))
            for group in manifest.groups
        ),
        literals={**manifest.literals, **({ZEROS: bytes(MAX_ITEM_BYTES)} if rows else {})},
        must_equal=(*manifest.must_equal, *_equals(found, tensors)),
    )
    return made, tuple(_notes(found, reference, sizes))


def _resized(key: StateKey, entry: TensorEntry, shape: Shape, rows: int) -> TensorEntry:
    """A weight of ``shape`` with ``rows`` rows, or its optimizer state; numbers such as a step stay as they are.

    Raises:
        UnsupportedError: the state has another shape, so that its rows are not known.
    """
    if entry.shape == shape:
        return with_rows(entry, rows)
    if entry.numel <= 1:
        return entry
    raise UnsupportedError(
        f"{key.slot} of {key.fqn} has the shape {list(entry.shape)}, and the weight {list(shape)}: it cannot follow "
        f"it to the reference's vocabulary; convert the weights alone with {format_option('state', 'model')}"
    )


def _others(tensors: Mapping[StateKey, TensorEntry], ties: Mapping[str, str]) -> dict[StateKey, TensorEntry]:
    """All tensors except weights; optimizer state of a tie becomes that of its owner.

    Raises:
        UsageError: both have such state, so that they are not tied.
    """
    found: dict[StateKey, TensorEntry] = {}
    for key, entry in tensors.items():
        if key.slot == WEIGHT and entry.kind is not Kind.EXTRA:
            continue
        owned = StateKey(ties.get(key.fqn, key.fqn), key.slot) if entry.kind is Kind.STATE else key
        if owned != key and owned in tensors:
            raise UsageError(f"{key.fqn} has optimizer state of its own, so that it is not tied to {owned.fqn}")
        found[owned] = entry
    return found


def _equals(found: Fit, tensors: Mapping[StateKey, TensorEntry]) -> Iterator[EqualPair]:
    for name in sorted(found.unproved):
        owner = found.ties[name]
        owned = tensors[StateKey(found.given.get(owner, owner))]
        otherwise = (
            f"to write both, take {format_option('config')} and {format_option('untie')} instead of "
            f"{format_option('like')}"
        )
        yield EqualPair(f"{name} and {owner}, which the reference ties", tensors[StateKey(name)], owned, otherwise)


def _notes(found: Fit, reference: Reference, sizes: Mapping[str, Shape]) -> Iterator[Note]:
    for name, owner in found.ties.items():
        if name in reference.aliases:
            continue
        yield Note(Outcome.DROPPED, name, f"tied to {owner}, which the reference holds alone", asked=True)
    for name, owner in found.given.items():
        yield Note(Outcome.DEFAULTED, name, f"written as a copy of {owner}: they are tied")
    for name, rows in found.rows.items():
        before = sizes[found.given.get(name, name)][0]
        what, more = f"{name}, rows {min(before, rows):,} to {max(before, rows) - 1:,}", abs(rows - before)
        why = f"the reference has {format_count(rows, 'token')}"
        if rows < before:
            yield Note(Outcome.DROPPED, what, f"{why}, the source {before:,}", more, asked=True)
        else:
            yield Note(Outcome.DEFAULTED, what, f"{why}, the source {before:,}: zeros", more)

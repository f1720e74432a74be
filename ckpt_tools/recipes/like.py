"""A manifest made like a reference: its names in its order, its shapes, its ties and its dtypes. Pure.

    names of the source ── mapping ──▶ names of the reference ── fit ──▶ owners, ties, rows ── adapt ──▶ like it

The names may be those of the reference as they are, without the prefix of a wrapper, or after a recipe. Which of these
it is follows from the reference: after exactly one of them names and shapes are the reference's (``ReferenceMatcher``).
Its vocabulary may have more or fewer rows, and what one side ties the other may hold twice (``fit_to_reference``). What
does not fit is one error with all names, before anything is written.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ckpt_tools.core import transforms
from ckpt_tools.core.boxes import Shape
from ckpt_tools.core.casts import CASTABLE
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.manifest import WEIGHT, EqualPair, Kind, Manifest, StateKey, TensorEntry
from ckpt_tools.core.matching import is_selected
from ckpt_tools.core.names import zero_numbers
from ckpt_tools.core.notes import Note, Outcome
from ckpt_tools.core.option_names import format_option
from ckpt_tools.core.shards import ShardTable
from ckpt_tools.core.transforms import TransformResult
from ckpt_tools.errors import CkptError, UnsupportedError, UsageError
from ckpt_tools.messages.wording import MAX_LISTED_NAMES, format_count, join_names
from ckpt_tools.recipes.growing import grow_entry
from ckpt_tools.recipes.manifest_builder import MAX_ITEM_BYTES, ZEROS_FILE
from ckpt_tools.recipes.tables import join_boxes, move_box

if TYPE_CHECKING:
    from ckpt_tools.core.filling import FillStep

_EMBEDDING = re.compile(
    r"(?:.*\.)?(?:embed_tokens|wte|word_embeddings|embed_in|tok_embeddings|lm_head|embed_out)\.(?:weight|bias)"
    r"|shared\.weight"
)
_HEAD = re.compile(r"(?:.*\.)?(?:lm_head|embed_out)\.weight")
"""Names that models give to embeddings and heads; they are needed if there is only a ``config.json``."""


class ReferenceTensor(NamedTuple):
    """A tensor of a reference."""

    shape: Shape
    dtype: DType


@dataclass(frozen=True, slots=True)
class Reference:
    """A model at ``location``. ``tensors`` are its weights by name, in its order, none if it is only a ``config.json``;
    ``aliases`` are further names that it gives to some of them. ``config`` is the content of ``config.json``; empty if
    there is none. ``files`` maps names to the files of a folder of safetensors; it is empty for any other format.
    ``excluded`` are names of tensors that the user leaves out."""

    location: str
    tensors: Mapping[str, ReferenceTensor] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    excluded: frozenset[str] = frozenset()

    def exclude_tensors(self, globs: Sequence[str]) -> Reference:
        """The reference without the tensors whose names match; these are ``excluded``."""
        names = [*self.tensors, *self.aliases]
        excluded = frozenset(name for name in names if globs and not is_selected(name, (), globs))
        tensors = {name: wanted for name, wanted in self.tensors.items() if name not in excluded}
        aliases = {alias: owner for alias, owner in self.aliases.items() if not {alias, owner} & excluded}
        return replace(self, tensors=tensors, aliases=aliases, excluded=excluded)

    @property
    def vocabulary_sizes(self) -> frozenset[int]:
        """Numbers of tokens: one, except in a few models of several parts."""
        return frozenset(found for found in self._iter_config_values("vocab_size") if type(found) is int and found > 0)

    @property
    def is_tied(self) -> bool | None:
        """True if the configuration says that head and embeddings are one tensor; None if it does not say."""
        return next((flag for flag in self._iter_config_values("tie_word_embeddings") if isinstance(flag, bool)), None)

    def _iter_config_values(self, key: str) -> Iterator[Any]:
        """Values of ``key`` in ``config.json``: the one at the top, then those of the parts of a model."""
        levels: list[Mapping[str, Any]] = [self.config]
        for level in levels:
            if key in level:
                yield level[key]
            levels += [value for value in level.values() if isinstance(value, dict)]


class NameMapping(NamedTuple):
    """A step that gives a manifest other names, and what it does in words, empty if nothing. ``is_for_model`` says that
    it is made for the model of the reference."""

    description: str
    apply: Callable[[Manifest], TransformResult]
    is_for_model: bool = False


UNCHANGED_NAMES = NameMapping("", lambda manifest: (manifest, ()))


class _MappingAttempt(NamedTuple):
    """The outcome of a mapping: its notes and how it fits, or its error."""

    mapping: NameMapping
    notes: tuple[Note, ...] = ()
    fit: ReferenceFit | None = None
    error: CkptError | None = None

    @property
    def num_misfits(self) -> float:
        """The number of tensors that do not fit; infinite if the mapping failed."""
        return float("inf") if self.fit is None else self.fit.num_misfits


@dataclass(frozen=True, slots=True)
class ReferenceMatcher:
    """A reference, and the mappings to its names that are tried: one set after the other, until one fits."""

    reference: Reference
    find_mappings: Callable[[Manifest], Iterable[Sequence[NameMapping]]]

    def match_names(self, manifest: Manifest, fill: FillStep | None = None) -> TransformResult:
        """The manifest with the names, shapes and ties of the reference; dtypes are left to ``match_dtypes``. Weights
        that it lacks are those of ``fill``.

        Raises:
            UsageError: names or shapes do not fit, or they fit after several mappings. CkptError: the recipe of the
            model cannot be applied.
        """
        # Sets of mappings are tried in order of likelihood. Of a set, the one that fits is taken; two that fit with
        # different elements are ambiguous; if none fits, the next set is tried. At the end the nearest misfit is
        # reported, unless the model's own recipe failed, which says more.
        tried: list[_MappingAttempt] = []
        for mappings in self.find_mappings(manifest):
            attempts = [self._try_mapping(each, manifest, fill) for each in mappings]
            fitting = _drop_equal_results([each for each in attempts if not each.num_misfits])
            if len(fitting) > 1:
                raise self._make_ambiguity_error(fitting)
            if fitting:
                return self._adapt_result(fitting[0])
            tried += attempts
        nearest = min(tried, key=lambda each: each.num_misfits)
        failed = next((each for each in tried if each.mapping.is_for_model and each.error is not None), None)
        if failed is not None and (nearest.fit is None or not nearest.mapping.is_for_model):
            raise self._make_mapping_error(failed)
        raise self._make_misfit_error(nearest)

    def match_dtypes(self, manifest: Manifest) -> TransformResult:
        """The manifest with the weights in the dtypes of the reference; in that of ``config.json``, and parameters
        alone, if there are no headers."""
        wanted = self.reference.tensors
        if not wanted:
            return transforms.cast_weights(manifest, self._config_dtype)
        cast = {
            StateKey(name): entry.cast_to(wanted[name].dtype)
            for name, entry in manifest.weights.items()
            if name in wanted
        }
        return replace(manifest, tensors={**manifest.tensors, **cast}), ()

    @property
    def excluded_names(self) -> frozenset[str]:
        """Names of the reference that the user leaves out."""
        return self.reference.excluded

    @property
    def config_folder(self) -> str | None:
        """The place of the reference, if it has a ``config.json``."""
        return self.reference.location if self.reference.config else None

    @property
    def _config_dtype(self) -> DType | None:
        name = self.reference.config.get("dtype") or self.reference.config.get("torch_dtype")
        known = {dtype.value: dtype for dtype in (DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16)}
        return known.get(name) if isinstance(name, str) else None

    @property
    def _option_text(self) -> str:
        return format_option("like", self.reference.location)

    def _try_mapping(self, mapping: NameMapping, manifest: Manifest, fill: FillStep | None) -> _MappingAttempt:
        """Raises UsageError if the reference is only a ``config.json`` of another vocabulary."""
        try:
            made, notes = mapping.apply(manifest)
        except CkptError as error:
            return _MappingAttempt(mapping, error=error)
        fill_notes = tuple[Note, ...]()
        if fill is not None and not self.reference.tensors:
            made, fill_notes = fill.fill_missing(made)
        reference = self.reference if self.reference.tensors else derive_tensors_from_config(self.reference, made)
        fit = fit_to_reference(made, reference)
        if fill is not None and self.reference.tensors and fit.missing_names:
            # What a tie of the model gives is not missing, and is not taken from elsewhere.
            made, fill_notes = fill.fill_missing(made, fit.missing_names)
            fit = fit_to_reference(made, reference)
        notes = (*notes, *fill_notes)
        return _MappingAttempt(mapping, notes, fit)

    def _adapt_result(self, result: _MappingAttempt) -> TransformResult:
        assert result.fit is not None, "it fits"
        made, notes = adapt_to_reference(result.fit)
        description = result.mapping.description
        mapping_notes = (
            (Note(Outcome.DEFAULTED, description, f"leads to the names of {self._option_text}"),) if description else ()
        )
        return made, (*result.notes, *mapping_notes, *notes)

    def _make_misfit_error(self, result: _MappingAttempt) -> UsageError:
        fit, description = result.fit, result.mapping.description
        assert fit is not None, "the names as they are can always be taken"
        parts = [f"after {description}"] if description else []
        parts += [f"the source lacks {summarize_names(fit.missing_names)}"] if fit.missing_names else []
        parts += [f"the reference lacks {summarize_names(fit.unexpected_names)}"] if fit.unexpected_names else []
        parts += [join_names(fit.mismatches, 2)] if fit.mismatches else []
        if fit.missing_names or fit.unexpected_names:
            parts.append(f"{format_option('exclude')} leaves out what is not to be written")
        if "quantization_config" in self.reference.config:
            parts.append("the reference is quantized: name a folder of the same model that is not")
        return UsageError(f"{self._option_text} does not fit: {'; '.join(parts)}")

    def _make_mapping_error(self, result: _MappingAttempt) -> CkptError:
        assert result.error is not None
        error = result.error
        return type(error)(f"{self._option_text} does not fit: after {result.mapping.description}: {error.message}")

    def _make_ambiguity_error(self, fitting: Sequence[_MappingAttempt]) -> UsageError:
        what = ", ".join(each.mapping.description or "the names as they are" for each in fitting)
        return UsageError(
            f"{self._option_text} fits in several ways ({what}); choose one with {format_option('recipe')}"
        )


def _drop_equal_results(fitting: Iterable[_MappingAttempt]) -> list[_MappingAttempt]:
    """The results without those that take the same elements of the same files as another one."""
    distinct_results: list[_MappingAttempt] = []
    for each in fitting:
        if not any(_is_same_fit(each.fit, other.fit) for other in distinct_results):
            distinct_results.append(each)
    return distinct_results


def _is_same_fit(one: ReferenceFit | None, other: ReferenceFit | None) -> bool:
    assert one is not None and other is not None, "both fit"
    first, second = one.manifest.weights, other.manifest.weights
    return (one.owners, one.ties, first.keys()) == (other.owners, other.ties, second.keys()) and all(
        has_same_elements(entry.shards, second[name].shards) and entry.plus == second[name].plus
        for name, entry in first.items()
    )


def has_same_elements(one: ShardTable, other: ShardTable) -> bool:
    """True if both tables take the same elements from the same places, in the same pieces."""
    columns = ("starts", "stops", "file_ids", "byte_starts", "byte_stops", "strides", "item_parts")
    return one is other or (
        (one.shape, one.dtype, one.framing, tuple(one.files))
        == (other.shape, other.dtype, other.framing, tuple(other.files))
        and all(np.array_equal(getattr(one, name), getattr(other, name)) for name in columns)
    )


@dataclass(frozen=True, slots=True)
class ReferenceFit:
    """A manifest whose ties are owned by names of the reference, beside that reference.

    ``owners`` maps names of the reference to the names that own their bytes here. ``ties`` maps names that the
    reference does not hold to names of the same bits that it holds; for those in ``unverified_ties`` the bits must be
    compared. ``num_rows`` has the new number of rows of each tensor that is cropped or padded to the reference's
    vocabulary. ``mismatches`` are sentences on shapes and dtypes.
    """

    manifest: Manifest
    reference: Reference
    owners: Mapping[str, str]
    ties: Mapping[str, str]
    unverified_ties: Collection[str]
    num_rows: Mapping[str, int]
    missing_names: tuple[str, ...]
    unexpected_names: tuple[str, ...]
    mismatches: tuple[str, ...]

    @property
    def num_misfits(self) -> int:
        """The number of tensors that do not fit."""
        return len(self.missing_names) + len(self.unexpected_names) + len(self.mismatches)


def fit_to_reference(manifest: Manifest, reference: Reference) -> ReferenceFit:
    """Compares the weights of ``manifest`` with those of ``reference``, which holds tensors."""
    # Names by where they are:
    #                       in the reference          not in the reference
    # in the source       shape, dtype compared     a tie (an alias, or to be proved by equal bytes), else unexpected
    #     not in the source   a tie, else missing       -
    expected, sizes = reference.tensors, reference.vocabulary_sizes
    manifest = transforms.reassign_owners(manifest, expected.__contains__)
    weights, aliases = manifest.weights, manifest.aliases
    owners = {name: aliases[name] for name in expected if name in aliases}
    ties = {alias: owner for alias, owner in aliases.items() if alias not in expected and owner in expected}
    # Embeddings and heads have a row for each token. Two of one shape may be tied, unless the configuration denies it.
    vocabulary = {name: shape for name, (shape, _) in expected.items() if shape and shape[0] in sizes}
    source_vocabulary = {name: weights[name].shape for name in vocabulary if name in weights}

    def find_owner_by_shape(shape: Shape) -> str | None:
        if reference.is_tied is False:
            return None
        return _get_single(name for name, own_shape in source_vocabulary.items() if own_shape == shape)

    def find_tied_name(name: str) -> str | None:
        if not reference.is_tied or name not in vocabulary:
            return None
        return _get_single(each for each in source_vocabulary if vocabulary[each] == vocabulary[name])

    owner_of_unexpected = {
        name: reference.aliases.get(name) or find_owner_by_shape(entry.shape)
        for name, entry in weights.items()
        if name not in expected
    }
    unverified_ties = {name: owner for name, owner in owner_of_unexpected.items() if owner is not None}
    owner_of_missing = {name: find_tied_name(name) for name in expected if name not in weights and name not in aliases}
    owners |= {name: owner for name, owner in owner_of_missing.items() if owner is not None}
    entry_by_name = {name: weights[owners.get(name, name)] for name in expected if owners.get(name, name) in weights}
    num_rows = {
        name: shape[0]
        for name, shape in vocabulary.items()
        if name in entry_by_name and _has_other_rows(entry_by_name[name].shape, shape)
    }
    return ReferenceFit(
        manifest,
        reference,
        owners=owners,
        ties={**ties, **unverified_ties},
        unverified_ties=frozenset(unverified_ties),
        num_rows=num_rows,
        missing_names=tuple(name for name, owner in owner_of_missing.items() if owner is None),
        unexpected_names=tuple(name for name, owner in owner_of_unexpected.items() if owner is None),
        mismatches=tuple(_find_mismatches(entry_by_name, expected, num_rows)),
    )


def _find_mismatches(
    entry_by_name: Mapping[str, TensorEntry],
    reference_tensors: Mapping[str, ReferenceTensor],
    resized_names: Collection[str],
) -> Iterator[str]:
    for name, entry in entry_by_name.items():
        shape, dtype = reference_tensors[name]
        if entry.shape != shape and name not in resized_names:
            yield f"{name} is {list(entry.shape)} in the source and {list(shape)} in the reference"
        elif entry.dtype is not dtype and not {entry.shards.dtype, dtype} <= CASTABLE:
            yield f"{name} is {entry.dtype.value} in the source and {dtype.value} in the reference"


def _has_other_rows(shape: Shape, expected: Shape) -> bool:
    """True if the shapes differ in the number of rows alone."""
    return len(shape) == len(expected) and shape != expected and shape[1:] == expected[1:]


def _get_single(names: Iterable[str]) -> str | None:
    candidates = list(names)
    return candidates[0] if len(candidates) == 1 else None


def summarize_names(names: Collection[str]) -> str:
    """Names in a sentence, those that differ in numbers alone as one group: ``12 tensors such as layers.61.norm``.
    Of too many groups, tensors of one module are one."""
    by_pattern: dict[tuple[str, ...], list[str]] = {}
    for name in names:
        by_pattern.setdefault(tuple(zero_numbers(name).split(".")), []).append(name)
    depth = max(map(len, by_pattern), default=0)
    groups = by_pattern
    while len(groups) > MAX_LISTED_NAMES and depth > 1:
        depth -= 1
        groups = {}
        for pattern, members in by_pattern.items():
            groups.setdefault(pattern[:depth], []).extend(members)
    texts = [
        members[0] if len(members) == 1 else f"{format_count(len(members), 'tensor')} such as {members[0]}"
        for members in groups.values()
    ]
    return join_names(texts)


def derive_tensors_from_config(reference: Reference, manifest: Manifest) -> Reference:
    """``reference``, which is only a ``config.json``, with the tensors of ``manifest`` as it describes them: rows of
    embeddings and head, and ties.

    Raises:
        UsageError: it has a vocabulary, and no tensor is of tokens.
    """
    sizes, tensors = reference.vocabulary_sizes, dict[str, ReferenceTensor]()
    for name, entry in manifest.weights.items():
        if not (reference.is_tied and _HEAD.fullmatch(name)):
            is_resized = len(sizes) == 1 and entry.shape and _EMBEDDING.fullmatch(name)
            shape = (*sizes, *entry.shape[1:]) if is_resized else entry.shape
            tensors[name] = ReferenceTensor(shape, entry.dtype)
    if reference.is_tied is False:
        tensors |= {alias: tensors[owner] for alias, owner in manifest.aliases.items()}
    if sizes and not any(shape and shape[0] in sizes for shape, _ in tensors.values()):
        raise UsageError(
            f"{format_option('like', reference.location)} has a vocabulary of "
            f"{join_names([f'{each:,}' for each in sizes])} tokens, and no tensor of the source has so many rows"
        )
    return replace(reference, tensors=tensors)


def adapt_to_reference(fit: ReferenceFit) -> TransformResult:
    """The manifest with the names, ties and numbers of rows of the reference. Every name must fit."""
    manifest, reference = fit.manifest, fit.reference
    shapes = {name: entry.shape for name, entry in manifest.weights.items()}
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
        groups=tuple(group.rename_params(fit.ties) for group in manifest.groups),
        literals={**manifest.literals, **({ZEROS_FILE: bytes(MAX_ITEM_BYTES)} if rows else {})},
        must_equal=(*manifest.must_equal, *_iter_unverified_ties(fit, tensors)),
    )
    return new_manifest, tuple(_iter_notes(fit, shapes))


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
    if rows >= entry.shape[0]:
        return grow_entry(entry, 0, rows)
    shape, origin = (rows, *entry.shape[1:]), (0,) * len(entry.shape)
    table = join_boxes(move_box(entry, origin, origin, shape), (), shape, entry.shards.dtype, ZEROS_FILE)
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


def _iter_notes(fit: ReferenceFit, shapes: Mapping[str, Shape]) -> Iterator[Note]:
    for name, owner in fit.ties.items():
        if name in fit.reference.aliases:
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

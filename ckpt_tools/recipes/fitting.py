"""The weights of a manifest beside those of a reference: what is the same tensor, and what does not fit. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from ckpt_tools.core import transforms
from ckpt_tools.core.boxes import Shape
from ckpt_tools.core.casts import CASTABLE
from ckpt_tools.core.manifest import WEIGHT, Kind, Manifest, TensorEntry
from ckpt_tools.core.names import zero_numbers
from ckpt_tools.messages.wording import MAX_LISTED_NAMES, format_count, join_names
from ckpt_tools.recipes.reference import Reference, ReferenceTensor


@dataclass(frozen=True, slots=True)
class ReferenceFit:
    """A manifest whose ties are owned by names of the reference, beside that reference.

    ``owners`` maps names of the reference to the names that own their bytes here. ``ties`` maps names that the
    reference does not hold to names of the same bits that it holds; for those in ``unverified_ties`` the bits must be
    compared. ``num_rows`` has the new number of rows of each tensor that is cropped or padded to the reference's
    vocabulary. ``mismatches`` are sentences on shapes and dtypes.
    """

    manifest: Manifest
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


def select_weights(manifest: Manifest) -> dict[str, TensorEntry]:
    """Parameters and buffers by name."""
    return {key.fqn: e for key, e in manifest.tensors.items() if key.slot == WEIGHT and e.kind is not Kind.EXTRA}


def fit_to_reference(manifest: Manifest, reference: Reference) -> ReferenceFit:
    """Compares the weights of ``manifest`` with those of ``reference``, which holds tensors."""
    # Names by where they are:
    #                       in the reference          not in the reference
    # in the source       shape, dtype compared     a tie (an alias, or to be proved by equal bytes), else unexpected
    #     not in the source   a tie, else missing       -
    expected = reference.tensors
    manifest = transforms.reassign_owners(manifest, expected.__contains__)
    weights, aliases = select_weights(manifest), manifest.aliases
    owners = {name: aliases[name] for name in expected if name in aliases}
    ties = {alias: owner for alias, owner in aliases.items() if alias not in expected and owner in expected}
    vocabulary = _Vocabulary.of(reference, weights)
    owner_of_unexpected = {
        name: reference.aliases.get(name) or vocabulary.find_owner_by_shape(entry.shape)
        for name, entry in weights.items()
        if name not in expected
    }
    unverified_ties = {name: owner for name, owner in owner_of_unexpected.items() if owner is not None}
    owner_of_missing = {
        name: vocabulary.find_tied_name(name) for name in expected if name not in weights and name not in aliases
    }
    owners |= {name: owner for name, owner in owner_of_missing.items() if owner is not None}
    entry_by_name = {name: weights[owners.get(name, name)] for name in expected if owners.get(name, name) in weights}
    num_rows = {
        name: expected[name].shape[0]
        for name in entry_by_name
        if vocabulary.is_resized(name, entry_by_name[name].shape)
    }
    return ReferenceFit(
        manifest,
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


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """Embeddings and heads. ``reference_shapes`` are those of the reference's tensors with a row for each token,
    ``source_shapes`` those of the source under these names; ``is_tied`` is what the configuration says."""

    reference_shapes: Mapping[str, Shape]
    source_shapes: Mapping[str, Shape]
    is_tied: bool | None

    @classmethod
    def of(cls, reference: Reference, weights: Mapping[str, TensorEntry]) -> _Vocabulary:
        sizes = reference.vocabulary_sizes
        shapes = {name: shape for name, (shape, _) in reference.tensors.items() if shape and shape[0] in sizes}
        source_shapes = {name: weights[name].shape for name in shapes if name in weights}
        return cls(shapes, source_shapes, reference.is_tied)

    def is_resized(self, name: str, shape: Shape) -> bool:
        """True if a tensor of ``shape`` becomes the tensor ``name`` when rows are added or left out."""
        expected = self.reference_shapes.get(name, ())
        return len(shape) == len(expected) > 0 and shape[0] != expected[0] and shape[1:] == expected[1:]

    def find_owner_by_shape(self, shape: Shape) -> str | None:
        """The tensor to which one of ``shape``, which the reference lacks, may be tied: the only one of the vocabulary
        with this shape, unless the configuration says that none is tied."""
        if self.is_tied is False:
            return None
        return _get_single(name for name, held in self.source_shapes.items() if held == shape)

    def find_tied_name(self, name: str) -> str | None:
        """The tensor that ``name``, which the source lacks, is tied to, if the configuration says that it is."""
        shapes = self.reference_shapes
        if not self.is_tied or name not in shapes:
            return None
        return _get_single(each for each in self.source_shapes if shapes[each] == shapes[name])


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

"""The weights of a manifest beside those of a reference: what is the same tensor, and what does not fit. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from ckpt_tools.core import transforms
from ckpt_tools.core.boxes import Shape
from ckpt_tools.core.casts import CASTABLE
from ckpt_tools.core.manifest import WEIGHT, Kind, Manifest, TensorEntry
from ckpt_tools.core.names import zero_numbers
from ckpt_tools.core.wording import MAX_LISTED_NAMES, format_count, join_names
from ckpt_tools.recipes.reference import Reference, Wanted


@dataclass(frozen=True, slots=True)
class Fit:
    """A manifest whose ties are owned by names of the reference, beside that reference.

    ``given`` maps names of the reference to the names that own their bytes here. ``ties`` maps names that the
    reference does not hold to the ones of the same bits that it holds; the bits of ``unproved`` ones must be compared.
    ``rows`` are the numbers of rows of tensors that are cropped or padded to the reference's vocabulary.
    ``missing`` and ``left_over`` are names, ``wrong`` sentences on shapes and dtypes.
    """

    manifest: Manifest
    given: Mapping[str, str]
    ties: Mapping[str, str]
    unproved: Collection[str]
    rows: Mapping[str, int]
    missing: tuple[str, ...]
    left_over: tuple[str, ...]
    wrong: tuple[str, ...]

    @property
    def distance(self) -> int:
        """The number of tensors that do not fit."""
        return len(self.missing) + len(self.left_over) + len(self.wrong)


def weights_of(manifest: Manifest) -> dict[str, TensorEntry]:
    """Parameters and buffers by name."""
    return {key.fqn: e for key, e in manifest.tensors.items() if key.slot == WEIGHT and e.kind is not Kind.EXTRA}


def fit(manifest: Manifest, reference: Reference) -> Fit:
    """Compares the weights of ``manifest`` with those of ``reference``, which holds tensors."""
    wanted = reference.tensors
    manifest = transforms.reassign_owners(manifest, wanted.__contains__)
    weights, aliases = weights_of(manifest), manifest.aliases
    given = {name: aliases[name] for name in wanted if name in aliases}
    ties = {alias: owner for alias, owner in aliases.items() if alias not in wanted and owner in wanted}
    vocabulary = _Vocabulary.of(reference, weights)
    found = {
        name: reference.aliases.get(name) or vocabulary.owner_of(entry.shape)
        for name, entry in weights.items()
        if name not in wanted
    }
    unproved = {name: owner for name, owner in found.items() if owner is not None}
    lacking = {name: vocabulary.tied_to(name) for name in wanted if name not in weights and name not in aliases}
    given |= {name: owner for name, owner in lacking.items() if owner is not None}
    held = {name: weights[given.get(name, name)] for name in wanted if given.get(name, name) in weights}
    rows = {name: wanted[name].shape[0] for name in held if vocabulary.is_resized(name, held[name].shape)}
    return Fit(
        manifest,
        given=given,
        ties={**ties, **unproved},
        unproved=frozenset(unproved),
        rows=rows,
        missing=tuple(name for name, owner in lacking.items() if owner is None),
        left_over=tuple(name for name, owner in found.items() if owner is None),
        wrong=tuple(_wrong(held, wanted, rows)),
    )


def _wrong(held: Mapping[str, TensorEntry], wanted: Mapping[str, Wanted], rows: Collection[str]) -> Iterator[str]:
    for name, entry in held.items():
        shape, dtype = wanted[name]
        if entry.shape != shape and name not in rows:
            yield f"{name} is {list(entry.shape)} in the source and {list(shape)} in the reference"
        elif entry.dtype is not dtype and not {entry.shards.dtype, dtype} <= CASTABLE:
            yield f"{name} is {entry.dtype.value} in the source and {dtype.value} in the reference"


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """Embeddings and heads. ``wanted`` are the shapes of the reference's tensors with a row for each token, ``held``
    those of the source under these names, ``is_tied`` is what the configuration says."""

    wanted: Mapping[str, Shape]
    held: Mapping[str, Shape]
    is_tied: bool | None

    @classmethod
    def of(cls, reference: Reference, weights: Mapping[str, TensorEntry]) -> _Vocabulary:
        sizes = reference.vocabularies
        wanted = {name: shape for name, (shape, _) in reference.tensors.items() if shape and shape[0] in sizes}
        held = {name: weights[name].shape for name in wanted if name in weights}
        return cls(wanted, held, reference.is_tied)

    def is_resized(self, name: str, shape: Shape) -> bool:
        """True if a tensor of ``shape`` becomes the tensor ``name`` when rows are added or left out."""
        wanted = self.wanted.get(name, ())
        return len(shape) == len(wanted) > 0 and shape[0] != wanted[0] and shape[1:] == wanted[1:]

    def owner_of(self, shape: Shape) -> str | None:
        """The tensor that one of ``shape``, which the reference lacks, may be tied to: the only one of tokens with this
        shape, unless the configuration says that none is tied."""
        return None if self.is_tied is False else _only(name for name, held in self.held.items() if held == shape)

    def tied_to(self, name: str) -> str | None:
        """The tensor that ``name``, which the source lacks, is tied to, if the configuration says that it is."""
        if not self.is_tied or name not in self.wanted:
            return None
        return _only(each for each in self.held if self.wanted[each] == self.wanted[name])


def _only(names: Iterable[str]) -> str | None:
    found = list(names)
    return found[0] if len(found) == 1 else None


def grouped(names: Collection[str]) -> str:
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

"""A manifest made like a reference: its names in its order, its shapes, its ties and its dtypes. Pure.

The names may be those of the reference as they are, without the prefix of a wrapper, or after a recipe. Which of these
it is follows from the reference: after exactly one of them names and shapes are the reference's. What does not fit is
one error with all names, before anything is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from ckpt_tools.core import transforms
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.manifest import WEIGHT, Kind, Manifest
from ckpt_tools.core.notes import Note, Outcome
from ckpt_tools.core.option_names import format_option
from ckpt_tools.core.shards import ShardTable
from ckpt_tools.core.transforms import TransformResult
from ckpt_tools.errors import CkptError, UsageError
from ckpt_tools.messages.wording import join_names
from ckpt_tools.recipes.adapting import adapt_to_reference, derive_tensors_from_config
from ckpt_tools.recipes.fitting import ReferenceFit, fit_to_reference, select_weights, summarize_names
from ckpt_tools.recipes.reference import Reference


class NameMapping(NamedTuple):
    """A step that gives a manifest other names, and what it does in words, empty if nothing. ``is_for_model`` says that
    it is made for the model of the reference."""

    description: str
    apply: Callable[[Manifest], TransformResult]
    is_for_model: bool = False


UNCHANGED_NAMES = NameMapping("", lambda manifest: (manifest, ()))


class _MappingResult(NamedTuple):
    """What a mapping led to: its notes and how it fits, or its error."""

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

    def match_names(self, manifest: Manifest) -> TransformResult:
        """The manifest with the names, shapes and ties of the reference; dtypes are left to ``match_dtypes``.

        Raises:
            UsageError: names or shapes do not fit, or they fit after several mappings. CkptError: the recipe of the
            model cannot be applied.
        """
        if not self.reference.tensors:
            return self._match_config_alone(manifest)
        # Sets of mappings are tried in order of likelihood. Of a set, the one that fits is taken; two that fit with
        # different elements are ambiguous; if none fits, the next set is tried. At the end the nearest misfit is
        # reported, unless the model's own recipe failed, which says more.
        tried: list[_MappingResult] = []
        for several in self.find_mappings(manifest):
            found = [self._try_mapping(way, manifest) for way in several]
            fitting = _drop_equal_results([each for each in found if not each.num_misfits])
            if len(fitting) > 1:
                raise self._make_ambiguity_error(fitting)
            if fitting:
                return self._adapt_result(fitting[0], self.reference)
            tried += found
        nearest = min(tried, key=lambda each: each.num_misfits)
        failed = next((each for each in tried if each.mapping.is_for_model and each.error is not None), None)
        if failed is not None and not nearest.mapping.is_for_model:
            raise self._make_mapping_error(failed)
        return self._adapt_result(nearest, self.reference)

    def match_dtypes(self, manifest: Manifest) -> TransformResult:
        """The manifest with the weights in the dtypes of the reference; in that of ``config.json``, and parameters
        alone, if there are no headers."""
        wanted = self.reference.tensors
        if not wanted:
            return transforms.cast_weights(manifest, self._config_dtype)
        tensors = {
            key: entry.cast_to(wanted[key.fqn].dtype)
            if key.slot == WEIGHT and entry.kind is not Kind.EXTRA and key.fqn in wanted
            else entry
            for key, entry in manifest.tensors.items()
        }
        return replace(manifest, tensors=tensors), ()

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

    def _match_config_alone(self, manifest: Manifest) -> TransformResult:
        """Works with a ``config.json`` alone: after the recipe of the model's type that takes the names of the
        source, else with these names; with its vocabulary and its ties."""
        mappings = [way for several in self.find_mappings(manifest) for way in several if way.is_for_model]
        outcomes = [(way, _apply_mapping(way, manifest)) for way in mappings]
        successes = [(way, found) for way, found in outcomes if not isinstance(found, CkptError)]
        if len(successes) > 1:
            raise self._make_ambiguity_error([_MappingResult(way) for way, _ in successes])
        failed = next(
            (_MappingResult(way, error=found) for way, found in outcomes if isinstance(found, CkptError)), None
        )
        if failed is not None and not successes:
            raise self._make_mapping_error(failed)
        way, (made, notes) = successes[0] if successes else (UNCHANGED_NAMES, (manifest, ()))
        described = derive_tensors_from_config(self.reference, made)
        return self._adapt_result(_MappingResult(way, notes, fit_to_reference(made, described)), described)

    def _try_mapping(self, mapping: NameMapping, manifest: Manifest) -> _MappingResult:
        found = _apply_mapping(mapping, manifest)
        if isinstance(found, CkptError):
            return _MappingResult(mapping, error=found)
        made, notes = found
        return _MappingResult(mapping, notes, fit_to_reference(made, self.reference))

    def _adapt_result(self, result: _MappingResult, reference: Reference) -> TransformResult:
        """Raises UsageError if it does not fit."""
        assert result.fit is not None, "the names as they are can always be taken"
        if result.num_misfits:
            raise self._make_misfit_error(result.mapping, result.fit)
        made, notes = adapt_to_reference(result.fit, reference)
        description = result.mapping.description
        mapping_notes = (
            (Note(Outcome.DEFAULTED, description, f"leads to the names of {self._option_text}"),) if description else ()
        )
        return made, (*result.notes, *mapping_notes, *notes)

    def _make_misfit_error(self, mapping: NameMapping, fit: ReferenceFit) -> UsageError:
        parts = [f"after {mapping.description}"] if mapping.description else []
        parts += [f"the source lacks {summarize_names(fit.missing_names)}"] if fit.missing_names else []
        parts += [f"the reference lacks {summarize_names(fit.unexpected_names)}"] if fit.unexpected_names else []
        parts += [join_names(fit.mismatches, 2)] if fit.mismatches else []
        if fit.missing_names or fit.unexpected_names:
            parts.append(f"{format_option('exclude')} leaves out what is not to be written")
        if "quantization_config" in self.reference.config:
            parts.append("the reference is quantized: name a folder of the same model that is not")
        return UsageError(f"{self._option_text} does not fit: {'; '.join(parts)}")

    def _make_mapping_error(self, result: _MappingResult) -> CkptError:
        assert result.error is not None
        error = result.error
        return type(error)(f"{self._option_text} does not fit: after {result.mapping.description}: {error.message}")

    def _make_ambiguity_error(self, fitting: Sequence[_MappingResult]) -> UsageError:
        what = ", ".join(each.mapping.description or "the names as they are" for each in fitting)
        return UsageError(
            f"{self._option_text} fits in several ways ({what}); choose one with {format_option('recipe')}"
        )


def _apply_mapping(mapping: NameMapping, manifest: Manifest) -> TransformResult | CkptError:
    try:
        return mapping.apply(manifest)
    except CkptError as error:
        return error


def _drop_equal_results(fitting: Iterable[_MappingResult]) -> list[_MappingResult]:
    """The results without those that take the same elements of the same files as another one."""
    distinct_results: list[_MappingResult] = []
    for each in fitting:
        if not any(_is_same_fit(each.fit, other.fit) for other in distinct_results):
            distinct_results.append(each)
    return distinct_results


def _is_same_fit(one: ReferenceFit | None, other: ReferenceFit | None) -> bool:
    assert one is not None and other is not None, "both fit"
    first, second = select_weights(one.manifest), select_weights(other.manifest)
    return (one.owners, one.ties) == (other.owners, other.ties) and all(
        has_same_elements(entry.shards, second[name].shards) and entry.plus == second[name].plus
        for name, entry in first.items()
    )


def has_same_elements(one: ShardTable, other: ShardTable) -> bool:
    """True if both tables take the same elements from the same places, in the same pieces."""
    columns = ("starts", "stops", "file_ids", "byte_starts", "byte_stops", "strides", "inner")
    return one is other or (
        (one.shape, one.dtype, one.framing, tuple(one.files))
        == (other.shape, other.dtype, other.framing, tuple(other.files))
        and all(np.array_equal(getattr(one, name), getattr(other, name)) for name in columns)
    )

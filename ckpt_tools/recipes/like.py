"""A manifest made like a reference: its names in its order, its shapes, its ties and its dtypes. Pure.

The names may be those of the reference as they are, without the prefix of a wrapper, or after a recipe. Which of these
it is follows from the reference: after exactly one of them names and shapes are the reference's. What does not fit is
one error with all names, before anything is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ckpt_tools.core import transforms
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.manifest import WEIGHT, Kind, Manifest
from ckpt_tools.core.notes import Note, Outcome
from ckpt_tools.core.option_names import format_option
from ckpt_tools.core.transforms import TransformResult
from ckpt_tools.core.wording import join_names
from ckpt_tools.errors import CkptError, UsageError
from ckpt_tools.recipes.adapting import adapted, described_by_config
from ckpt_tools.recipes.fitting import Fit, fit, grouped, weights_of
from ckpt_tools.recipes.reference import Reference
from ckpt_tools.recipes.rows import has_same_elements


class Way(NamedTuple):
    """A way to other names: what is done, empty for nothing, and the step that does it. ``is_of_model`` says that it is
    made for the model of the reference."""

    what: str
    step: Callable[[Manifest], TransformResult]
    is_of_model: bool = False


AS_IT_IS = Way("", lambda manifest: (manifest, ()))


class _Tried(NamedTuple):
    """The result of a way and how it fits, or its error."""

    way: Way
    notes: tuple[Note, ...] = ()
    fit: Fit | None = None
    error: CkptError | None = None

    @property
    def distance(self) -> float:
        """The number of tensors that do not fit; without end where the way cannot be gone."""
        return float("inf") if self.fit is None else self.fit.distance


@dataclass(frozen=True, slots=True)
class Like:
    """The reference, and the ways to its names that are tried: one set after the other, until one fits."""

    reference: Reference
    ways: Callable[[Manifest], Iterable[Sequence[Way]]]

    def match_names(self, manifest: Manifest) -> TransformResult:
        """The manifest with the names, shapes and ties of the reference; dtypes are left to ``match_dtypes``.

        Raises:
            UsageError: names or shapes do not fit, or after several ways they do. CkptError: the recipe of the model
            cannot be applied.
        """
        if not self.reference.tensors:
            return self._by_configuration(manifest)
        tried: list[_Tried] = []
        for several in self.ways(manifest):
            found = [self._try(way, manifest) for way in several]
            fitting = _distinct([each for each in found if not each.distance])
            if len(fitting) > 1:
                raise self._ambiguous(fitting)
            if fitting:
                return self._made(fitting[0], self.reference)
            tried += found
        nearest = min(tried, key=lambda each: each.distance)
        failed = next((each for each in tried if each.way.is_of_model and each.error is not None), None)
        if failed is not None and not nearest.way.is_of_model:
            raise self._unusable(failed)
        return self._made(nearest, self.reference)

    def match_dtypes(self, manifest: Manifest) -> TransformResult:
        """The manifest with the weights in the dtypes of the reference; in that of ``config.json``, and parameters
        alone, if there are no headers."""
        wanted = self.reference.tensors
        if not wanted:
            return transforms.cast_weights(manifest, self._dtype_of_config)
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
    def folder_of_config(self) -> str | None:
        """The place of the reference, if it has a ``config.json``."""
        return self.reference.place if self.reference.config else None

    @property
    def _dtype_of_config(self) -> DType | None:
        name = self.reference.config.get("dtype") or self.reference.config.get("torch_dtype")
        known = {dtype.value: dtype for dtype in (DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16)}
        return known.get(name) if isinstance(name, str) else None

    @property
    def _option(self) -> str:
        return format_option("like", self.reference.place)

    def _by_configuration(self, manifest: Manifest) -> TransformResult:
        """Works with a ``config.json`` alone: after the recipe of the model's type that takes the names of the
        source, else with these names; with its vocabulary and its ties."""
        ways = [way for several in self.ways(manifest) for way in several if way.is_of_model]
        tried = [(way, _gone(way, manifest)) for way in ways]
        after = [(way, found) for way, found in tried if not isinstance(found, CkptError)]
        if len(after) > 1:
            raise self._ambiguous([_Tried(way) for way, _ in after])
        failed = next((_Tried(way, error=found) for way, found in tried if isinstance(found, CkptError)), None)
        if failed is not None and not after:
            raise self._unusable(failed)
        way, (made, notes) = after[0] if after else (AS_IT_IS, (manifest, ()))
        described = described_by_config(self.reference, made)
        return self._made(_Tried(way, notes, fit(made, described)), described)

    def _try(self, way: Way, manifest: Manifest) -> _Tried:
        found = _gone(way, manifest)
        if isinstance(found, CkptError):
            return _Tried(way, error=found)
        made, notes = found
        return _Tried(way, notes, fit(made, self.reference))

    def _made(self, tried: _Tried, reference: Reference) -> TransformResult:
        """Raises UsageError if it does not fit."""
        assert tried.fit is not None, "the names as they are can always be taken"
        if tried.distance:
            raise self._misfit(tried.way, tried.fit)
        made, notes = adapted(tried.fit, reference)
        what = tried.way.what
        way = (Note(Outcome.DEFAULTED, what, f"leads to the names of {self._option}"),) if what else ()
        return made, (*tried.notes, *way, *notes)

    def _misfit(self, way: Way, found: Fit) -> UsageError:
        parts = [f"after {way.what}"] if way.what else []
        parts += [f"the source lacks {grouped(found.missing)}"] if found.missing else []
        parts += [f"the reference lacks {grouped(found.left_over)}"] if found.left_over else []
        parts += [join_names(found.wrong, 2)] if found.wrong else []
        if found.missing or found.left_over:
            parts.append(f"{format_option('exclude')} leaves out what is not to be written")
        if "quantization_config" in self.reference.config:
            parts.append("the reference is quantized: name a folder of the same model that is not")
        return UsageError(f"{self._option} does not fit: {'; '.join(parts)}")

    def _unusable(self, tried: _Tried) -> CkptError:
        assert tried.error is not None
        error = tried.error
        return type(error)(f"{self._option} does not fit: after {tried.way.what}: {error.message}")

    def _ambiguous(self, fitting: Sequence[_Tried]) -> UsageError:
        what = ", ".join(each.way.what or "the names as they are" for each in fitting)
        return UsageError(f"{self._option} fits in several ways ({what}); choose one with {format_option('recipe')}")


def _gone(way: Way, manifest: Manifest) -> TransformResult | CkptError:
    try:
        return way.step(manifest)
    except CkptError as error:
        return error


def _distinct(fitting: Iterable[_Tried]) -> list[_Tried]:
    """One of each set that takes the same elements of the same files."""
    found: list[_Tried] = []
    for each in fitting:
        if not any(_is_same(each.fit, other.fit) for other in found):
            found.append(each)
    return found


def _is_same(one: Fit | None, other: Fit | None) -> bool:
    assert one is not None and other is not None, "both fit"
    first, second = weights_of(one.manifest), weights_of(other.manifest)
    return (one.given, one.ties) == (other.given, other.ties) and all(
        has_same_elements(entry.shards, second[name].shards) and entry.plus == second[name].plus
        for name, entry in first.items()
    )

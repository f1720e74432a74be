"""Weights that a manifest lacks, from another checkpoint. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

from ckpt_tools.core.boxes import Shape
from ckpt_tools.core.manifest import Kind, Manifest, StateKey, TensorEntry
from ckpt_tools.core.matching import is_selected
from ckpt_tools.core.notes import Note, Outcome
from ckpt_tools.core.option_names import format_option
from ckpt_tools.core.quantized import find_uncastable_keys
from ckpt_tools.core.transforms import TransformResult, reassign_owners
from ckpt_tools.errors import UnsupportedError, UsageError
from ckpt_tools.messages.wording import format_count, join_names

MAX_LISTED_MISMATCHES = 2


@dataclass(frozen=True, slots=True)
class FillStep:
    """The weights of the checkpoint at ``location``, by the names that the output is to have; ``manifest`` holds no
    other state, and its files have names of their own. ``include`` and ``exclude`` choose among them."""

    location: str
    manifest: Manifest
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self.manifest.weights) | frozenset(self.manifest.aliases)

    def fill_missing(self, manifest: Manifest, wanted: Collection[str] | None = None) -> TransformResult:
        """``manifest`` with the weights that it lacks: those of ``wanted``, whose shapes are compared later, or all.
        None of its own is replaced.

        Raises:
            UsageError: the manifest has optimizer state, or is of another model.
            UnsupportedError: what would be added is quantized.
        """
        own_names = {*manifest.fqns, *manifest.aliases}
        found = reassign_owners(self.manifest, own_names.__contains__)

        def is_missing(name: str) -> bool:
            is_wanted = name not in own_names if wanted is None else name in wanted
            return is_wanted and is_selected(name, self.include, self.exclude)

        if found.aliases:
            found = reassign_owners(found, lambda name: name in own_names or is_missing(name))
        added = {name: entry for name, entry in found.weights.items() if is_missing(name)}
        aliases = {name: owner for name, owner in found.aliases.items() if is_missing(name)}
        if wanted is None:
            self._check_same_model(manifest, added)
        if not added:
            return manifest, ()
        if manifest.groups or manifest.select_kinds(Kind.STATE):
            ways = f"{format_option('state', 'model')} or {format_option('to', 'safetensors')}"
            text = f"has no optimizer state for {join_names([*added])}; {ways} writes the weights alone"
            raise UsageError(f"{self._option_text} {text}")
        quantized_names = [key.fqn for key in find_uncastable_keys(self.manifest) if key.fqn in added]
        if quantized_names:
            way = f"convert it first, with {format_option('dequantize', True)}"
            raise UnsupportedError(f"{self._option_text}: {join_names(sorted(quantized_names))} is quantized; {way}")
        result = replace(
            manifest,
            tensors={**manifest.tensors, **{StateKey(name): entry for name, entry in added.items()}},
            aliases={**manifest.aliases, **{name: owner for name, owner in aliases.items() if owner in added}},
            must_equal=(*manifest.must_equal, *self.manifest.must_equal),
        )
        return result, tuple(self._iter_notes(manifest, added, aliases))

    def _check_same_model(self, manifest: Manifest, added: Mapping[str, TensorEntry]) -> None:
        """Raises UsageError if a weight that both have has another shape, or both have all of the output's under
        different names."""
        own, other = manifest.weights, self.manifest.weights
        mismatches = [
            f"{name} is {list(entry.shape)} in the source and {list(other[name].shape)} there"
            for name, entry in own.items()
            if name in other and other[name].shape != entry.shape
        ]
        if mismatches:
            named = join_names(mismatches, MAX_LISTED_MISMATCHES)
            way = f"{format_option('like')} says which names and shapes are needed"
            raise UsageError(f"{self._option_text} is not of the same model: {named}; {way}")
        foreign_shapes = Counter[Shape](entry.shape for name, entry in own.items() if name not in other)
        if 2 * foreign_shapes.total() > len(own) and foreign_shapes <= Counter(each.shape for each in added.values()):
            one, two = next(name for name in own if name not in other), next(iter(added))
            ways = f"{format_option('recipe')} or {format_option('rename')}"
            raise UsageError(
                f"{self._option_text} has the output's own weights under other names ({two} where the output has "
                f"{one}); give both the same names with {ways}"
            )

    def _iter_notes(
        self, manifest: Manifest, added: Mapping[str, TensorEntry], aliases: Mapping[str, str]
    ) -> Iterator[Note]:
        patterns, own_names = dict[str, None](), [*manifest.fqns, *manifest.aliases]
        own_modules = {name[:end] for name in own_names for end in range(len(name)) if name[end] == "."}
        for name in added:
            modules = [name[:end] for end in range(len(name)) if name[end] == "."]
            new_module = next((module for module in modules if module not in own_modules), None)
            patterns[name if new_module is None else f"{new_module}.*"] = None
        own_dtypes = {entry.dtype for entry in manifest.weights.values()}
        other_dtypes = sorted({entry.dtype.value for entry in added.values() if entry.dtype not in own_dtypes})
        why = f"{join_names([*patterns])}{f'; as {join_names(other_dtypes)}' if other_dtypes else ''}"
        size = sum(entry.num_bytes for entry in added.values())
        what = f"{format_count(len(added), 'tensor')} from {self.location}"
        yield Note(Outcome.FILLED, what, why, len(added), size, asked=True)
        for name, owner in aliases.items():
            if owner not in added:
                why = f"{self.location} ties it to {owner}, which the source has"
                yield Note(Outcome.MISSING, name, f"{why}; it is not filled", asked=True)

    @property
    def _option_text(self) -> str:
        return format_option("fill", self.location)

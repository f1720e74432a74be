"""A model with an adapter merged into it: what PEFT's ``merge_and_unload`` computes, as entries of a manifest.

A weight becomes ``W + scale * B A``, where ``scale`` is ``alpha / r`` or ``alpha / sqrt(r)``. Nothing is computed here:
a tensor's elements become those of a computed file, in fp32, and reading casts them once to the dtype of the base.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from math import prod
from typing import Any

from ckpt_tools.core.boxes import Shape
from ckpt_tools.core.casts import CASTABLE
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.literals import literal_file
from ckpt_tools.core.manifest import Equal, Kind, Manifest, StateKey, TensorEntry, computed_file
from ckpt_tools.core.matching import nearest_names
from ckpt_tools.core.names import beginning_with
from ckpt_tools.core.notes import Note, Outcome
from ckpt_tools.core.option_names import option
from ckpt_tools.core.quantized import is_quantized
from ckpt_tools.core.shards import ByteRange, ShardTable
from ckpt_tools.core.ties import is_embedding, is_head, stated_tie, tie, untied
from ckpt_tools.core.transforms import Transformed
from ckpt_tools.core.wording import count, listed
from ckpt_tools.errors import IncompleteError, UnsupportedError, UsageError
from ckpt_tools.lora.adapter import Adapter, base_of
from ckpt_tools.lora.complete import is_resolved, lacking
from ckpt_tools.lora.config import AdapterConfig
from ckpt_tools.lora.names import BIAS, EMBEDDING, MATRICES, bare_module
from ckpt_tools.lora.patterns import Ends
from ckpt_tools.lora.product import Factor, Product, WithProduct

TRANSPOSED_LINEAR = frozenset({"clvp", "decision_transformer", "gpt2", "imagegpt", "openai-gpt"})
"""``model_type`` of transformers (5.23) whose layers are ``Conv1D``, which keeps ``[in, out]``."""

TRANSPOSED_EXPERTS = frozenset({"aria", "aria_text", "gpt_oss", "openai_privacy_filter"})
"""``model_type`` of transformers (5.23) whose experts keep ``[E, in, out]`` (``is_transposed``)."""

_ONE = literal_file("one of an adapter's bias")
_ONE_TABLE = ShardTable.whole((1,), DType.FLOAT32, ByteRange(_ONE, 0, 4))


@dataclass(frozen=True, slots=True)
class Merge:
    """The step of a conversion that merges ``adapter``. ``model`` is the content of the base model's ``config.json``,
    empty if there is none. With ``unties`` a head that is tied becomes a tensor of its own before."""

    adapter: Adapter
    config: AdapterConfig
    model: Mapping[str, Any]
    unties: bool = False
    allows_missing: bool = False
    live: Callable[[], str] = str
    """The options that lead from the base model's names to those of the model in memory; empty if none are known."""

    def __call__(self, manifest: Manifest) -> Transformed:
        """``manifest`` with the adapter merged.

        Raises:
            UsageError: the adapter is of another model. UnsupportedError: the weights cannot be merged.
        """
        manifest, untying = base_of(manifest), tuple[Note, ...]()
        if self.unties:
            manifest, untying = untied(manifest, is_tied=self._is_tied(manifest.fqns))
        saved, dropped, must_equal = self._saved(manifest)
        weights = {key.fqn: entry for key, entry in manifest.tensors.items()} | saved
        products = dict(self._products(manifest, weights))
        incomplete = tuple(self._incomplete(manifest))
        files = {name: computed_file(f"{name} with the adapter") for name in products}
        computed = {files[name]: _added(name, weights[name], made, manifest) for name, made in products.items()}
        merged = {name: _merged(weights[name], file) for name, file in files.items()}
        tensors = {**manifest.tensors, **{StateKey(name): entry for name, entry in (saved | merged).items()}}
        made = replace(
            manifest,
            tensors=tensors,
            literals={**manifest.literals, _ONE: struct.pack("<f", 1)},
            computed={**manifest.computed, **computed},
            must_equal=(*manifest.must_equal, *must_equal),
        )
        return made, (*untying, *incomplete, *self._notes(manifest, saved, merged, dropped))

    def _notes(
        self,
        manifest: Manifest,
        saved: Mapping[str, TensorEntry],
        merged: Mapping[str, TensorEntry],
        dropped: list[str],
    ) -> Iterator[Note]:
        size = sum(entry.num_bytes for entry in merged.values())
        yield Note(Outcome.MERGED, count(len(merged), "tensor"), "the adapter is added", len(merged), size, asked=True)
        for name, entry in saved.items():
            before, stored = manifest.tensors.get(StateKey(name)), entry.shards.dtype
            cast = f", cast from {stored.value} to {entry.dtype.value}" if stored is not entry.dtype else ""
            why = "is not in the base model" if before is None else "replaces that of the base model"
            yield Note(Outcome.MERGED, name, f"the adapter's own {why}{cast}", asked=True)
        for name in dropped:
            yield Note(Outcome.DROPPED, name, "tied to the embeddings, whose bits it has", asked=True)

    def _incomplete(self, manifest: Manifest) -> Iterator[Note]:
        """Notes on what the settings name and the adapter does not hold.

        Raises:
            IncompleteError: there is something, and the user does not allow it.
        """
        weights = {key.fqn: entry for key, entry in manifest.tensors.items()}
        found = lacking(self.config, self.adapter, weights, self.model)
        settings = listed(sorted({*found.values()}))
        if found and not self.allows_missing:
            experts = self.live() if any(".experts." in name for name in found) else ""
            advice = f"; if it was trained on the names that {experts} gives, add that" if experts else ""
            raise IncompleteError(
                f"the adapter lacks {listed(found)}, which {settings} of adapter_config.json "
                f"{'names' if len({*found.values()}) == 1 else 'name'}; {option('allow_missing', True)} merges what it "
                f"holds{advice}"
            )
        if found:
            yield Note(Outcome.MISSING, listed(found), f"named by {settings}, and not in the adapter", asked=True)
        if not is_resolved(self.config, [*weights]):
            why = "it does not tell by itself which it names: those in layers beside an adapted one were looked for"
            yield Note(Outcome.KEPT, "modules of target_modules", why, asked=True)

    # What replaces tensors

    def _saved(self, manifest: Manifest) -> tuple[dict[str, TensorEntry], list[str], list[Equal]]:
        """Tensors that the adapter holds whole; names of those that are tied and left out, and pairs to compare."""
        found: dict[str, TensorEntry] = {}
        dropped, pairs = [], []
        for name, entry in self.adapter.saved.items():
            before = manifest.tensors.get(StateKey(name))
            other = self._tied_to(manifest, name)
            if other is not None:
                twin = self.adapter.saved.get(other) or self._twin(name)
                if twin is None:
                    raise UnsupportedError(_ties(name, other), key=name)
                pairs.append(tie(f"{name} and {other} of the adapter, which the base model ties", entry, twin))
            if before is None and other is not None:
                dropped.append(name)
                continue
            found[name] = entry if before is None else _like(name, entry, before)
        return found, dropped, pairs

    def _twin(self, name: str) -> TensorEntry | None:
        """The other of head and embeddings, if the adapter holds it."""
        found = [each for other, each in self.adapter.saved.items() if other != name and _is_of_vocabulary(other)]
        return found[0] if len(found) == 1 else None

    def _tied_to(self, manifest: Manifest, name: str) -> str | None:
        """The tensor whose bytes ``name`` shares in the base model; the head's is not named there."""
        aliases = manifest.aliases
        if self.unties:
            return None
        if name in aliases:
            return aliases[name]
        owned = next((alias for alias, owner in aliases.items() if owner == name), None)
        if owned is not None:
            return owned
        if is_embedding(name) and name in manifest.fqns and self._is_tied(manifest.fqns):
            return "the head"
        return "the embeddings" if is_head(name) and stated_tie(self.model) else None

    def _is_tied(self, names: Collection[str]) -> bool:
        """Whether embeddings and head are one tensor: as ``config.json`` says, else in a model that predicts tokens and
        has no head."""
        stated = stated_tie(self.model)
        return bool(stated) if stated is not None else self.config.is_language_model and not any(map(is_head, names))

    # What is added

    def _products(self, manifest: Manifest, weights: Mapping[str, TensorEntry]) -> Iterator[tuple[str, Product]]:
        targets = self._targets(weights)
        self._check_fits(targets, weights)
        orientations = self._orientations(targets, weights)
        keys = {m: name if self.config.is_parameter(name) else bare_module(m) for m, name in targets.items()}
        self.config.check_quick({*keys.values()})
        for module, name in targets.items():
            parts, weight = self.adapter.parts[module], weights[name]
            other = self._tied_to(manifest, name)
            if other is not None:
                raise UnsupportedError(_ties(name, other), key=name)
            rank, scale = self.config.ranked(keys[module])
            yield name, self._product(name, weight, parts, rank, scale, orientations)
            if BIAS in parts:
                bias = f"{bare_module(module)}.bias"
                if bias not in weights:
                    raise UnsupportedError(f"the adapter adds to {bias}, which the base model does not have", key=bias)
                yield bias, _bias(bias, weights[bias], parts[BIAS], scale)

    def _targets(self, weights: Mapping[str, TensorEntry]) -> dict[str, str]:
        """The tensor that each module's matrices are added to."""
        found: dict[str, str] = {}
        groups: dict[str, list[str]] = {}
        for module in self.adapter.parts:
            groups.setdefault(bare_module(module), []).append(module)
        parameters: dict[str, list[str]] = {}
        for name in filter(self.config.is_parameter, weights):
            parameters.setdefault(name.rpartition(".")[0], []).append(name)
        targets = [] if parameters else [*self.config.target_parameters.names]
        owners = {target.rpartition(".")[0]: target for target in reversed(targets)}
        ends = Ends.of(owners)
        if adapted := next((f".{each}" for each in groups if ends.ends(f".{each}", after_dot=False)), None):
            target = next(target for owner, target in owners.items() if adapted.endswith(owner))
            way = f"; {live} leads to it" if (live := self.live()) else ""
            raise UsageError(f"the adapter is for {target}, a tensor that the base model does not have{way}")
        for bare, modules in groups.items():
            if bare in parameters:
                found |= self._parameters(bare, modules, parameters[bare], weights)
            elif len(modules) == 1:
                found[modules[0]] = f"{bare}.weight"
            else:
                raise UnsupportedError(f"the adapter has several pairs of matrices for {bare}", key=bare)
        return found

    def _parameters(
        self, bare: str, modules: list[str], names: list[str], weights: Mapping[str, TensorEntry]
    ) -> dict[str, str]:
        """The parameter that each nested pair of a module is for. PEFT nests them in the order in which the model's
        code defines them, which no file tells, so shapes decide."""
        fits = {module: [n for n in names if self._fits(module, weights[n].shape)] for module in modules}
        if any(len(found) != 1 for found in fits.values()) or len({*map(tuple, fits.values())}) < len(modules):
            shown = ", ".join(f"{name} {list(weights[name].shape)}" for name in names)
            raise UnsupportedError(
                f"the shapes do not tell which matrices of {bare} are for which of {shown}", key=bare
            )
        return {module: found[0] for module, found in fits.items()}

    def _product_shape(self, module: str) -> Shape:
        """The shape of ``B A``; empty if the adapter does not hold both as matrices."""
        a, b = (self.adapter.parts[module].get(part) for part in MATRICES)
        if a is None or b is None or not len(a.shape) == len(b.shape) == 2:
            return ()
        return b.shape[0], a.shape[1]

    def _fits(self, module: str, shape: Shape) -> bool:
        product = self._product_shape(module)
        return bool(product) and shape[-2:] in (product, product[::-1])

    def _check_fits(self, targets: Mapping[str, str], weights: Mapping[str, TensorEntry]) -> None:
        """Raises UsageError or UnsupportedError if a module has no weight in the base model."""
        missing = {module: name for module, name in targets.items() if name not in weights}
        ordered = sorted(weights) if missing else []
        for module, name in missing.items():
            bare = bare_module(module)
            if f"{bare}.in_proj_weight" in weights:
                raise UnsupportedError(f"{bare} is a MultiheadAttention of torch, which is not supported", key=bare)
            packed = chain.from_iterable(beginning_with(f"{bare}{sign}", ordered) for sign in "._")
            if any(is_quantized(other, weights[other].dtype) for other in packed):
                raise UnsupportedError(
                    f"{bare} is quantized in the base model; dequantize it with {option('dequantize', True)}", key=bare
                )
            if is_head(name) and stated_tie(self.model):
                raise UnsupportedError(_ties(name, "the embeddings"), key=name)
        if missing:
            first = next(iter(missing.values()))
            which = "none" if len(missing) == len(targets) else f"{len(missing):,}"
            of = f"{which} of the adapter's {count(len(targets), 'module')}"
            fit = "fits" if which == "none" else "do not fit"
            raise UsageError(
                f"the adapter is for another model: {of} {fit} the base model, which has no {first}; "
                f"{nearest_names(first, weights)}"
            )

    def _orientations(self, targets: Mapping[str, str], weights: Mapping[str, TensorEntry]) -> dict[int, set[bool]]:
        """Whether the weights that are not square are transposed, by the number of dims."""
        found: dict[int, set[bool]] = {2: set(), 3: set()}
        for module, name in targets.items():
            product, shape = self._product_shape(module), weights[name].shape
            is_square = product == product[::-1]
            if len(shape) in found and not is_square and self._fits(module, shape):
                found[len(shape)].add(product != shape[-2:])
        return found

    def _product(
        self,
        name: str,
        weight: TensorEntry,
        parts: Mapping[str, TensorEntry],
        rank: int,
        scale: float,
        orientations: Mapping[int, set[bool]],
    ) -> Product:
        """The product that is added to ``weight``.

        Raises:
            UnsupportedError: the weight cannot be added to, or shapes do not fit it.
        """
        _check_dtypes(name, weight, parts)
        pair = EMBEDDING if EMBEDDING[0] in parts or EMBEDDING[1] in parts else MATRICES
        lacking = [part for part in pair if part not in parts]
        if lacking:
            raise UsageError(f"the adapter has no {listed(lacking)} for {name}")
        a, b = (parts[part] for part in pair)
        shape = weight.shape
        if pair == EMBEDDING:
            _check_shapes(name, shape, (a, b), ((rank, shape[0]), (shape[1], rank)) if len(shape) == 2 else None)
            return _of_matrices(a, b, is_transposed=True, scale=scale)
        if len(shape) == 3 and self.config.is_parameter(name):
            return self._of_experts(name, shape, a, b, rank, scale, orientations[3])
        if len(shape) == 2:
            straight, turned = ((rank, shape[1]), (shape[0], rank)), ((rank, shape[0]), (shape[1], rank))
            is_transposed = (a.shape, b.shape) == turned
            _check_shapes(name, shape, (a, b), turned if is_transposed else straight)
            if shape[0] == shape[1]:
                is_parameter = self.config.is_parameter(name)
                is_transposed = not is_parameter and self._is_square_transposed(name, orientations[2])
            return _of_matrices(a, b, is_transposed=is_transposed, scale=scale)
        kernel = (1,) * (len(shape) - 2)
        _check_shapes(name, shape, (a, b), ((rank, *shape[1:]), (*shape[:1], rank, *kernel)) if shape[2:] else None)
        return _of_matrices(a, b, is_transposed=False, scale=scale)

    def _is_square_transposed(self, name: str, others: set[bool]) -> bool:
        """Whether a square weight is of ``Conv1D``, which its shape does not tell."""
        model_type = self.model.get("model_type")
        if isinstance(model_type, str):
            return model_type in TRANSPOSED_LINEAR
        if others - {self.config.fan_in_fan_out}:
            raise UnsupportedError(
                f"it is square, and whether it is [out, in] or [in, out] is not known: {_NEEDS_CONFIG}", key=name
            )
        return self.config.fan_in_fan_out

    def _of_experts(
        self, name: str, shape: Shape, a: TensorEntry, b: TensorEntry, rank: int, scale: float, others: set[bool]
    ) -> Product:
        """Experts in one tensor: ``A`` has a block of ``rank`` rows for each expert; in the columns of ``B`` the expert
        is the fast index."""
        stack, rows, columns = shape
        if (a.shape, b.shape) == ((rank * stack, columns), (rows, rank * stack)):
            is_transposed = False
        else:
            is_transposed = True
            _check_shapes(name, shape, (a, b), ((rank * stack, rows), (columns, rank * stack)))
        if rows == columns:
            is_transposed = self._are_square_experts_transposed(name, others)
        if is_transposed:
            left = Factor(a, (stack, rank, rows), (0, 2, 1))
            return Product(left, Factor(b, (columns, rank, stack), (2, 1, 0)), scale)
        left = Factor(b, (rows, rank, stack), (2, 0, 1))
        return Product(left, Factor(a, (stack, rank, columns), (0, 1, 2)), scale)

    def _are_square_experts_transposed(self, name: str, others: set[bool]) -> bool:
        model_type = self.model.get("model_type")
        if len(others) == 1:
            return next(iter(others))
        if not isinstance(model_type, str):
            raise UnsupportedError(
                f"its matrices are square, and whether they are [out, in] or [in, out] is not known: {_NEEDS_CONFIG}",
                key=name,
            )
        return model_type in TRANSPOSED_EXPERTS


_NEEDS_CONFIG = "the base model has no config.json"


def _ties(name: str, other: str) -> str:
    return (
        f"the base model ties {name} to {other}, and the adapter changes {name} on its own; "
        f"{option('untie', True)} writes both tensors, and tie_word_embeddings as false"
    )


def _check_dtypes(name: str, weight: TensorEntry, parts: Mapping[str, TensorEntry]) -> None:
    if weight.dtype not in CASTABLE:
        raise UnsupportedError(
            f"it is {weight.dtype.value} in the base model; dequantize it with {option('dequantize', True)}", key=name
        )
    for part, entry in parts.items():
        if entry.dtype not in CASTABLE - {DType.FLOAT64}:
            raise UnsupportedError(f"{part} of the adapter is {entry.dtype.value}", key=name)


def _check_shapes(
    name: str, shape: Shape, pair: tuple[TensorEntry, TensorEntry], wanted: tuple[Shape, Shape] | None
) -> None:
    """Raises UsageError unless both matrices have the shapes that are wanted; None if none would fit."""
    found = tuple(entry.shape for entry in pair)
    if found != wanted:
        shown = " and ".join(str(list(each)) for each in found)
        instead = " and ".join(str(list(each)) for each in wanted) if wanted else "matrices"
        raise UsageError(
            f"the adapter is for another model: its A and B for {name} are {shown}, and by {list(shape)} in the base "
            f"model and the rank in adapter_config.json they would be {instead}"
        )


def _of_matrices(a: TensorEntry, b: TensorEntry, *, is_transposed: bool, scale: float) -> Product:
    """``B A``, or its transpose; dims of a convolution are columns."""
    rank, outer, inner = a.shape[0], b.shape[0], prod(a.shape[1:])
    first, second = Factor(b, (1, outer, rank), (0, 1, 2)), Factor(a, (1, rank, inner), (0, 1, 2))
    if is_transposed:
        first, second = Factor(a, (1, rank, inner), (0, 2, 1)), Factor(b, (1, outer, rank), (0, 2, 1))
    return Product(first, second, scale)


def _bias(name: str, weight: TensorEntry, bias: TensorEntry, scale: float) -> Product:
    """``lora_bias``: the bias of B is added to that of the module, times the scale."""
    if weight.shape != bias.shape or len(bias.shape) != 1:
        raise UsageError(f"the adapter is for another model: its bias for {name} is {list(bias.shape)}")
    one = TensorEntry((1,), DType.FLOAT32, Kind.EXTRA, _ONE_TABLE)
    return Product(Factor(bias, (1, bias.numel, 1), (0, 1, 2)), Factor(one, (1, 1, 1), (0, 1, 2)), scale)


def _like(name: str, entry: TensorEntry, before: TensorEntry) -> TensorEntry:
    """A tensor of the adapter in the place of one of the base model, in its dtype."""
    if entry.shape != before.shape:
        advice = "resize the base model's vocabulary first" if _is_of_vocabulary(name) else "it is for another model"
        raise UsageError(f"{name} is {list(entry.shape)} in the adapter and {list(before.shape)} in the base; {advice}")
    if entry.dtype is not before.dtype and not {entry.dtype, before.dtype} <= CASTABLE:
        raise UnsupportedError(
            f"it is {before.dtype.value} in the base and {entry.dtype.value} in the adapter", key=name
        )
    return replace(entry.cast(before.dtype), kind=before.kind)


def _is_of_vocabulary(name: str) -> bool:
    return is_head(name) or is_embedding(name)


def _added(name: str, entry: TensorEntry, product: Product, base: Manifest) -> WithProduct:
    """The sum. A dequantized weight is rounded to its dtype first, as in a model that was dequantized before."""
    if entry.plus:
        raise UnsupportedError("something else is added to it already", key=name)
    return WithProduct.of(entry, product, is_rounded=not base.computed.keys().isdisjoint(entry.shards.files))


def _merged(entry: TensorEntry, file: str) -> TensorEntry:
    """The tensor whose elements are those of the computed ``file``."""
    wide = DType.FLOAT64 if entry.dtype is DType.FLOAT64 else DType.FLOAT32
    return replace(entry, shards=ShardTable.whole(entry.shape, wide, ByteRange(file, 0, entry.numel * wide.item_bytes)))

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
from ckpt_tools.core.literals import make_literal_file_name
from ckpt_tools.core.manifest import EqualPair, Kind, Manifest, StateKey, TensorEntry, make_computed_file_name
from ckpt_tools.core.matching import suggest_names
from ckpt_tools.core.names import iter_names_with_prefix
from ckpt_tools.core.notes import Note, Outcome
from ckpt_tools.core.option_names import format_option
from ckpt_tools.core.quantized import is_quantized
from ckpt_tools.core.shards import ByteRange, ShardTable
from ckpt_tools.core.ties import is_embedding, is_head, make_tied_pair, read_tie_flag, untie_heads
from ckpt_tools.core.transforms import TransformResult
from ckpt_tools.errors import IncompleteError, UnsupportedError, UsageError
from ckpt_tools.lora.adapter import Adapter, extract_base_model
from ckpt_tools.lora.complete import does_name_all_targets, find_missing_parts
from ckpt_tools.lora.config import AdapterConfig
from ckpt_tools.lora.names import BIAS_PART, EMBEDDING_PARTS, MATRIX_PARTS, get_base_module
from ckpt_tools.lora.patterns import NameSuffixes
from ckpt_tools.lora.product import Factor, Product, WithProduct
from ckpt_tools.messages.wording import format_count, join_names

TRANSPOSED_LINEAR = frozenset({"clvp", "decision_transformer", "gpt2", "imagegpt", "openai-gpt"})
"""``model_type`` of transformers (5.23) whose layers are ``Conv1D``, which keeps ``[in, out]``."""

TRANSPOSED_EXPERTS = frozenset({"aria", "aria_text", "gpt_oss", "openai_privacy_filter"})
"""``model_type`` of transformers (5.23) whose experts keep ``[E, in, out]`` (``is_transposed``)."""

_ONE_FILE = make_literal_file_name("one of an adapter's bias")
_ONE_TABLE = ShardTable.whole((1,), DType.FLOAT32, ByteRange(_ONE_FILE, 0, 4))


@dataclass(frozen=True, slots=True)
class MergeStep:
    """The step of a conversion that merges ``adapter``. ``model_config`` is the content of the base model's
    ``config.json``, empty if there is none. With ``unties`` a head that is tied becomes a tensor of its own before."""

    adapter: Adapter
    config: AdapterConfig
    model_config: Mapping[str, Any]
    unties: bool = False
    allows_missing: bool = False
    find_live_naming: Callable[[], str] = str
    """The options that lead from the base model's names to those of the model in memory; empty if none are known."""

    def __call__(self, manifest: Manifest) -> TransformResult:
        """``manifest`` with the adapter merged.

        Raises:
            UsageError: the adapter is of another model. UnsupportedError: the weights cannot be merged.
        """
        manifest, untying_notes = extract_base_model(manifest), tuple[Note, ...]()
        if self.unties:
            manifest, untying_notes = untie_heads(manifest, is_tied=self._is_tied(manifest.fqns))
        saved, dropped_names, must_equal = self._collect_saved(manifest)
        weights = {key.fqn: entry for key, entry in manifest.tensors.items()} | saved
        products = dict(self._build_products(manifest, weights))
        missing_notes = tuple(self._note_missing_parts(manifest))
        merged, computed = dict[str, TensorEntry](), dict(manifest.computed)
        for name, product in products.items():
            weight, file = weights[name], make_computed_file_name(f"{name} with the adapter")
            if weight.plus:
                raise UnsupportedError("something else is added to it already", key=name)
            # A dequantized weight is rounded to its dtype first, as in a model that was dequantized before.
            is_rounded = not manifest.computed.keys().isdisjoint(weight.shards.files)
            computed[file] = WithProduct.of(weight, product, is_rounded=is_rounded)
            merged[name] = replace(weight, shards=computed[file].make_table(file))
        tensors = {**manifest.tensors, **{StateKey(name): entry for name, entry in (saved | merged).items()}}
        result = replace(
            manifest,
            tensors=tensors,
            literals={**manifest.literals, _ONE_FILE: struct.pack("<f", 1)},
            computed=computed,
            must_equal=(*manifest.must_equal, *must_equal),
        )
        return result, (
            *untying_notes,
            *missing_notes,
            *self._build_notes(manifest, saved, merged, dropped_names),
        )

    def _build_notes(
        self,
        manifest: Manifest,
        saved: Mapping[str, TensorEntry],
        merged: Mapping[str, TensorEntry],
        dropped_names: list[str],
    ) -> Iterator[Note]:
        size = sum(entry.num_bytes for entry in merged.values())
        yield Note(
            Outcome.MERGED, format_count(len(merged), "tensor"), "the adapter is added", len(merged), size, asked=True
        )
        for name, entry in saved.items():
            base_entry, stored_dtype = manifest.tensors.get(StateKey(name)), entry.shards.dtype
            cast = f", cast from {stored_dtype.value} to {entry.dtype.value}" if stored_dtype is not entry.dtype else ""
            reason = "is not in the base model" if base_entry is None else "replaces that of the base model"
            yield Note(Outcome.MERGED, name, f"the adapter's own {reason}{cast}", asked=True)
        for name in dropped_names:
            yield Note(Outcome.DROPPED, name, "tied to the embeddings, whose bits it has", asked=True)

    def _note_missing_parts(self, manifest: Manifest) -> Iterator[Note]:
        """Notes on modules and tensors that the settings name and the adapter does not hold.

        Raises:
            IncompleteError: something is missing, and the user does not allow that.
        """
        weights = {key.fqn: entry for key, entry in manifest.tensors.items()}
        missing = find_missing_parts(self.config, self.adapter, weights, self.model_config)
        settings = join_names(sorted({*missing.values()}))
        if missing and not self.allows_missing:
            naming_options = self.find_live_naming() if any(".experts." in name for name in missing) else ""
            advice = f"; if it was trained on the names that {naming_options} gives, add that" if naming_options else ""
            raise IncompleteError(
                f"the adapter lacks {join_names(missing)}, which {settings} of adapter_config.json "
                f"{'names' if len({*missing.values()}) == 1 else 'name'}; {format_option('allow_missing', True)} "
                f"merges what it holds{advice}"
            )
        if missing:
            yield Note(Outcome.MISSING, join_names(missing), f"named by {settings}, and not in the adapter", asked=True)
        if not does_name_all_targets(self.config, [*weights]):
            reason = "it does not tell by itself which it names: those in layers beside an adapted one were looked for"
            yield Note(Outcome.KEPT, "modules of target_modules", reason, asked=True)

    # What replaces tensors

    def _collect_saved(self, manifest: Manifest) -> tuple[dict[str, TensorEntry], list[str], list[EqualPair]]:
        """Tensors that the adapter holds whole; names of those that are tied and left out, and pairs to compare."""
        saved: dict[str, TensorEntry] = {}
        dropped_names, equal_pairs = [], []
        for name, entry in self.adapter.saved.items():
            base_entry = manifest.tensors.get(StateKey(name))
            tied_name = self._find_tied_name(manifest, name)
            if tied_name is not None:
                # The tied name may not be known: then it is the one other head or embedding of the adapter.
                vocabulary = [e for n, e in self.adapter.saved.items() if n != name and _is_vocabulary_tensor(n)]
                twin = self.adapter.saved.get(tied_name) or (vocabulary[0] if len(vocabulary) == 1 else None)
                if twin is None:
                    raise UnsupportedError(_explain_tie(name, tied_name), key=name)
                equal_pairs.append(
                    make_tied_pair(f"{name} and {tied_name} of the adapter, which the base model ties", entry, twin)
                )
            if base_entry is None and tied_name is not None:
                dropped_names.append(name)
                continue
            saved[name] = entry if base_entry is None else _cast_like_base(name, entry, base_entry)
        return saved, dropped_names, equal_pairs

    def _find_tied_name(self, manifest: Manifest, name: str) -> str | None:
        """The name of the tensor whose bytes ``name`` shares in the base model, in words if the base model has no name
        for it; None if it shares none."""
        aliases = manifest.aliases
        if self.unties:
            return None
        if name in aliases:
            return aliases[name]
        alias_of_owner = next((alias for alias, owner in aliases.items() if owner == name), None)
        if alias_of_owner is not None:
            return alias_of_owner
        if is_embedding(name) and name in manifest.fqns and self._is_tied(manifest.fqns):
            return "the head"
        return "the embeddings" if is_head(name) and read_tie_flag(self.model_config) else None

    def _is_tied(self, names: Collection[str]) -> bool:
        """Whether embeddings and head are one tensor: as ``config.json`` says, else in a model that predicts tokens and
        has no head."""
        is_stated_tied = read_tie_flag(self.model_config)
        return (
            bool(is_stated_tied)
            if is_stated_tied is not None
            else self.config.is_language_model and not any(map(is_head, names))
        )

    # What is added

    def _build_products(self, manifest: Manifest, weights: Mapping[str, TensorEntry]) -> Iterator[tuple[str, Product]]:
        targets = self._find_targets(weights)
        self._check_targets_exist(targets, weights)
        orientations = self._find_orientations(targets, weights)
        keys = {m: name if self.config.is_target_parameter(name) else get_base_module(m) for m, name in targets.items()}
        self.config.check_pattern_cost({*keys.values()})
        for module, name in targets.items():
            parts, weight = self.adapter.parts[module], weights[name]
            tied_name = self._find_tied_name(manifest, name)
            if tied_name is not None:
                raise UnsupportedError(_explain_tie(name, tied_name), key=name)
            rank, scale = self.config.get_rank_and_scale(keys[module])
            yield name, self._build_product(name, weight, parts, rank, scale, orientations)
            if BIAS_PART in parts:
                bias_name = f"{get_base_module(module)}.bias"
                if bias_name not in weights:
                    raise UnsupportedError(
                        f"the adapter adds to {bias_name}, which the base model does not have", key=bias_name
                    )
                yield bias_name, _build_bias_product(bias_name, weights[bias_name], parts[BIAS_PART], scale)

    def _find_targets(self, weights: Mapping[str, TensorEntry]) -> dict[str, str]:
        """By module, the name of the tensor that its matrices are added to."""
        #     modules of the adapter         tensors of the base model    found
        #     layers.0.q_proj                layers.0.q_proj.weight       by name
        #     experts, experts.base_layer    experts.gate_up_proj,        by shapes (`_match_parameters`), as PEFT
        #                                    experts.down_proj            nests a module for each target parameter
        target_names: dict[str, str] = {}
        modules_by_base: dict[str, list[str]] = {}
        for module in self.adapter.parts:
            modules_by_base.setdefault(get_base_module(module), []).append(module)
        parameters_by_base: dict[str, list[str]] = {}
        for name in filter(self.config.is_target_parameter, weights):
            parameters_by_base.setdefault(name.rpartition(".")[0], []).append(name)
        unmatched_parameters = [] if parameters_by_base else [*self.config.target_parameters.names]
        owners = {target.rpartition(".")[0]: target for target in reversed(unmatched_parameters)}
        owner_suffixes = NameSuffixes.of(owners)
        if adapted_module := next(
            (f".{each}" for each in modules_by_base if owner_suffixes.does_match_name(f".{each}", after_dot=False)),
            None,
        ):
            target = next(target for owner, target in owners.items() if adapted_module.endswith(owner))
            advice = f"; {live_naming} leads to it" if (live_naming := self.find_live_naming()) else ""
            raise UsageError(f"the adapter is for {target}, a tensor that the base model does not have{advice}")
        for base_module, modules in modules_by_base.items():
            if base_module in parameters_by_base:
                target_names |= self._match_parameters(base_module, modules, parameters_by_base[base_module], weights)
            elif len(modules) == 1:
                target_names[modules[0]] = f"{base_module}.weight"
            else:
                raise UnsupportedError(f"the adapter has several pairs of matrices for {base_module}", key=base_module)
        return target_names

    def _match_parameters(
        self, base_module: str, modules: list[str], names: list[str], weights: Mapping[str, TensorEntry]
    ) -> dict[str, str]:
        """The parameter that each nested pair of a module is for. PEFT nests them in the order in which the model's
        code defines them, which no file tells, so shapes decide."""
        fitting_names = {module: [n for n in names if self._does_fit(module, weights[n].shape)] for module in modules}
        if any(len(found) != 1 for found in fitting_names.values()) or len({*map(tuple, fitting_names.values())}) < len(
            modules
        ):
            shape_text = ", ".join(f"{name} {list(weights[name].shape)}" for name in names)
            raise UnsupportedError(
                f"the shapes do not tell which matrices of {base_module} are for which of {shape_text}", key=base_module
            )
        return {module: found[0] for module, found in fitting_names.items()}

    def _get_product_shape(self, module: str) -> Shape:
        """The shape of ``B A``; empty if the adapter does not hold both as matrices."""
        matrix_a, matrix_b = (self.adapter.parts[module].get(part) for part in MATRIX_PARTS)
        if matrix_a is None or matrix_b is None or not len(matrix_a.shape) == len(matrix_b.shape) == 2:
            return ()
        return matrix_b.shape[0], matrix_a.shape[1]

    def _does_fit(self, module: str, shape: Shape) -> bool:
        product = self._get_product_shape(module)
        return bool(product) and shape[-2:] in (product, product[::-1])

    def _check_targets_exist(self, targets: Mapping[str, str], weights: Mapping[str, TensorEntry]) -> None:
        """Raises UsageError or UnsupportedError if a module has no weight in the base model."""
        missing_names = {module: name for module, name in targets.items() if name not in weights}
        ordered = sorted(weights) if missing_names else []
        for module, name in missing_names.items():
            base_module = get_base_module(module)
            if f"{base_module}.in_proj_weight" in weights:
                raise UnsupportedError(
                    f"{base_module} is a MultiheadAttention of torch, which is not supported", key=base_module
                )
            packed_names = chain.from_iterable(iter_names_with_prefix(f"{base_module}{sign}", ordered) for sign in "._")
            if any(is_quantized(other, weights[other].dtype) for other in packed_names):
                raise UnsupportedError(
                    f"{base_module} is quantized in the base model; dequantize it with "
                    f"{format_option('dequantize', True)}",
                    key=base_module,
                )
            if is_head(name) and read_tie_flag(self.model_config):
                raise UnsupportedError(_explain_tie(name, "the embeddings"), key=name)
        if missing_names:
            first_name = next(iter(missing_names.values()))
            which = "none" if len(missing_names) == len(targets) else f"{len(missing_names):,}"
            count_text = f"{which} of the adapter's {format_count(len(targets), 'module')}"
            fit_verb = "fits" if which == "none" else "do not fit"
            raise UsageError(
                f"the adapter is for another model: {count_text} {fit_verb} the base model, which has no {first_name}; "
                f"{suggest_names(first_name, weights)}"
            )

    def _find_orientations(
        self, targets: Mapping[str, str], weights: Mapping[str, TensorEntry]
    ) -> dict[int, set[bool]]:
        """Whether the weights that are not square are transposed, by the number of dims."""
        # Square ones do not tell. Those of experts are taken to be as the others are; those of layers are as
        # config.json or `fan_in_fan_out` says, and without a config.json the others must agree.
        orientations: dict[int, set[bool]] = {2: set(), 3: set()}
        for module, name in targets.items():
            product, shape = self._get_product_shape(module), weights[name].shape
            is_square = product == product[::-1]
            if len(shape) in orientations and not is_square and self._does_fit(module, shape):
                orientations[len(shape)].add(product != shape[-2:])
        return orientations

    def _build_product(
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
        part_names = EMBEDDING_PARTS if EMBEDDING_PARTS[0] in parts or EMBEDDING_PARTS[1] in parts else MATRIX_PARTS
        missing_parts = [part for part in part_names if part not in parts]
        if missing_parts:
            raise UsageError(f"the adapter has no {join_names(missing_parts)} for {name}")
        a, b = (parts[part] for part in part_names)
        shape = weight.shape
        if part_names == EMBEDDING_PARTS:
            _check_shapes(name, shape, (a, b), ((rank, shape[0]), (shape[1], rank)) if len(shape) == 2 else None)
            return _build_matrix_product(a, b, is_transposed=True, scale=scale)
        if len(shape) == 3 and self.config.is_target_parameter(name):
            return self._build_expert_product(name, shape, a, b, rank, scale, orientations[3])
        if len(shape) == 2:
            straight_shapes = ((rank, shape[1]), (shape[0], rank))
            transposed_shapes = ((rank, shape[0]), (shape[1], rank))
            is_transposed = (a.shape, b.shape) == transposed_shapes
            _check_shapes(name, shape, (a, b), transposed_shapes if is_transposed else straight_shapes)
            if shape[0] == shape[1]:
                is_parameter = self.config.is_target_parameter(name)
                is_transposed = not is_parameter and self._is_square_transposed(name, orientations[2])
            return _build_matrix_product(a, b, is_transposed=is_transposed, scale=scale)
        kernel = (1,) * (len(shape) - 2)
        _check_shapes(name, shape, (a, b), ((rank, *shape[1:]), (*shape[:1], rank, *kernel)) if shape[2:] else None)
        return _build_matrix_product(a, b, is_transposed=False, scale=scale)

    def _is_square_transposed(self, name: str, orientations: set[bool]) -> bool:
        """Whether a square weight is of ``Conv1D``, which its shape does not tell."""
        model_type = self.model_config.get("model_type")
        if isinstance(model_type, str):
            return model_type in TRANSPOSED_LINEAR
        if orientations - {self.config.fan_in_fan_out}:
            raise UnsupportedError(
                f"it is square, and whether it is [out, in] or [in, out] is not known: {_NO_CONFIG_REASON}", key=name
            )
        return self.config.fan_in_fan_out

    def _build_expert_product(
        self, name: str, shape: Shape, a: TensorEntry, b: TensorEntry, rank: int, scale: float, orientations: set[bool]
    ) -> Product:
        """Experts in one tensor: ``A`` has a block of ``rank`` rows for each expert; in the columns of ``B`` the expert
        is the fast index."""
        # PEFT stores A as [E * r, in], expert by expert, and B as [out, r * E]. As stacks of matrices:
        #     B -> (out, r, E) -> [E, out, r]      A -> (E, r, in) -> [E, r, in]      B A -> [E, out, in]
        # A tensor that keeps [E, in, out] gets the transpose of each product.
        num_experts, rows, columns = shape
        if (a.shape, b.shape) == ((rank * num_experts, columns), (rows, rank * num_experts)):
            is_transposed = False
        else:
            is_transposed = True
            _check_shapes(name, shape, (a, b), ((rank * num_experts, rows), (columns, rank * num_experts)))
        if rows == columns:
            is_transposed = self._are_square_experts_transposed(name, orientations)
        if is_transposed:
            left = Factor(a, (num_experts, rank, rows), (0, 2, 1))
            return Product(left, Factor(b, (columns, rank, num_experts), (2, 1, 0)), scale)
        left = Factor(b, (rows, rank, num_experts), (2, 0, 1))
        return Product(left, Factor(a, (num_experts, rank, columns), (0, 1, 2)), scale)

    def _are_square_experts_transposed(self, name: str, orientations: set[bool]) -> bool:
        model_type = self.model_config.get("model_type")
        if len(orientations) == 1:
            return next(iter(orientations))
        if not isinstance(model_type, str):
            raise UnsupportedError(
                "its matrices are square, and whether they are [out, in] or [in, out] is not known: "
                f"{_NO_CONFIG_REASON}",
                key=name,
            )
        return model_type in TRANSPOSED_EXPERTS


_NO_CONFIG_REASON = "the base model has no config.json"


def _explain_tie(name: str, other: str) -> str:
    return (
        f"the base model ties {name} to {other}, and the adapter changes {name} on its own; "
        f"{format_option('untie', True)} writes both tensors, and tie_word_embeddings as false"
    )


def _check_dtypes(name: str, weight: TensorEntry, parts: Mapping[str, TensorEntry]) -> None:
    if weight.dtype not in CASTABLE:
        raise UnsupportedError(
            f"it is {weight.dtype.value} in the base model; dequantize it with {format_option('dequantize', True)}",
            key=name,
        )
    for part, entry in parts.items():
        if entry.dtype not in CASTABLE - {DType.FLOAT64}:
            raise UnsupportedError(f"{part} of the adapter is {entry.dtype.value}", key=name)


def _check_shapes(
    name: str, shape: Shape, matrices: tuple[TensorEntry, TensorEntry], expected_shapes: tuple[Shape, Shape] | None
) -> None:
    """Raises UsageError unless both matrices have ``expected_shapes``, which are None if none would fit."""
    actual_shapes = tuple(entry.shape for entry in matrices)
    if actual_shapes != expected_shapes:
        actual_text = " and ".join(str(list(each)) for each in actual_shapes)
        expected_text = " and ".join(str(list(each)) for each in expected_shapes) if expected_shapes else "matrices"
        raise UsageError(
            f"the adapter is for another model: its A and B for {name} are {actual_text}, and by {list(shape)} in "
            f"the base model and the rank in adapter_config.json they would be {expected_text}"
        )


def _build_matrix_product(a: TensorEntry, b: TensorEntry, *, is_transposed: bool, scale: float) -> Product:
    """``B A``, or its transpose; dims of a convolution are columns."""
    rank, num_rows, num_columns = a.shape[0], b.shape[0], prod(a.shape[1:])
    first, second = Factor(b, (1, num_rows, rank), (0, 1, 2)), Factor(a, (1, rank, num_columns), (0, 1, 2))
    if is_transposed:
        first, second = Factor(a, (1, rank, num_columns), (0, 2, 1)), Factor(b, (1, num_rows, rank), (0, 2, 1))
    return Product(first, second, scale)


def _build_bias_product(name: str, weight: TensorEntry, bias: TensorEntry, scale: float) -> Product:
    """``lora_bias``: the bias of B is added to that of the module, times the scale."""
    if weight.shape != bias.shape or len(bias.shape) != 1:
        raise UsageError(f"the adapter is for another model: its bias for {name} is {list(bias.shape)}")
    ones_entry = TensorEntry((1,), DType.FLOAT32, Kind.EXTRA, _ONE_TABLE)
    return Product(Factor(bias, (1, bias.numel, 1), (0, 1, 2)), Factor(ones_entry, (1, 1, 1), (0, 1, 2)), scale)


def _cast_like_base(name: str, entry: TensorEntry, base_entry: TensorEntry) -> TensorEntry:
    """A tensor of the adapter in the place of one of the base model, in its dtype."""
    if entry.shape != base_entry.shape:
        advice = (
            "resize the base model's vocabulary first" if _is_vocabulary_tensor(name) else "it is for another model"
        )
        raise UsageError(
            f"{name} is {list(entry.shape)} in the adapter and {list(base_entry.shape)} in the base; {advice}"
        )
    if entry.dtype is not base_entry.dtype and not {entry.dtype, base_entry.dtype} <= CASTABLE:
        raise UnsupportedError(
            f"it is {base_entry.dtype.value} in the base and {entry.dtype.value} in the adapter", key=name
        )
    return replace(entry.cast_to(base_entry.dtype), kind=base_entry.kind)


def _is_vocabulary_tensor(name: str) -> bool:
    return is_head(name) or is_embedding(name)

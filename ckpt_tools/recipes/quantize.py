"""Quantizes the layers of a language model on the way out, and says so as ``config.json`` has to. Pure.

The matrices of attention, MLPs and experts under the names of the hub are quantized, and nothing else: each name of
``_LAYERS`` is an ``nn.Linear`` in every model of transformers 5.23 that has it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ckpt_tools.core import matching
from ckpt_tools.core.casts import CASTABLE
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.manifest import (
    ComputedTensor,
    Kind,
    Manifest,
    StateKey,
    TensorEntry,
    make_computed_file_name,
)
from ckpt_tools.core.notes import Note, Outcome
from ckpt_tools.core.option_names import format_option
from ckpt_tools.core.quantized import TEXT_CONFIG, find_uncastable_keys
from ckpt_tools.core.ties import is_embedding
from ckpt_tools.core.transforms import TransformResult
from ckpt_tools.errors import UnsupportedError, UsageError
from ckpt_tools.messages.wording import join_names
from ckpt_tools.recipes.block_quantization import BlockFormat, BlockScales, QuantizedElements

_LAYERS = re.compile(
    r"(?:(?:model|language_model|text_model)\.)*layers\.(?P<number>\d+)\.(?:.*\.)?"
    r"(?:(?:q|k|v|o|qkv|gate|up|down|gate_up)_proj|q_[ab]_proj|kv_a_proj_with_mqa|kv_b_proj|experts\.\d+\.w[123])"
    r"\.weight"
)
"""Names of matrices of the layers of a language model, but for routers and what computes a state of its own."""

_FUSED = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv"),
    **dict.fromkeys(("gate_proj", "up_proj"), "gate_up"),
    **dict.fromkeys(("q_a_proj", "kv_a_proj_with_mqa"), "qkv_a"),
}
"""Layers that vLLM makes one of, which must be quantized alike."""

_EXPERTS = re.compile(r"(.*\.experts)(?:\.|$)")

_HEAD = "lm_head"
"""A head that is tied has no tensor, and yet would be taken for a quantized layer."""

METHODS: Mapping[str, tuple[BlockFormat, str]] = {
    "fp8-block": (BlockFormat.FP8_SQUARES, "weight_scale_inv"),
    "fp8": (BlockFormat.FP8_ROWS, "weight_scale"),
    "int8": (BlockFormat.INT8_ROWS, "weight_scale"),
}
"""By value of the option: the form of the weights, and the name of their scales."""


@dataclass(frozen=True, slots=True)
class QuantizeStep:
    """The step that quantizes by ``method``, one of ``METHODS``, all but the weights that match a glob of ``keep``, in
    a model with this ``config.json``."""

    method: str
    keep: Sequence[str]
    config: Mapping[str, Any]

    def __call__(self, cast: Manifest, uncast: Manifest) -> TransformResult:
        """``cast`` with quantized layers, each computed of its elements in ``uncast``, before their cast.

        Raises:
            UsageError: no layer can be quantized, or a glob matches none. UnsupportedError: experts are stacked, or
            weights are quantized already.
        """
        if find_uncastable_keys(uncast):
            raise UnsupportedError(
                f"weights are quantized already; {format_option('dequantize', True)} makes floating-point ones of them "
                "first"
            )
        weights = uncast.weights
        matching.check_globs_match([*weights], keep=self.keep)
        reason_by_name = self._find_reasons(uncast)
        quantized_names = [name for name, reason in reason_by_name.items() if not reason]
        if not quantized_names:
            raise UsageError(self._explain_nothing(reason_by_name))
        tensors, computed = dict(cast.tensors), dict(cast.computed)
        block_format, scale_name = METHODS[self.method]
        for name in quantized_names:
            entry = weights[name].cast_to(DType.FLOAT32)
            shape, scales_name = entry.shape, f"{name.removesuffix('weight')}{scale_name}"
            if StateKey(scales_name) in tensors:
                raise UnsupportedError(f"the scales of {name} would have this name", key=scales_name)
            made: dict[str, tuple[ComputedTensor, Kind]] = {
                name: (QuantizedElements(shape, block_format.dtype, (entry,), name, block_format), entry.kind),
                scales_name: (
                    BlockScales(block_format.find_scales_shape(shape), DType.FLOAT32, (entry,), name, block_format),
                    # As a buffer it does not count for the dtype of the model.
                    Kind.BUFFER,
                ),
            }
            for made_name, (tensor, kind) in made.items():
                file = make_computed_file_name(f"{made_name} by {self.method}")
                computed[file] = tensor
                tensors[StateKey(made_name)] = TensorEntry(tensor.shape, tensor.dtype, kind, tensor.make_table(file))
        config = self._make_config(sorted(_iter_unquantized_modules(weights, {*quantized_names})))
        quantized = replace(cast, tensors=tensors, computed=computed, quantization_config=config)
        return quantized, tuple(_iter_notes(reason_by_name))

    def _find_reasons(self, manifest: Manifest) -> dict[str, str]:
        """By name of each matrix and stack of matrices, the reason why it is not quantized; empty if it is. Raises
        UnsupportedError for stacked experts."""
        tied_names = {*manifest.aliases, *manifest.aliases.values()}
        reasons: dict[str, str] = {}
        for name, entry in manifest.weights.items():
            if len(entry.shape) >= 2 and entry.dtype in CASTABLE:
                reasons[name] = self._find_reason(name, entry, is_tied=name in tied_names)
        # A layer that stays takes along those that are loaded as one with it.
        kept_groups = {_find_group(name) for name, reason in reasons.items() if reason}
        for name, reason in reasons.items():
            if not reason and _find_group(name) in kept_groups:
                reasons[name] = "loaded as one with a weight that stays"
        return reasons

    def _find_reason(self, name: str, entry: TensorEntry, *, is_tied: bool) -> str:
        layer, side = _LAYERS.fullmatch(name), METHODS[self.method][0].side
        if self.keep and matching.is_selected(name, self.keep, ()):
            return format_option("keep")
        if len(entry.shape) > 2 and _EXPERTS.match(name):
            raise UnsupportedError(
                f"{name} has the experts of a layer in one tensor, and matrices alone are quantized; "
                f"{format_option('recipe')} writes a matrix for each expert where the hub has them so, and "
                f"{format_option('keep', name)} leaves it as it is",
                key=name,
            )
        if layer is None or len(entry.shape) > 2:
            return _BY_RULE
        if int(layer["number"]) >= self._num_layers:
            return "of a layer that predicts later tokens (MTP)"
        if is_tied or not entry.numel or entry.kind is Kind.BUFFER:
            return "tied, empty, or a buffer"
        if side and (entry.shape[0] % side or entry.shape[1] % side):
            return f"of a shape that blocks of {side} x {side} do not fill"
        return ""

    @property
    def _num_layers(self) -> int:
        for part in (self.config, self.config.get(TEXT_CONFIG)):
            number = part.get("num_hidden_layers") if isinstance(part, Mapping) else None
            if isinstance(number, int):
                return number
        return 1 << 30

    def _explain_nothing(self, reason_by_name: Mapping[str, str]) -> str:
        found = [f"{name} ({reason})" for name, reason in reason_by_name.items() if reason != _BY_RULE]
        why = (
            f"of {join_names(found, 2)}"
            if found
            else "no matrix has a name as in a language model of the hub (model.layers.0.mlp.up_proj.weight)"
        )
        way = f"; {format_option('quantize', 'fp8')} takes any shape" if found and self.method == "fp8-block" else ""
        return f"{format_option('quantize', self.method)} would quantize nothing: {why}{way}"

    def _make_config(self, unquantized_modules: Sequence[str]) -> Mapping[str, Any]:
        """``quantization_config`` as DeepSeek's models have it, or as compressed-tensors writes it."""
        if self.method == "fp8-block":
            side = METHODS[self.method][0].side
            return {
                "activation_scheme": "dynamic",
                "fmt": "e4m3",
                "modules_to_not_convert": [*unquantized_modules],
                "quant_method": "fp8",
                "weight_block_size": [side, side],
            }
        kind = "int" if self.method == "int8" else "float"
        shared = {"group_size": None, "num_bits": 8, "symmetric": True, "type": kind}
        scheme = {
            "format": f"{kind}-quantized",
            "input_activations": {**shared, "dynamic": True, "strategy": "token"},
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {**shared, "dynamic": False, "strategy": "channel"},
        }
        return {
            "config_groups": {"group_0": scheme},
            "format": f"{kind}-quantized",
            "global_compression_ratio": None,
            "ignore": [*unquantized_modules],
            "kv_cache_scheme": None,
            "quant_method": "compressed-tensors",
            "quantization_status": "compressed",
        }


_BY_RULE = "not in attention, MLPs or experts"


def _find_group(name: str) -> str:
    """Group that a loader fuses: all experts of a layer, or the layers of ``_FUSED``; else the name itself."""
    experts = _EXPERTS.match(name)
    if experts is not None:
        return experts[1]
    parent, _, layer = name.removesuffix(".weight").rpartition(".")
    return f"{parent}.{_FUSED[layer]}" if layer in _FUSED else name


def _iter_unquantized_modules(weights: Mapping[str, TensorEntry], quantized_names: set[str]) -> Iterator[str]:
    """Modules that loaders would take for quantized ones: those of matrices but the input embeddings, experts as one,
    and the head."""
    modules = {_HEAD}
    for name, entry in weights.items():
        experts = _EXPERTS.match(name)
        is_matrix = len(entry.shape) == 2 and name.endswith(".weight") and not is_embedding(name)
        if name not in quantized_names and (is_matrix or (len(entry.shape) >= 2 and experts)):
            modules.add(name.rpartition(".")[0] if experts is None else experts[1])
    yield from modules


def _iter_notes(reason_by_name: Mapping[str, str]) -> Iterator[Note]:
    names_by_reason: dict[str, list[str]] = {}
    for name, reason in reason_by_name.items():
        names_by_reason.setdefault(reason, []).append(name)
    for reason, names in names_by_reason.items():
        if reason:
            yield Note(Outcome.KEPT, join_names(names), f"not quantized: {reason}", len(names), asked=True)

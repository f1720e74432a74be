"""Quantized weights, and the scales and zero points without which their elements have no meaning. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping

from ckpt_tools.core.casts import CASTABLE
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.manifest import WEIGHT, Manifest, StateKey
from ckpt_tools.core.option_names import option
from ckpt_tools.errors import UsageError

_BYTES = (DType.INT8, DType.UINT8)
_PACKED = ("qweight", "qzeros", "weight_packed")
"""Names by GPTQ, AWQ and compressed-tensors: several elements in an integer of any width. MLX has a ``weight`` of
uint32, whose ``biases`` are zero points."""

_SCALE_NAMES = re.compile(
    r"(?:weight|input|output|activation|k|v|q)_(?:global_)?scale(?:_inv|_2)?|scale_(?:weight|input)|SCB|(?:nested_)?absmax"
)
"""Scales that may lie in another module than the weights: those of a cache of keys and values lie a level above."""


def is_small(dtype: DType) -> bool:
    """True for integers of 8 bits and floats of at most as many, whose elements may need a scale."""
    return dtype in _BYTES or (dtype.is_floating and dtype not in CASTABLE)


def scales(manifest: Manifest) -> set[StateKey]:
    """Floating-point tensors that quantized weights need: in the same module, or known by name. A bias is none."""
    weights = _weights(manifest)
    quantized = [fqn for fqn, dtype in weights.items() if is_quantized(fqn, dtype)]
    if not quantized:
        return set()
    modules = {fqn.rpartition(".")[0] for fqn in quantized} | set(quantized)
    return {StateKey(fqn) for fqn in weights.keys() - set(quantized) if _is_scale(fqn, modules)}


def check_together(manifest: Manifest, is_chosen: Callable[[str], bool]) -> None:
    """Raises UsageError if a quantized weight is chosen, and a tensor that it needs is not."""
    weights = _weights(manifest)
    members: dict[str, list[str]] = {}
    for fqn in weights:
        members.setdefault(fqn.rpartition(".")[0], []).append(fqn)
    for fqn, dtype in weights.items():
        if is_chosen(fqn) and is_quantized(fqn, dtype):
            lost = next((name for name in _needed(fqn, members) if not is_chosen(name)), None)
            if lost is not None:
                raise UsageError(
                    f"{fqn} is quantized and needs {lost}, which {option('include')} and {option('exclude')} leave "
                    "out; select both, or neither"
                )


def _needed(fqn: str, members: Mapping[str, list[str]]) -> Iterator[str]:
    """Tensors without which the quantized weight has no meaning, by the names that quantizers give them."""
    module, _, name = fqn.rpartition(".")
    siblings = members[module]
    if name.endswith("_blocks"):
        yield from (each for each in siblings if each == f"{fqn.removesuffix('_blocks')}_scales")
    elif name == "weight" or name in _PACKED:
        yield from (each for each in siblings if not each.endswith("bias"))
    yield from members.get(fqn, ())


def _weights(manifest: Manifest) -> dict[str, DType]:
    return {key.fqn: entry.dtype for key, entry in manifest.tensors.items() if key.slot == WEIGHT}


def _is_scale(fqn: str, modules: set[str]) -> bool:
    module, _, name = fqn.rpartition(".")
    if name.endswith("bias"):
        return False
    return module in modules or _SCALE_NAMES.fullmatch(name) is not None


def is_quantized(fqn: str, dtype: DType) -> bool:
    name = fqn.rpartition(".")[2]
    is_packed = (not dtype.is_floating and name in _PACKED) or (dtype is DType.UINT32 and name == "weight")
    return is_packed or is_small(dtype)

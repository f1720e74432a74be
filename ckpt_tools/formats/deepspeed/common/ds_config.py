"""The DeepSpeed config that is recorded, and what of it decides where elements lie.

``load_checkpoint`` reads nothing of the recorded config; people and tools do. It is the source's own, adapted to the
new stage and type, or says no more than these. The layout follows it wherever DeepSpeed's would, since a run is resumed
with the config that it was saved with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ckpt_tools.core.dtypes import DType

DEFAULT_SUB_GROUP_SIZE = 10**9
"""zero/config.py ``sub_group_size``, in elements of one rank."""

_FLAVOUR_SECTIONS = {"fp16": DType.FLOAT16, "bf16": DType.BFLOAT16, "bfloat16": DType.BFLOAT16}
_OLD_NAMES = ("bfloat16",)
_FP32_NAMES = ("fp32", "float", "float32", "torch.float32")


@dataclass(frozen=True, slots=True)
class Settings:
    """``sub_group_size`` counts elements of a rank (stage 3); ``is_round_robin`` says that groups are flattened in the
    order of ``round_robin_gradients``, ``has_whole_momentum`` that Muon keeps whole parameters (stages 1 and 2)."""

    sub_group_size: int
    is_round_robin: bool
    has_whole_momentum: bool

    @classmethod
    def of(cls, config: Mapping[str, Any], stage: int, dtype: DType) -> Settings:
        zero = _section(config, "zero_optimization")
        of_stage_1_and_2 = stage < 3 and not _is_bf16_optimizer(config, stage, dtype)
        is_round_robin = of_stage_1_and_2 and zero.get("round_robin_gradients") is True
        is_offloaded = _section(zero, "offload_optimizer").get("device", "none") != "none"
        return cls(_sub_group_size(zero.get("sub_group_size")), is_round_robin, of_stage_1_and_2 and not is_offloaded)


def _sub_group_size(found: Any) -> int:
    """JSON writes 1e9 as a float, and Hugging Face's configs may say ``auto``."""
    is_number = isinstance(found, int | float) and not isinstance(found, bool) and 0 <= found < 1 << 62
    return int(found) if is_number else DEFAULT_SUB_GROUP_SIZE


def _is_bf16_optimizer(config: Mapping[str, Any], stage: int, dtype: DType) -> bool:
    """engine.py ``_do_optimizer_sanity_check``: bf16 in stage 1 with fp32 accumulation is BF16_Optimizer's, which loads
    the files of stage_1_and_2.py but never deals out."""
    accumulate = _section(config, "data_types").get("grad_accum_dtype")
    return stage == 1 and dtype is DType.BFLOAT16 and accumulate in _FP32_NAMES


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = config.get(name)
    return found if isinstance(found, dict) else {}


def adapted(config: Mapping[str, Any], stage: int, dtype: DType) -> dict[str, Any]:
    """``config`` for another stage and type; an empty one becomes one that says only these."""
    found = {**config, "zero_optimization": {**_section(config, "zero_optimization"), "stage": stage}}
    for name, flavour in _FLAVOUR_SECTIONS.items():
        if name in config or (flavour is dtype and name not in _OLD_NAMES):
            found[name] = {**_section(config, name), "enabled": flavour is dtype}
    return found

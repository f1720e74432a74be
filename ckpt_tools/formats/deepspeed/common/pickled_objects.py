"""Objects of DeepSpeed's own classes, by name and attributes: nothing of it is imported.

Classes and attributes of DeepSpeed 0.19.8: fp16/loss_scaler.py, zero/config.py, utils/tensor_fragment.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.values import GlobalRef, Opaque, Value

DS_VERSION = "0.19.8"
"""The version whose layout is written; loaders compare it with the versions in which the layout changed."""

_LOSS_SCALER_MODULE = "deepspeed.runtime.fp16.loss_scaler"

_DYNAMIC_DEFAULTS: Mapping[str, Any] = {
    "cur_scale": 2**16,
    "dynamic": True,
    "cur_iter": 0,
    "last_overflow_iter": -1,
    "scale_factor": 2.0,
    "scale_window": 1000,
    "min_scale": 1,
    "delayed_shift": 2,
    "cur_hysteresis": 2,
    "consecutive_hysteresis": False,
    "raise_error_at_min_scale": True,
    "dtype": GlobalRef("torch", "float16"),
}
"""A ``DynamicLossScaler`` as the defaults of the ``fp16`` section make it (precision_config.py)."""

DEFAULT_SCALER_TEXT = "DeepSpeed's dynamic one, starting at 65536"


def make_loss_scaler(attributes: Value, dtype: DType) -> Opaque:
    """The scaler of a run in ``dtype``. ``attributes`` are those of the source's scaler, which is taken over if it
    scales."""
    if dtype is not DType.FLOAT16:
        return _make_scaler("LossScaler", {"cur_scale": 1.0, "dynamic": False})
    if not is_active_scaler(attributes):
        return _make_scaler("DynamicLossScaler", _DYNAMIC_DEFAULTS)
    if attributes.get("dynamic") is True:
        return _make_scaler("DynamicLossScaler", {**_DYNAMIC_DEFAULTS, **attributes})
    return _make_scaler("LossScaler", attributes)


def is_active_scaler(attributes: Value) -> bool:
    """Whether ``attributes`` are those of a scaler of DeepSpeed's that scales: in fp32 and bf16 its scale is 1."""
    if not isinstance(attributes, dict) or not isinstance(attributes.get("cur_scale"), int | float):
        return False
    return attributes.get("dynamic") is True or attributes["cur_scale"] != 1


def _make_scaler(name: str, attributes: Mapping[str, Any]) -> Opaque:
    return Opaque(GlobalRef(_LOSS_SCALER_MODULE, name), form="new", state=dict(attributes))


def make_zero_stage(stage: int) -> Opaque:
    return Opaque(GlobalRef("deepspeed.runtime.zero.config", "ZeroStageEnum"), (stage,))


def make_fragment_address(numel: int, start: int) -> Opaque:
    """A parameter's place in a rank's vector, in elements."""
    class_ref = GlobalRef("deepspeed.utils.tensor_fragment", "fragment_address")
    return Opaque(class_ref, form="new", state={"numel": numel, "start": start})

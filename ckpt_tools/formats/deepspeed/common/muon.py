"""Muon's momentum in stages 1 and 2: where a rank keeps it, which is not where its masters lie. Pure.

Muon works on whole matrices, so that stage_1_and_2.py ``_muon_momentum_buffer`` gives a rank one vector of the whole
momentum of every parameter of which its partition holds a part, end to end and without padding. A parameter that two
ranks hold lies in both vectors, alike. With ``offload_optimizer``, in BF16_Optimizer and in stage 3 the vector is cut
as the masters are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MOMENTUM = "momentum_buffer"


def is_muon(options: Mapping[str, Any]) -> bool:
    """Whether a param group of these hyperparameters is one of DeepSpeed's Muon."""
    return options.get("use_muon") is True

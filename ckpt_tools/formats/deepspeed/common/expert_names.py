"""How ``deepspeed.moe`` names an expert's tensors: ``block.deepspeed_moe.experts.deepspeed_experts.3.up.weight``."""

from __future__ import annotations

import re

INFIX = ".deepspeed_moe.experts.deepspeed_experts."
_NAME = re.compile(rf"(?P<prefix>.+{re.escape(INFIX)})(?P<number>\d{{1,9}})\.(?P<rest>.+)", re.DOTALL)


def split(name: str) -> tuple[str, int, str] | None:
    """The name of an expert's tensor as that of its layer's experts, its number and the rest; None for any other."""
    match = _NAME.fullmatch(name)
    return (match["prefix"], int(match["number"]), match["rest"]) if match else None

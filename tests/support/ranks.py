"""Options of a conversion whose target is a parameter of the test."""

from __future__ import annotations

from ckpt_tools.core.applicability import RANKED


def for_ranks(to: str, world_size: int) -> dict[str, int]:
    """``world_size`` where the format is written for ranks; others refuse it."""
    return {"world_size": world_size} if to in RANKED else {}

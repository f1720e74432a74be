"""Options of a conversion whose target is a parameter of the test."""

from ckpt_tools.formats.index import get_writable_format


def for_ranks(to: str, world_size: int) -> dict[str, int]:
    """``world_size`` where the format is written for ranks; others refuse it."""
    return {"world_size": world_size} if "world_size" in get_writable_format(to).writing_options else {}

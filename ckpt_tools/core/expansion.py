"""Refuses tensors that are far larger than what stores them, before their elements are read.

A tensor of 4 bytes with strides of 0 can have 4 EB of elements, and so can an array without a chunk. What models
expand, such as a mask over a batch, is small beside their weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ckpt_tools.core.manifest import StateKey, TensorEntry
from ckpt_tools.core.option_names import format_option
from ckpt_tools.core.wording import format_size
from ckpt_tools.errors import UnsupportedError

MAX_EXPANSION: Final = 1024
"""Bytes of all tensors for each byte of the files: a second of reading for a megabyte."""

MAX_FREE_BYTES: Final = 1 << 30
"""So many bytes may come from any files."""


def check_expansion(tensors: Mapping[StateKey, TensorEntry], stored_bytes: int) -> None:
    """Raises UnsupportedError for more than ``MAX_EXPANSION`` times the ``stored_bytes`` of a source's files, if these
    are known."""
    total_bytes = sum(entry.num_bytes for entry in tensors.values())
    if stored_bytes and total_bytes > max(MAX_FREE_BYTES, MAX_EXPANSION * stored_bytes):
        key, entry = max(tensors.items(), key=lambda each: each[1].num_bytes)
        raise UnsupportedError(
            f"its tensors have {format_size(total_bytes)}, more than {MAX_EXPANSION:,} times as many as the files "
            f"have, which are {format_size(stored_bytes)}; the largest is {key} of {format_size(entry.num_bytes)}: it "
            f"is expanded from a few elements; leave it out with {format_option('exclude')}, or save it with "
            ".contiguous()"
        )

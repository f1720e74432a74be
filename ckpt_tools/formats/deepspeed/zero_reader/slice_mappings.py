"""``param_slice_mappings`` of a rank: which elements of which parameter it holds, as it says itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckpt_tools.core.values import Opaque, are_naturals, brief
from ckpt_tools.errors import MalformedError
from ckpt_tools.formats.deepspeed.common.files import MAX_PADDING, File, checked, plain

Mapped = Mapping[str, tuple[int, int]]
"""Of each parameter of a group its elements on a rank, and where they start in the rank's vector."""


def slice_mappings(file: File) -> list[Mapped]:
    """``param_slice_mappings`` of a rank. Raises MalformedError."""
    own = checked(file.content, "optimizer_state_dict", dict, file.path)
    return [
        {_name(name, file): _address(found, file) for name, found in _group(group, file).items()}
        for group in checked(own, "param_slice_mappings", list, file.path)
    ]


def _group(found: Any, file: File) -> Mapping[Any, Any]:
    if not isinstance(found, dict):
        raise MalformedError("its param_slice_mappings are not dictionaries", path=file.path)
    return found


def _name(found: Any, file: File) -> str:
    if not isinstance(found, str):
        raise MalformedError(f"its param_slice_mappings have the key {brief(found)}", path=file.path)
    return found


def _address(found: Any, file: File) -> tuple[int, int]:
    attributes: Any = plain(found) if isinstance(found, Opaque) else None
    numbers: list[Any] = [attributes.get(key) if isinstance(attributes, dict) else None for key in ("numel", "start")]
    if not are_naturals(numbers) or max(numbers) > MAX_PADDING:
        raise MalformedError("its param_slice_mappings have no addresses", path=file.path)
    return numbers[0], numbers[1]

"""The index of a sharded Hugging Face model: JSON that maps each tensor's name to the file it lies in."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING

from ckpt_tools.core.wording import listed
from ckpt_tools.errors import IncompleteError, MalformedError, UnsupportedError
from ckpt_tools.serialization.strict_json import parse_json
from ckpt_tools.stores.source import Source, checked_name

if TYPE_CHECKING:
    from ckpt_tools.core.layout import FileLayout
    from ckpt_tools.core.manifest import TensorEntry

MAX_INDEX_BYTES = 256 << 20
"""A million names of 200 characters; no index is larger."""


def choose_index(indexes: list[str], preferred: str) -> str:
    """The one index of a folder, or ``preferred`` where there are several. Raises UnsupportedError."""
    if preferred in indexes or len(indexes) == 1:
        return preferred if preferred in indexes else indexes[0]
    raise UnsupportedError(f"there are several models here ({listed(indexes)}); name the index of the one you mean")


def read_weight_map(source: Source, index: str) -> Mapping[str, str]:
    """Names to files, all of them in ``source``.

    Raises:
        MalformedError: it is no such index. IncompleteError: a file is missing. UnsafeError: it names one outside.
    """
    found = parse_json(source.read_all(index, limit_bytes=MAX_INDEX_BYTES), index)
    weight_map = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise MalformedError("the index has no weight_map of names to files", path=index)
    for file in dict.fromkeys(weight_map.values()):
        source.size(checked_name(file))
    return weight_map


def check_promises(weight_map: Mapping[str, str], index: str, file: str, names: Collection[str]) -> None:
    """``file``, which holds ``names``, holds all that the index says. Raises IncompleteError."""
    missing = [name for name, where in weight_map.items() if where == file and name not in names]
    if missing:
        raise IncompleteError(f"{index} says that it contains {missing[0]!r}, but it does not", path=file)


def cut(entries: Mapping[str, TensorEntry], max_bytes: int | None) -> list[dict[str, TensorEntry]]:
    """Consecutive tensors in files of at most ``max_bytes`` of data; a larger tensor has a file of its own."""
    parts: list[dict[str, TensorEntry]] = [{}]
    filled = 0
    for name, entry in entries.items():
        if max_bytes is not None and parts[-1] and filled + entry.num_bytes > max_bytes:
            parts.append({})
            filled = 0
        parts[-1][name] = entry
        filled += entry.num_bytes
    return parts


def index_layout(
    path: str, parts: Mapping[str, Iterable[tuple[str, TensorEntry]]], aliases: Mapping[str, str]
) -> FileLayout:
    """The index of files that hold ``parts``; a tied name lies where its owner does."""
    from ckpt_tools.core.layout import FileLayout, Literal

    listed = {file: dict(part) for file, part in parts.items()}
    total = sum(entry.num_bytes for part in listed.values() for entry in part.values())
    weight_map = {name: file for file, part in listed.items() for name in part}
    weight_map |= {alias: weight_map[owner] for alias, owner in aliases.items() if owner in weight_map}
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return FileLayout(path, (Literal(json.dumps(index, indent=2, ensure_ascii=False).encode() + b"\n"),))

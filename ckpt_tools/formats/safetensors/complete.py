"""Completeness of a Hugging Face model: all shards are there, reach to their ends and hold tensors."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping
from typing import Any

from ckpt_tools.formats.safetensors.rank_pieces import check_all_ranks_present
from ckpt_tools.serialization.strict_json import parse_json
from ckpt_tools.state_tree.incomplete_state import why_delta, why_no_model
from ckpt_tools.trainers.saved import SavedCheckpoint, get_parent_folder

MAX_HEADER_BYTES = 100_000_000

_NUMBERED_SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.(?:safetensors|bin)")


def problem(saved: SavedCheckpoint) -> str | None:
    truncations = (_check_file_end(saved, path) for path in saved.files if path.endswith(".safetensors"))
    naming_problem = why_no_model(saved.files) or _check_index(saved) or _check_numbered_shards(saved)
    for folder in {get_parent_folder(path) for path in saved.files}:
        check_all_ranks_present(path.rpartition("/")[2] for path in saved.files if get_parent_folder(path) == folder)
    return naming_problem or next(filter(None, truncations), None) or _find_duplicate_tensor(saved)


def _check_index(saved: SavedCheckpoint) -> str | None:
    """Shards that an index names."""
    for path in saved.files:
        if path.endswith((".safetensors.index.json", ".bin.index.json")):
            index = saved.read_json_object(saved.path_in_run(path))
            if (delta_reason := why_delta(index.get("metadata"))) is not None and not _has_base(
                saved, index["metadata"]
            ):
                return delta_reason
            names = index.get("weight_map", {})
            folder = get_parent_folder(path)
            for name in sorted({*names.values()}) if isinstance(names, dict) else []:
                file = f"{folder}/{name}" if folder else str(name)
                if file not in saved.files:
                    return f"{file} is missing, which {path} names"
    return None


def _has_base(saved: SavedCheckpoint, delta_metadata: Mapping[str, Any]) -> bool:
    """Whether the version that a delta is against is beside it in the run. Version 0 is the engine's own model."""
    base_version = str(delta_metadata.get("base_version"))
    base_folder = f"{get_parent_folder(saved.root)}/weight_v{base_version:0>6}/".lstrip("/")
    if base_version.isdecimal() and not int(base_version):
        return True
    return not saved.is_run and any(path.startswith(base_folder) for path in saved.run.files)


def _check_numbered_shards(saved: SavedCheckpoint) -> str | None:
    """Shards that number themselves: ``model-00001-of-00003.safetensors``. slime counts from 0."""
    numbers_by_set: dict[tuple[str, int], set[int]] = {}
    for path in saved.files:
        match = _NUMBERED_SHARD.fullmatch(path)
        if match is not None:
            numbers_by_set.setdefault((match[1], int(match[3])), set()).add(int(match[2]))
    for (stem, size), numbers in numbers_by_set.items():
        if missing := sorted({number + (0 not in numbers) for number in range(size)} - numbers):
            return f"{stem}-{missing[0]:05d}-of-{size:05d} is missing"
    return None


def is_empty(saved: SavedCheckpoint, path: str) -> bool:
    """True if the header of a file lists no tensor."""
    if not path.endswith(".safetensors"):
        return False
    return not any(True for _ in _iter_tensor_stops(_read_header(saved, path)))


def _read_header(saved: SavedCheckpoint, path: str) -> Any:
    read, _, _ = saved.get_archive_arguments(path)
    (length,) = struct.unpack("<Q", read(0, 8))
    return parse_json(read(8, 8 + length), path)


def _find_duplicate_tensor(saved: SavedCheckpoint) -> str | None:
    """Shards with the same tensors, which are of ranks: each has its part of them."""
    file_by_tensor: dict[tuple[str, str, str], str] = {}
    shards = {
        path: match for path in saved.files if (match := _NUMBERED_SHARD.fullmatch(path)) and path.endswith("tensors")
    }
    for path, match in shards.items() if len(shards) > 1 else ():
        for name in {*_read_header(saved, path)} - {"__metadata__"}:
            other = file_by_tensor.setdefault((match[1], match[3], name), path)
            if other != path:
                return f"tensors are in two files, {other} and {path}: they may be those of ranks, with a part of each"
    return None


def _check_file_end(saved: SavedCheckpoint, path: str) -> str | None:
    read, size, _ = saved.get_archive_arguments(path)
    if size < 8:
        return f"{path} is cut off"
    (length,) = struct.unpack("<Q", read(0, 8))
    if length > min(size - 8, MAX_HEADER_BYTES):
        return f"{path} is cut off, or it is not a safetensors file"
    end = 8 + length + max(_iter_tensor_stops(_read_header(saved, path)), default=0)
    return None if size == end else f"{path} has {size:,} bytes instead of {end:,}: it is cut off or damaged"


def _iter_tensor_stops(header: Any) -> Iterator[int]:
    for name, entry in header.items() if isinstance(header, dict) else ():
        offsets = entry.get("data_offsets") if isinstance(entry, dict) and name != "__metadata__" else None
        if isinstance(offsets, list) and len(offsets) == 2 and type(offsets[1]) is int:
            yield offsets[1]

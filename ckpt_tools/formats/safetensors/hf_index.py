"""The index of a sharded Hugging Face model: JSON that maps each tensor's name to the file it lies in."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ckpt_tools.core.notes import Note, Outcome
from ckpt_tools.core.option_names import format_option
from ckpt_tools.errors import (
    IncompleteError,
    MalformedError,
    SeveralCheckpointsError,
    UnsupportedError,
    name_file_in_errors,
)
from ckpt_tools.formats.base import DeltaFolderError
from ckpt_tools.messages.wording import join_names
from ckpt_tools.serialization.strict_json import parse_json
from ckpt_tools.state_tree.incomplete_state import why_delta
from ckpt_tools.stores.source import Source, check_file_name

if TYPE_CHECKING:
    from ckpt_tools.core.layout import FileLayout
    from ckpt_tools.core.manifest import TensorEntry
    from ckpt_tools.core.options import WriteOptions

MAX_INDEX_BYTES = 256 << 20
"""A million names of 200 characters; no index is larger."""


def find_index(paths: Iterable[str], preferred: str) -> str | None:
    """The index among ``paths`` whose ending is that of ``preferred``; if there are several, ``preferred`` itself.

    Raises:
        UnsupportedError: there are several, and none is ``preferred``.
    """
    index_suffix = preferred[preferred.index(".") :]
    indexes = [path for path in paths if "/" not in path and path.endswith(index_suffix)]
    if preferred in indexes or len(indexes) < 2:
        return preferred if preferred in indexes else next(iter(indexes), None)
    raise UnsupportedError(f"there are several models here ({join_names(indexes)}); name the index of the one you mean")


def are_numbered_shards(source: Source, files: list[str], suffix: str) -> bool:
    """Whether ``files`` number themselves as the shards of one model. Raises IncompleteError if one is missing, unless
    the one file was itself named."""
    shard_pattern = re.compile(rf".*-(\d{{5}})-of-(\d{{5}}){re.escape(suffix)}")
    numbers = {(int(match[1]), int(match[2])) for file in files if (match := shard_pattern.fullmatch(file))}
    totals = {total for _, total in numbers}
    if len(numbers) != len(files) or source.is_one_file or (len(files) == 1 and totals == {1}):
        return False
    complete_numbers = {(number, total) for total in totals for number in range(1, total + 1)}
    if len(totals) > 1 and numbers == complete_numbers:
        sizes = ", ".join(f"of {total}" for total in sorted(totals))
        raise SeveralCheckpointsError(
            f"{len(totals)} complete sets of shards ({sizes}) and no index: name one, in a folder of its own"
        )
    if numbers != complete_numbers:
        present = files[0] if len(files) == 1 else f"{files[0]} ... {files[-1]}"
        raise IncompleteError(f"{present}: {len(files)} of {max(totals):,} shards, and the others are missing")
    return True


def read_weight_map(source: Source, index: str) -> tuple[Mapping[str, str], list[Note]]:
    """The file of each name, which is in ``source``, and notes on other entries of the index but for sizes. No names if
    a model in one file is beside the index, which transformers loads instead.

    Raises:
        MalformedError: it is not such an index. IncompleteError: a file is missing. UnsafeError: it names one outside.
    """
    index_json = parse_json(source.read_all(index, limit_bytes=MAX_INDEX_BYTES), index)
    with name_file_in_errors(index):
        weight_map = get_weight_map(index_json)
    if (why := why_delta(index_json.get("metadata"))) is not None:
        raise DeltaFolderError(why, path=index)
    files, single_file = dict.fromkeys(weight_map.values()), index.removesuffix(".index.json")
    if single_file in source.files and single_file not in files and single_file in _PREFERRED_OVER_INDEX:
        noted_names = [name for name in (index, *files) if name in source.files]
        why = f"not read: {single_file} is beside it, and transformers loads that"
        return {}, [Note(Outcome.DOUBTFUL, name, why) for name in noted_names]
    for file in files:
        source.size(check_file_name(file))
    metadata = index_json.get("metadata")
    noted_names = [name for name in metadata if name not in _SIZE_KEYS] if isinstance(metadata, dict) else []
    return weight_map, [Note(Outcome.DROPPED, f"{name} in {index}", "an index is written anew") for name in noted_names]


def get_weight_map(index_json: Any) -> dict[str, str]:
    """The file of each name in the JSON of an index. Raises MalformedError."""
    weight_map = index_json.get("weight_map") if isinstance(index_json, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise MalformedError("the index has no weight_map of names to files")
    return weight_map


_PREFERRED_OVER_INDEX = ("model.safetensors", "pytorch_model.bin")
"""Files that ``from_pretrained`` of transformers looks for before their index; diffusers looks for the index first."""

_SIZE_KEYS = ("total_size", "total_parameters")


def check_indexed_names(weight_map: Mapping[str, str], index_path: str, file: str, names: Collection[str]) -> None:
    """``file``, which holds ``names``, holds all that the index says. Raises IncompleteError."""
    missing = [name for name, where in weight_map.items() if where == file and name not in names]
    if missing:
        raise IncompleteError(f"{index_path} says that it contains {missing[0]!r}, but it does not", path=file)


def split_into_shards(
    entries: Mapping[str, TensorEntry], options: WriteOptions, name: str
) -> dict[str, dict[str, TensorEntry]]:
    """The tensors of each file: of ``name``, or of shards with numbers in it, of consecutive tensors.

    A shard has at most ``max_shard_bytes`` of data; a larger tensor has one of its own. Raises UnsupportedError if the
    destination is one file and several are needed.
    """
    shard_tensors: list[dict[str, TensorEntry]] = [{}]
    filled_bytes = 0
    for key, entry in entries.items():
        if (
            options.max_shard_bytes is not None
            and shard_tensors[-1]
            and filled_bytes + entry.num_bytes > options.max_shard_bytes
        ):
            shard_tensors.append({})
            filled_bytes = 0
        shard_tensors[-1][key] = entry
        filled_bytes += entry.num_bytes
    if len(shard_tensors) == 1:
        return {options.file_name or name: shard_tensors[0]}
    if options.file_name is not None:
        raise UnsupportedError(
            f"{options.file_name} is one file, but {format_option('max_shard_size')} needs {len(shard_tensors)}; "
            f"name a folder"
        )
    stem, _, suffix = name.rpartition(".")
    return {
        f"{stem}-{number:05d}-of-{len(shard_tensors):05d}.{suffix}": part
        for number, part in enumerate(shard_tensors, 1)
    }


def build_index_layout(
    path: str, tensors_by_file: Mapping[str, Mapping[str, TensorEntry]], aliases: Mapping[str, str]
) -> FileLayout:
    """The index of files that hold ``tensors_by_file``; a tied name lies where its owner does."""
    from ckpt_tools.core.layout import FileLayout, Literal

    total_bytes = sum(entry.num_bytes for part in tensors_by_file.values() for entry in part.values())
    weight_map = {name: file for file, part in tensors_by_file.items() for name in part}
    weight_map |= {alias: weight_map[owner] for alias, owner in aliases.items() if owner in weight_map}
    index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
    return FileLayout(path, (Literal(json.dumps(index, indent=2, ensure_ascii=False).encode() + b"\n"),))

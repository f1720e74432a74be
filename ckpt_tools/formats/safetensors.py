"""safetensors: a length, a JSON header, and the tensors' bytes.

Invariants, after the format's own specification and ``safetensors/src/tensor.rs``: the header's length is a
little-endian u64 of at most 100 MB, no key appears twice, every tensor's range is as long as its shape and dtype say,
and the ranges cover the data exactly, without a gap or an overlap. A sharded model has
``<name>-0000i-of-0000n.safetensors`` files and an index of Hugging Face's form.

Tied weights are stored once; as ``safetensors.torch.save_model`` does, the metadata maps each alias to the name stored.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from ckpt_tools.boxes import Box
from ckpt_tools.containers.hf_index import (
    check_promises,
    choose_index,
    cut,
    index_layout,
    parse_json,
    read_weight_map,
)
from ckpt_tools.dtypes import DType, from_safetensors
from ckpt_tools.errors import IncompleteError, MalformedError, UnsupportedError
from ckpt_tools.formats.base import ReadOptions, WriteOptions
from ckpt_tools.layout import FileLayout, Layout, Literal, Payload
from ckpt_tools.manifest import (
    WEIGHT,
    ByteRange,
    Kind,
    Manifest,
    Shard,
    ShardTable,
    StateKey,
    TensorEntry,
)
from ckpt_tools.stores.base import Source

MAX_HEADER_BYTES = 100_000_000
"""The library's own limit, tensor.rs MAX_HEADER_SIZE."""

INDEX_SUFFIX = ".safetensors.index.json"
_SHARD_NAME = re.compile(r".*-(\d{5})-of-(\d{5})\.safetensors")


@dataclass(frozen=True, slots=True)
class _Header:
    """One file's tensors by name, and its metadata."""

    tensors: Mapping[str, tuple[DType, tuple[int, ...], ByteRange]]
    metadata: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class SafetensorsReader:
    """Reads a single file, or a folder with an index or a complete set of shards."""

    name: str = "safetensors"

    def detect(self, source: Source) -> bool:
        return any(_is_ours(path) for path in source.files)

    def read_manifest(self, source: Source, options: ReadOptions) -> Manifest:
        headers = {path: read_header(source, path) for path in _files(source)}
        owners = _owners(headers)
        tensors = {
            StateKey(name): _entry(*header.tensors[name])
            for header in headers.values()
            for name in header.tensors
            if owners[name] is header
        }
        return Manifest("safetensors", tensors, aliases=_aliases(headers.values(), tensors))


def _is_ours(path: str) -> bool:
    return "/" not in path and path.endswith((".safetensors", INDEX_SUFFIX))


def _files(source: Source) -> list[str]:
    """The files that make up the model, in order."""
    indexes = [path for path in source.files if _is_ours(path) and path.endswith(INDEX_SUFFIX)]
    if indexes:
        return _indexed_files(source, choose_index(indexes, f"model{INDEX_SUFFIX}"))
    files = [path for path in source.files if _is_ours(path)]
    if len(files) > 1:
        _check_shards(files)
    return files


def _indexed_files(source: Source, index: str) -> list[str]:
    weight_map = read_weight_map(source, index)
    files = list(dict.fromkeys(weight_map.values()))
    for file in files:
        check_promises(weight_map, index, file, read_header(source, file).tensors)
    return files


def _check_shards(files: list[str]) -> None:
    """A folder without an index is one model only if its files number themselves completely."""
    numbers = [_SHARD_NAME.fullmatch(file) for file in files]
    if not all(numbers):
        raise UnsupportedError(f"several models lie here ({', '.join(files[:4])}); name the file of the one you mean")
    present = {(int(match[1]), int(match[2])) for match in numbers if match}
    totals = {total for _, total in present}
    expected = {(number, total) for total in totals for number in range(1, total + 1)}
    if len(totals) > 1 or present != expected:
        raise IncompleteError(f"of the shards {files[0]} ... {files[-1]} some are missing")


def read_header(source: Source, path: str) -> _Header:
    """The checked header of one file.

    Raises:
        MalformedError, IncompleteError: a rule of the format is broken.
    """
    size = source.size(path)
    if size < 8:
        raise IncompleteError(f"{size} bytes are no safetensors file", path=path)
    (length,) = struct.unpack("<Q", source.read(path, 0, 8))
    if length > MAX_HEADER_BYTES:
        raise MalformedError(
            f"its header claims {length:,} bytes, more than the {MAX_HEADER_BYTES:,} allowed", path=path
        )
    if 8 + length > size:
        raise IncompleteError(f"its header of {length:,} bytes does not fit its {size:,} bytes", path=path)
    found = parse_json(source.read(path, 8, 8 + length), path)
    if not isinstance(found, dict):
        raise MalformedError("its header is no JSON object", path=path)
    metadata = _metadata(found.pop("__metadata__", {}), path)
    tensors = {name: _described(name, info, 8 + length, path) for name, info in found.items()}
    _check_ranges(tensors, 8 + length, size, path)
    return _Header(tensors, metadata)


def _metadata(found: Any, path: str) -> dict[str, str]:
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise MalformedError("__metadata__ does not map strings to strings", path=path)
    return found


def _described(name: str, info: Any, data_start: int, path: str) -> tuple[DType, tuple[int, ...], ByteRange]:
    if not isinstance(info, dict) or set(info) != {"dtype", "shape", "data_offsets"}:
        raise MalformedError("an entry needs dtype, shape and data_offsets, and nothing else", path=path, key=name)
    dtype = from_safetensors(info["dtype"]) if isinstance(info["dtype"], str) else None
    if dtype is None:
        raise UnsupportedError(f"unknown dtype {info['dtype']!r}", path=path, key=name)
    shape, offsets = info["shape"], info["data_offsets"]
    if not _naturals(shape) or not _naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise MalformedError(f"shape {shape} or data_offsets {offsets} are no such numbers", path=path, key=name)
    if prod(shape) * dtype.item_bytes != offsets[1] - offsets[0]:
        raise MalformedError(
            f"{offsets[1] - offsets[0]:,} bytes cannot hold {shape} of {dtype.value}", path=path, key=name
        )
    return dtype, tuple(shape), ByteRange(path, data_start + offsets[0], data_start + offsets[1])


def _naturals(found: Any) -> bool:
    return isinstance(found, list) and all(type(n) is int and 0 <= n < 1 << 63 for n in found)


def _check_ranges(
    tensors: Mapping[str, tuple[DType, tuple[int, ...], ByteRange]], data_start: int, size: int, path: str
) -> None:
    cursor = data_start
    for at, name in sorted((((at.start, at.stop), name) for name, (_, _, at) in tensors.items())):
        if at[0] != cursor:
            kind = "overlaps the tensor before it" if at[0] < cursor else "leaves a gap before it"
            raise MalformedError(f"its range {kind}", path=path, key=name)
        cursor = at[1]
    if cursor > size:
        raise IncompleteError(f"it should have {cursor:,} bytes and has {size:,}; it was cut off", path=path)
    if cursor < size:
        raise MalformedError(f"{size - cursor:,} bytes after the last tensor belong to none", path=path)


def _owners(headers: Mapping[str, _Header]) -> dict[str, _Header]:
    owners: dict[str, _Header] = {}
    for path, header in headers.items():
        for name in header.tensors:
            if name in owners:
                raise MalformedError("this tensor lies in two files", path=path, key=name)
            owners[name] = header
    return owners


def _entry(dtype: DType, shape: tuple[int, ...], at: ByteRange) -> TensorEntry:
    kind = Kind.PARAMETER if dtype.is_floating else Kind.BUFFER
    return TensorEntry(shape, dtype, kind, ShardTable.build(shape, dtype, [Shard(Box.whole(shape), at)]))


def _aliases(headers: Iterable[_Header], tensors: Mapping[StateKey, TensorEntry]) -> dict[str, str]:
    return {
        alias: owner
        for header in headers
        for alias, owner in header.metadata.items()
        if StateKey(owner) in tensors and StateKey(alias) not in tensors
    }


@dataclass(frozen=True, slots=True)
class SafetensorsWriter:
    """Writes weights and buffers: one file, or shards with their index."""

    name: str = "safetensors"
    holds_optimizer: bool = False
    holds_masters: bool = False

    def layout(self, manifest: Manifest, options: WriteOptions) -> Layout:
        weights = {key.fqn: entry for key, entry in manifest.tensors.items() if key.slot == WEIGHT}
        parts = cut(weights, options.max_shard_bytes)
        stem = "model"
        if len(parts) == 1:
            file_name = options.file_name or f"{stem}.safetensors"
            return Layout((_file_layout(file_name, parts[0], manifest.aliases),))
        if options.file_name is not None:
            raise UnsupportedError(
                f"{options.file_name} is one file, and --max-shard-size asks for {len(parts)}; name a folder"
            )
        names = [f"{stem}-{number:05d}-of-{len(parts):05d}.safetensors" for number in range(1, len(parts) + 1)]
        files = [_file_layout(name, part, manifest.aliases) for name, part in zip(names, parts, strict=True)]
        listed = {name: part.items() for name, part in zip(names, parts, strict=True)}
        return Layout((*files, index_layout(f"{stem}{INDEX_SUFFIX}", listed, {})))


def _file_layout(path: str, part: Mapping[str, TensorEntry], aliases: Mapping[str, str]) -> FileLayout:
    """Wide elements first, so that every tensor is aligned to its own width."""
    ordered = dict(sorted(part.items(), key=lambda item: -item[1].dtype.item_bytes))
    payloads = [
        Payload(StateKey(name), Box.whole(entry.shape), entry.shape, entry.dtype) for name, entry in ordered.items()
    ]
    return FileLayout(path, (Literal(_header_bytes(ordered, aliases)), *payloads))


def _header_bytes(tensors: Mapping[str, TensorEntry], aliases: Mapping[str, str]) -> bytes:
    ties = {alias: owner for alias, owner in aliases.items() if owner in tensors}
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **ties}}
    cursor = 0
    for name, entry in tensors.items():
        header[name] = {
            "dtype": _dtype_name(name, entry.dtype),
            "shape": list(entry.shape),
            "data_offsets": [cursor, cursor + entry.num_bytes],
        }
        cursor += entry.num_bytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise UnsupportedError(f"a header of {len(text):,} bytes is more than the format allows; use --max-shard-size")
    return struct.pack("<Q", len(text)) + text


def _dtype_name(name: str, dtype: DType) -> str:
    found = dtype.safetensors_name
    if found is None:
        raise UnsupportedError(f"safetensors has no {dtype.value}; write it with --to torch or exclude it", key=name)
    return found

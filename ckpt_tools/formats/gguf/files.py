"""GGUF as a checkpoint: one file, or the parts into which ``llama-gguf-split`` cuts one.

Our own reader, because that of the library ``gguf`` maps a local file into memory, makes an array of every token of the
vocabulary, and takes overlapping tensors; this one reads the header of a file at any store, and no more.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

import numpy as np

from ckpt_tools.core.boxes import Box
from ckpt_tools.core.casts import suggest_dtype_fix
from ckpt_tools.core.layout import FileLayout, Layout, Literal, Padding, Payload, Segment, merge_literals
from ckpt_tools.core.manifest import Kind, Manifest, StateKey, TensorEntry
from ckpt_tools.core.matching import is_selected
from ckpt_tools.core.notes import Note, Outcome
from ckpt_tools.core.option_names import format_option
from ckpt_tools.core.options import ReadOptions, WriteOptions
from ckpt_tools.core.shards import ShardTable
from ckpt_tools.errors import IncompleteError, MalformedError, SeveralCheckpointsError, UnsupportedError
from ckpt_tools.formats.flat_names import collect_weights_by_name
from ckpt_tools.formats.gguf.header import (
    ALIGNMENT_KEY,
    ARRAY,
    DEFAULT_ALIGNMENT,
    DTYPES,
    MAGIC,
    MAX_DIMS,
    MAX_NAME_BYTES,
    SCALAR_NUMBERS,
    SCALARS,
    STRING,
    GgufHeader,
    TensorInfo,
    Value,
    align_up,
    read_gguf_header,
)
from ckpt_tools.messages.loading_code import quote_literal
from ckpt_tools.messages.wording import format_count, join_names
from ckpt_tools.stores.source import Source

SUFFIX = ".gguf"
KEY_VALUES_ENTRY = "gguf"
"""The entry of a manifest that holds the key-values of a file, each with its type."""
ARCHITECTURE_KEY = "general.architecture"
UNKNOWN_ARCHITECTURE = "unknown"
SHARED_MODEL_TYPES = frozenset((
    "afmoe", "apertus", "arcee", "bert", "bitnet", "bloom", "chameleon", "cohere2", "dbrx", "dots1", "ernie4_5",
    "eurobert", "exaone4", "falcon", "gemma", "gemma2", "gemma3", "gemma3n", "gemma4", "glm4", "gpt2", "gptj",
    "granite", "granitemoe", "jais2", "jamba", "lfm2", "llama", "llama4", "mamba", "mamba2", "minicpm3", "mistral3",
    "mistral4", "mpt", "nemotron", "nemotron_h", "olmo", "olmo2", "olmoe", "phi3", "phimoe", "qwen2", "qwen3",
    "seed_oss", "smollm3", "stablelm", "starcoder2", "t5",
))  # fmt: skip
"""``model_type`` of transformers that llama.cpp calls the same (gguf 0.19, constants.py ``MODEL_ARCH_NAMES``)."""

_PART_NUMBER_KEY, _PART_COUNT_KEY = "split.no", "split.count"
_SPLIT_KEYS = (_PART_NUMBER_KEY, _PART_COUNT_KEY, "split.tensors.count")

_TYPE_NUMBERS = {dtype: number for number, dtype in DTYPES.items()}


def detect(source: Source) -> bool:
    return any("/" not in path and path.endswith(SUFFIX) for path in source.files)


def read(source: Source, options: ReadOptions) -> Manifest:
    parts = _find_parts(source)
    headers = _order_split_files(dict(zip(parts, source.map_files(read_gguf_header, parts), strict=True)))
    tensors = _merge_tensors(headers)
    selection = options.include, options.exclude
    selected = {name: info for name, info in tensors.items() if info.dtype is not None or is_selected(name, *selection)}
    entries = {StateKey(name): _make_entry(name, info) for name, info in selected.items()}
    unselected = [info for name, info in tensors.items() if name not in selected]
    unselected_bytes = sum(info.byte_range.stop - info.byte_range.start for info in unselected)
    what = format_count(len(unselected), "quantized tensor")
    note = Note(Outcome.DROPPED, what, "not selected", len(unselected), unselected_bytes, asked=True)
    key_values = {name: value for name, value in headers[0].values.items() if name not in _SPLIT_KEYS}
    return Manifest(
        "gguf",
        entries,
        extra={KEY_VALUES_ENTRY: key_values},
        notes=(note,) if unselected else (),
        unreadable_names=frozenset(tensors.keys() - selected.keys()),
    )


def own_files(source: Source, manifest: Manifest) -> frozenset[str]:
    return frozenset(_find_parts(source))


def _find_parts(source: Source) -> list[str]:
    """The files of the model, by their names; all files if none has the ending."""
    return [path for path in source.files if "/" not in path and path.endswith(SUFFIX)] or list(source.files)


def _order_split_files(headers: Mapping[str, GgufHeader]) -> list[GgufHeader]:
    part_counts = {path: header.get_integer(_PART_COUNT_KEY) or 1 for path, header in headers.items()}
    if len(headers) > 1 and set(part_counts.values()) != {len(headers)}:
        if 1 not in part_counts.values() and len(set(part_counts.values())) == 1:
            raise IncompleteError(f"{len(headers)} of {next(iter(part_counts.values()))} parts of the model are here")
        raise SeveralCheckpointsError(
            f"there are several models here ({join_names(list(headers))}); name the file of the one you mean"
        )
    path, num_parts = next(iter(part_counts.items()))
    if num_parts != len(headers):
        raise IncompleteError(
            f"it is one of {num_parts} parts of a model; name the folder that holds them all", path=path
        )
    header_by_number = {header.get_integer(_PART_NUMBER_KEY) or 0: header for header in headers.values()}
    if set(header_by_number) != set(range(num_parts)):
        raise IncompleteError(f"some of the {num_parts} parts of the model are missing, or are there twice", path=path)
    return [header_by_number[number] for number in sorted(header_by_number)]


def _merge_tensors(headers: list[GgufHeader]) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    for header in headers:
        for name, info in header.tensors.items():
            if name in tensors:
                raise MalformedError("this tensor is in two files", path=info.byte_range.file, key=name)
            tensors[name] = info
    if not tensors:
        raise UnsupportedError("it holds no tensors, only key-values such as a vocabulary")
    stated_count = headers[0].get_integer("split.tensors.count")
    if stated_count is not None and stated_count != len(tensors):
        raise IncompleteError(f"the parts hold {format_count(len(tensors), 'tensor')} instead of {stated_count}")
    return tensors


def _make_entry(name: str, info: TensorInfo) -> TensorEntry:
    if info.dtype is None:
        raise UnsupportedError(
            f"it is quantized ({info.type_name}), and its elements are not read; dequantize the file first "
            "(llama-quantize --allow-requantize IN OUT F32, of llama.cpp), or convert the others with "
            f"{format_option('include')} or {format_option('exclude')}",
            path=info.byte_range.file,
            key=name,
        )
    kind = Kind.PARAMETER if info.dtype.is_floating else Kind.BUFFER
    return TensorEntry(info.shape, info.dtype, kind, ShardTable.whole(info.shape, info.dtype, info.byte_range))


def layout(manifest: Manifest, options: WriteOptions) -> Layout:
    keys_by_name, notes = collect_weights_by_name(manifest, "GGUF")
    key_values, value_notes = _choose_key_values(manifest, options.model_type)
    entries = {name: manifest.tensors[key] for name, key in keys_by_name.items()}
    alignment = key_values.get(ALIGNMENT_KEY, ("uint32", DEFAULT_ALIGNMENT))[1]
    segments: list[Segment] = list(_build_header_segments(entries, key_values, alignment))
    for name, entry in entries.items():
        segments.append(Payload(keys_by_name[name], Box.whole(entry.shape), entry.shape, entry.dtype))
        segments.append(Padding(-entry.num_bytes % alignment))
    path = options.file_name or f"model{SUFFIX}"
    return Layout(
        (FileLayout(path, tuple(merge_literals(each for each in segments if each.num_bytes))),), (*notes, *value_notes)
    )


def loading(path: str, manifest: Manifest, layout: Layout, options: WriteOptions) -> str:
    name = path if options.file_name else f"{path}/{layout.files[0].path}"
    return f"from gguf import GGUFReader  # llama.cpp: --model FILE\nreader = GGUFReader({quote_literal(name)})"


def _choose_key_values(manifest: Manifest, model_type: str | None) -> tuple[dict[str, Value], tuple[Note, ...]]:
    """The source's key-values; the architecture only, if the source is in another format."""
    values = parse_key_values(manifest.extra.get(KEY_VALUES_ENTRY, {}))
    if ARCHITECTURE_KEY in values:
        return values, ()
    llama_cpp_advice = (
        "llama.cpp will refuse this file without them; for one that it loads, write a folder of safetensors with "
        "config.json and run llama.cpp's convert_hf_to_gguf.py"
    )
    missing_note = Note(Outcome.MISSING, "hyperparameters and vocabulary", llama_cpp_advice)
    if model_type in SHARED_MODEL_TYPES:
        return {ARCHITECTURE_KEY: ("string", model_type), **values}, (missing_note,)
    cause = "the source does not say it" if model_type is None else f"llama.cpp has no architecture {model_type!r}"
    architecture_note = Note(Outcome.DEFAULTED, ARCHITECTURE_KEY, f"{cause}; {UNKNOWN_ARCHITECTURE!r} is written")
    return {ARCHITECTURE_KEY: ("string", UNKNOWN_ARCHITECTURE), **values}, (architecture_note, missing_note)


def _build_header_segments(
    entries: Mapping[str, TensorEntry], values: Mapping[str, Value], alignment: int
) -> tuple[Segment, ...]:
    header_parts = [MAGIC, struct.pack("<IQQ", 3, len(entries), len(values))]
    header_parts += [pack_key_value(name, value) for name, value in values.items()]
    offset = 0
    for name, entry in entries.items():
        header_parts.append(_pack_tensor_info(name, entry, offset))
        offset = align_up(offset + entry.num_bytes, alignment)
    data = b"".join(header_parts)
    return (Literal(data), Padding(-len(data) % alignment))


def _pack_tensor_info(name: str, entry: TensorEntry, offset: int) -> bytes:
    if "\0" in name:
        raise UnsupportedError(
            f"a NUL would end the name for llama.cpp; rename it with {format_option('rename')}", key=name
        )
    if len(name.encode()) > MAX_NAME_BYTES:
        raise UnsupportedError(
            f"GGUF has names of at most {MAX_NAME_BYTES} bytes; shorten it with {format_option('rename')}", key=name
        )
    if len(entry.shape) > MAX_DIMS:
        raise UnsupportedError(f"it has {len(entry.shape)} dims, and GGUF has at most {MAX_DIMS}; exclude it", key=name)
    if entry.dtype not in _TYPE_NUMBERS:
        raise UnsupportedError(f"GGUF does not support {entry.dtype.value}; {suggest_dtype_fix(entry.dtype)}", key=name)
    dims = struct.pack(f"<I{len(entry.shape)}Q", len(entry.shape), *reversed(entry.shape))
    return pack_text(name) + dims + struct.pack("<IQ", _TYPE_NUMBERS[entry.dtype], offset)


def pack_text(text: str | bytes) -> bytes:
    """A length and the text, as GGUF writes names."""
    data = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(data)) + data


def pack_key_value(name: str, value: Value) -> bytes:
    """A key with its type and value."""
    kind, content = value
    is_array = kind.endswith("[]")
    kind = kind.removesuffix("[]")
    type_number = STRING if kind == "string" else SCALAR_NUMBERS[kind]
    items = content if is_array else [content]
    type_header = struct.pack("<IIQ", ARRAY, type_number, len(items)) if is_array else struct.pack("<I", type_number)
    is_text = kind == "string"
    data = b"".join(map(pack_text, items)) if is_text else np.array(items, SCALARS[type_number][1]).tobytes()
    return pack_text(name) + type_header + data


def parse_key_values(entry: Any) -> dict[str, Value]:
    """The key-values in an entry of a checkpoint, which a file of torch may have carried as lists.

    Raises:
        UnsupportedError: the entry does not have the form that the reader of GGUF gives it.
    """
    if not isinstance(entry, Mapping):
        raise UnsupportedError(f"the entry {KEY_VALUES_ENTRY!r} of the checkpoint does not hold key-values of GGUF")
    return {str(name): _check_key_value(name, value) for name, value in entry.items()}


def _check_key_value(name: Any, value: Any) -> Value:
    kind, content = value if isinstance(value, tuple | list) and len(value) == 2 else ("", None)
    try:
        pack_key_value(str(name), (kind, content))
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
        raise UnsupportedError(f"the entry {KEY_VALUES_ENTRY}.{name} is not a key-value of GGUF") from error
    return kind, content

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
from ckpt_tools.core.wording import format_count, join_names
from ckpt_tools.errors import IncompleteError, MalformedError, SeveralCheckpointsError, UnsupportedError
from ckpt_tools.formats.flat_names import weights_by_name
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
    Header,
    TensorInfo,
    Value,
    aligned,
    read_header,
)
from ckpt_tools.stores.source import Source

SUFFIX = ".gguf"
ENTRY = "gguf"
"""The entry of a manifest that holds the key-values of a file, each with its type."""
ARCHITECTURE = "general.architecture"
NO_ARCHITECTURE = "unknown"
SAME_NAMES = frozenset((
    "afmoe", "apertus", "arcee", "bert", "bitnet", "bloom", "chameleon", "cohere2", "dbrx", "dots1", "ernie4_5",
    "eurobert", "exaone4", "falcon", "gemma", "gemma2", "gemma3", "gemma3n", "gemma4", "glm4", "gpt2", "gptj",
    "granite", "granitemoe", "jais2", "jamba", "lfm2", "llama", "llama4", "mamba", "mamba2", "minicpm3", "mistral3",
    "mistral4", "mpt", "nemotron", "nemotron_h", "olmo", "olmo2", "olmoe", "phi3", "phimoe", "qwen2", "qwen3",
    "seed_oss", "smollm3", "stablelm", "starcoder2", "t5",
))  # fmt: skip
"""``model_type`` of transformers that llama.cpp calls the same (gguf 0.19, constants.py ``MODEL_ARCH_NAMES``)."""

_PART, _PARTS = "split.no", "split.count"
_OF_SPLITS = (_PART, _PARTS, "split.tensors.count")

_TYPE_NUMBERS = {dtype: number for number, dtype in DTYPES.items()}


def read(source: Source, options: ReadOptions) -> Manifest:
    headers = _in_order({path: read_header(source, path) for path in files_of(source)})
    tensors = _tensors(headers)
    asked = options.include, options.exclude
    chosen = {name: info for name, info in tensors.items() if info.dtype is not None or is_selected(name, *asked)}
    entries = {StateKey(name): _entry(name, info) for name, info in chosen.items()}
    left = [info for name, info in tensors.items() if name not in chosen]
    values = {name: value for name, value in headers[0].values.items() if name not in _OF_SPLITS}
    names = tensors.keys() - chosen.keys()
    return Manifest("gguf", entries, extra={ENTRY: values}, notes=_left_out(left), unreadable_names=frozenset(names))


def files_of(source: Source) -> list[str]:
    """The parts of the model."""
    return [path for path in source.files if "/" not in path and path.endswith(SUFFIX)] or list(source.files)


def _in_order(headers: Mapping[str, Header]) -> list[Header]:
    parts = {path: header.number(_PARTS) or 1 for path, header in headers.items()}
    if len(headers) > 1 and set(parts.values()) != {len(headers)}:
        if 1 not in parts.values() and len(set(parts.values())) == 1:
            raise IncompleteError(f"{len(headers)} of {next(iter(parts.values()))} parts of the model are here")
        raise SeveralCheckpointsError(
            f"there are several models here ({join_names(list(headers))}); name the file of the one you mean"
        )
    path, total = next(iter(parts.items()))
    if total != len(headers):
        raise IncompleteError(f"it is one of {total} parts of a model; name the folder that holds them all", path=path)
    found = {header.number(_PART) or 0: header for header in headers.values()}
    if set(found) != set(range(total)):
        raise IncompleteError(f"some of the {total} parts of the model are missing, or are there twice", path=path)
    return [found[number] for number in sorted(found)]


def _tensors(headers: list[Header]) -> dict[str, TensorInfo]:
    found: dict[str, TensorInfo] = {}
    for header in headers:
        for name, info in header.tensors.items():
            if name in found:
                raise MalformedError("this tensor is in two files", path=info.at.file, key=name)
            found[name] = info
    if not found:
        raise UnsupportedError("it holds no tensors, only key-values such as a vocabulary")
    promised = headers[0].number("split.tensors.count")
    if promised is not None and promised != len(found):
        raise IncompleteError(f"the parts hold {format_count(len(found), 'tensor')} instead of {promised}")
    return found


def _entry(name: str, info: TensorInfo) -> TensorEntry:
    if info.dtype is None:
        raise UnsupportedError(
            f"it is quantized ({info.type_name}), and its elements are not read; dequantize the file first "
            "(llama-quantize --allow-requantize IN OUT F32, of llama.cpp), or convert the others with "
            f"{format_option('include')} or {format_option('exclude')}",
            path=info.at.file,
            key=name,
        )
    kind = Kind.PARAMETER if info.dtype.is_floating else Kind.BUFFER
    return TensorEntry(info.shape, info.dtype, kind, ShardTable.whole(info.shape, info.dtype, info.at))


def _left_out(left: list[TensorInfo]) -> tuple[Note, ...]:
    size = sum(info.at.stop - info.at.start for info in left)
    what = format_count(len(left), "quantized tensor")
    return (Note(Outcome.DROPPED, what, "not selected", len(left), size, asked=True),) if left else ()


def layout(manifest: Manifest, options: WriteOptions) -> Layout:
    names, notes = weights_by_name(manifest, "GGUF")
    values, more = _written_values(manifest, options.model_type)
    entries = {name: manifest.tensors[key] for name, key in names.items()}
    alignment = values.get(ALIGNMENT_KEY, ("uint32", DEFAULT_ALIGNMENT))[1]
    segments: list[Segment] = list(_head(entries, values, alignment))
    for name, entry in entries.items():
        segments.append(Payload(names[name], Box.whole(entry.shape), entry.shape, entry.dtype))
        segments += _padding(entry.num_bytes, alignment)
    path = options.file_name or f"model{SUFFIX}"
    return Layout(
        (FileLayout(path, tuple(merge_literals(each for each in segments if each.num_bytes))),), (*notes, *more)
    )


def _written_values(manifest: Manifest, model_type: str | None) -> tuple[dict[str, Value], tuple[Note, ...]]:
    """The source's key-values; the architecture only, if the source is in another format."""
    values = values_of(manifest.extra.get(ENTRY, {}))
    if ARCHITECTURE in values:
        return values, ()
    why = (
        "llama.cpp will refuse this file without them; for one that it loads, write a folder of safetensors with "
        "config.json and run llama.cpp's convert_hf_to_gguf.py"
    )
    lost = Note(Outcome.MISSING, "hyperparameters and vocabulary", why)
    if model_type in SAME_NAMES:
        return {ARCHITECTURE: ("string", model_type), **values}, (lost,)
    said = "the source does not say it" if model_type is None else f"llama.cpp has no architecture {model_type!r}"
    made = Note(Outcome.DEFAULTED, ARCHITECTURE, f"{said}; {NO_ARCHITECTURE!r} is written")
    return {ARCHITECTURE: ("string", NO_ARCHITECTURE), **values}, (made, lost)


def _head(entries: Mapping[str, TensorEntry], values: Mapping[str, Value], alignment: int) -> tuple[Segment, ...]:
    parts = [MAGIC, struct.pack("<IQQ", 3, len(entries), len(values))]
    parts += [packed(name, value) for name, value in values.items()]
    offset = 0
    for name, entry in entries.items():
        parts.append(_description(name, entry, offset))
        offset = aligned(offset + entry.num_bytes, alignment)
    data = b"".join(parts)
    return (Literal(data), *_padding(len(data), alignment))


def _padding(num_bytes: int, alignment: int) -> list[Segment]:
    return [Padding(-num_bytes % alignment)]


def _description(name: str, entry: TensorEntry, offset: int) -> bytes:
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
    return packed_text(name) + dims + struct.pack("<IQ", _TYPE_NUMBERS[entry.dtype], offset)


def packed_text(text: str | bytes) -> bytes:
    """A length and the text, as GGUF writes names."""
    data = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(data)) + data


def packed(name: str, value: Value) -> bytes:
    """A key with its type and value."""
    kind, found = value
    is_array = kind.endswith("[]")
    kind = kind.removesuffix("[]")
    number = STRING if kind == "string" else SCALAR_NUMBERS[kind]
    items = found if is_array else [found]
    head = struct.pack("<IIQ", ARRAY, number, len(items)) if is_array else struct.pack("<I", number)
    is_text = kind == "string"
    data = b"".join(map(packed_text, items)) if is_text else np.array(items, SCALARS[number][1]).tobytes()
    return packed_text(name) + head + data


def values_of(entry: Any) -> dict[str, Value]:
    """The key-values in an entry of a checkpoint, which a file of torch may have carried as lists.

    Raises:
        UnsupportedError: it is not what reading GGUF gave.
    """
    if not isinstance(entry, Mapping):
        raise UnsupportedError(f"the entry {ENTRY!r} of the checkpoint does not hold key-values of GGUF")
    return {str(name): _checked(name, value) for name, value in entry.items()}


def _checked(name: Any, value: Any) -> Value:
    kind, found = value if isinstance(value, tuple | list) and len(value) == 2 else ("", None)
    try:
        packed(str(name), (kind, found))
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
        raise UnsupportedError(f"the entry {ENTRY}.{name} is not a key-value of GGUF") from error
    return kind, found

"""safetensors: a length, a JSON header, and the tensors' bytes.

Invariants, after the format's own specification and ``safetensors/src/tensor.rs``: the header's length is a
little-endian u64 of at most 100 MB, no key appears twice, every tensor's range is as long as its shape and dtype say,
and the ranges cover the data exactly, without a gap or an overlap. A sharded model has
``<name>-0000i-of-0000n.safetensors`` files and an index of Hugging Face's form.

Tied weights are stored once; as ``safetensors.torch.save_model`` does, the metadata maps each alias to the name stored.
What else the metadata says is an entry of the manifest, ``HEADER_ENTRY``, and each file that is written has all of it.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any

from ckpt_tools.core.boxes import Box, Shape
from ckpt_tools.core.dtypes import INT64_MAX, DType, from_safetensors
from ckpt_tools.core.format_names import HEADER_ENTRY
from ckpt_tools.core.manifest import Kind, Manifest, StateKey, TensorEntry
from ckpt_tools.core.notes import Note, Outcome
from ckpt_tools.core.option_names import format_option
from ckpt_tools.core.shards import ShardTable, SharedColumns, get_shared_columns
from ckpt_tools.core.values import are_naturals, format_brief
from ckpt_tools.errors import (
    IncompleteError,
    MalformedError,
    SeveralCheckpointsError,
    SourceNotFoundError,
    UnsupportedError,
)
from ckpt_tools.formats.safetensors.header_json import RawEntry, parse_header_json
from ckpt_tools.formats.safetensors.hf_index import (
    are_numbered_shards,
    build_index_layout,
    check_indexed_names,
    find_index,
    read_weight_map,
    split_into_shards,
)
from ckpt_tools.formats.safetensors.rank_pieces import (
    OFFSETS_KEY,
    VERSION_KEY,
    RankPiece,
    check_all_ranks_present,
    is_rank_shard_name,
    join_pieces,
    make_rank_piece,
    parse_offsets,
)
from ckpt_tools.messages.wording import format_count, join_names
from ckpt_tools.state_tree.incomplete_state import why_delta, why_no_model
from ckpt_tools.state_tree.leaf import TensorLeaf
from ckpt_tools.stores.source import Source
from ckpt_tools.trainers.lerobot import PROCESSOR_FILE

if TYPE_CHECKING:
    from ckpt_tools.core.layout import FileLayout, Layout
    from ckpt_tools.core.options import ReadOptions, WriteOptions

MAX_HEADER_BYTES = 100_000_000
"""The library's own limit, tensor.rs MAX_HEADER_SIZE."""

MODEL_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"

STATE_KEY = "ckpt_tools.state"
"""Our entry of the metadata where a file holds a whole training state: what ``state_dict.packed`` makes of it."""


_TORCH_FORMAT = "pt"
"""The library whose tensors these are, as ``format`` of the metadata says it; others' say ``mlx`` or ``np``."""


@dataclass(frozen=True, slots=True)
class SafetensorsHeader:
    tensors: Mapping[str, ShardTable]
    """Each is one range of the file."""
    metadata: Mapping[str, str]


def detect(source: Source) -> bool:
    from ckpt_tools.trainers.torch_checkpointing import has_index

    return any(map(is_safetensors_file, source.files)) and not has_index(source)


def read(source: Source, options: ReadOptions) -> Manifest:
    # headers -> tables (of whole tensors, or of pieces of ranks joined) -> ties and texts of the metadata -> manifest;
    # or, with STATE_KEY in a header, tables and the packed tree -> the whole state.
    files, weight_map, notes = _find_model_files(source)
    index = find_index(source.files, INDEX_NAME) or INDEX_NAME
    headers = dict(zip(files, source.map_files(read_safetensors_header, files), strict=True))
    for file, header in headers.items():
        check_indexed_names(weight_map, index, file, header.tensors)
    # Each file holds pieces of tensors, as torch's DCP writes them from every rank.
    are_pieces = any(OFFSETS_KEY in header.metadata for header in headers.values())
    tables = _join_rank_pieces(headers) if are_pieces else _join_files(headers)
    ties = _find_stated_ties(headers.values(), tables)
    header_texts, text_notes = _collect_texts(headers.values(), ties)
    notes, extra = notes + text_notes, {HEADER_ENTRY: header_texts} if header_texts else {}
    packed_state = next((h.metadata[STATE_KEY] for h in headers.values() if STATE_KEY in h.metadata), None)
    if packed_state is not None:
        from ckpt_tools.state_tree.packed import unpacked

        leaves = {name: TensorLeaf(table.shape, table.dtype, table) for name, table in tables.items()}
        state_manifest = unpacked(packed_state, leaves, ties, options, format_name="safetensors", where=STATE_KEY)
        return replace(state_manifest, extra={**state_manifest.extra, **extra}, notes=(*state_manifest.notes, *notes))
    if are_pieces:
        # No file says how many there are, and no piece how large its tensor is.
        why = f"the files do not state it; if one after {max(headers)} is missing, tensors are missing or end too early"
        notes.append(Note(Outcome.MISSING, "the number of ranks", why))
    tensors = dict[StateKey, TensorEntry]()
    for name, table in tables.items():
        dtype = table.dtype
        kind = Kind.PARAMETER if dtype.is_floating else Kind.BUFFER
        tensors[StateKey(name)] = TensorEntry(table.shape, dtype, kind, table)
    return Manifest("safetensors", tensors, aliases=ties, extra=extra, notes=tuple(notes))


def own_files(source: Source, manifest: Manifest) -> frozenset[str]:
    return frozenset(filter(None, [*_find_model_files(source)[0], find_index(source.files, INDEX_NAME)]))


def is_safetensors_file(path: str) -> bool:
    return "/" not in path and path.endswith((".safetensors", ".safetensors.index.json"))


def _find_model_files(source: Source) -> tuple[list[str], Mapping[str, str], list[Note]]:
    """The files of the model, the index's map, empty where there is none, and notes on the index."""
    if (why := why_no_model(filter(is_safetensors_file, source.files))) is not None:
        raise UnsupportedError(why)
    index = find_index(source.files, INDEX_NAME)
    if index is not None:
        weight_map, notes = read_weight_map(source, index)
        files = list(dict.fromkeys(weight_map.values())) or [index.removesuffix(".index.json")]
        return files, weight_map, notes
    model_files = (path for path in source.files if PROCESSOR_FILE.fullmatch(path) is None)
    files = [path for path in model_files if is_safetensors_file(path)] or list(source.files)
    if len(source.files) > 1 and not is_safetensors_file(files[0]):
        raise SourceNotFoundError(f"there is no file of safetensors in {source.store.url}")
    # A folder without an index is one model only if its files have all numbers.
    if len(files) > 1 and all(map(is_rank_shard_name, files)):
        check_all_ranks_present(files)
    elif not are_numbered_shards(source, files, ".safetensors") and len(files) > 1:
        raise SeveralCheckpointsError(
            f"there are several models here ({join_names(files)}); name the file of the one you mean"
        )
    return files, {}, []


def read_safetensors_header(source: Source, path: str, *, may_be_delta: bool = False) -> SafetensorsHeader:
    """The checked header of one file.

    Raises:
        MalformedError, IncompleteError: a rule of the format is broken.
    """
    size = source.size(path)
    if size < 8:
        raise IncompleteError(f"a file of {format_count(size, 'byte')} is not a safetensors file", path=path)
    (length,) = struct.unpack("<Q", source.read(path, 0, 8))
    if length > MAX_HEADER_BYTES:
        raise MalformedError(
            f"its header claims {length:,} bytes, more than the {MAX_HEADER_BYTES:,} allowed", path=path
        )
    if 8 + length > size:
        raise IncompleteError(f"its header of {length:,} bytes does not fit its {size:,} bytes", path=path)
    header_json = parse_header_json(source.read(path, 8, 8 + length), path)
    if not isinstance(header_json, dict):
        raise MalformedError("its header is not a JSON object", path=path)
    metadata = _parse_metadata(header_json.pop("__metadata__", {}), path)
    tensors = _parse_tensors(header_json, 8 + length, path)
    _check_ranges(header_json, 8 + length, size, path)
    # Its metadata has a checksum of each tensor after the change.
    if (
        not may_be_delta
        and tensors
        and all(name in metadata and table.dtype is DType.UINT8 for name, table in tensors.items())
    ):
        raise UnsupportedError(f"{why_delta({'delta_encoding': ''})}", path=path)
    return SafetensorsHeader(tensors, metadata)


def _parse_metadata(raw_metadata: Any, path: str) -> dict[str, str]:
    """The texts of a header. MLX writes null for none, which the library takes too. Raises MalformedError."""
    if raw_metadata is None:
        return {}
    if not isinstance(raw_metadata, dict) or not all(isinstance(value, str) for value in raw_metadata.values()):
        raise MalformedError("__metadata__ does not map strings to strings", path=path)
    return raw_metadata


def _parse_tensors(header_json: Mapping[str, Any], data_start: int, path: str) -> dict[str, ShardTable]:
    """The table of each tensor. Most of 100,000 tensors have one of a few shapes, which is checked once."""
    tables: dict[str, ShardTable] = {}
    columns_by_type: dict[tuple[Any, ...], SharedColumns] = {}
    for name, raw_entry in header_json.items():
        columns = columns_by_type.get(raw_entry[:2]) if type(raw_entry) is RawEntry else None
        if columns is None or not _are_offsets(raw_entry.data_offsets, columns.num_bytes):
            columns = columns_by_type[raw_entry[:2]] = _parse_entry(name, raw_entry, path)
        tables[name] = columns.make_table(path, data_start + raw_entry.data_offsets[0])
    return tables


def _are_offsets(offsets: tuple[Any, ...], num_bytes: int) -> bool:
    """Whether these are the offsets of so many bytes."""
    if len(offsets) != 2 or type(offsets[0]) is not int or type(offsets[1]) is not int:
        return False
    return 0 <= offsets[0] <= INT64_MAX - num_bytes and offsets[1] - offsets[0] == num_bytes


def _parse_entry(name: str, raw_entry: Any, path: str) -> SharedColumns:
    """The columns of a tensor of the header, whose offsets fit its shape."""
    if not isinstance(raw_entry, RawEntry):
        if not isinstance(raw_entry, dict) or set(raw_entry) != set(RawEntry._fields):
            raise MalformedError("an entry needs dtype, shape and data_offsets, and nothing else", path=path, key=name)
        raw_entry = RawEntry(**raw_entry)
    dtype_name, shape, offsets = raw_entry
    dtype = from_safetensors(dtype_name) if isinstance(dtype_name, str) else None
    if dtype is None:
        raise UnsupportedError(f"unknown dtype {format_brief(dtype_name)}", path=path, key=name)
    if not are_naturals(shape) or not are_naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        shown = [format_brief(list(found) if isinstance(found, tuple) else found) for found in (shape, offsets)]
        raise MalformedError(f"shape {shown[0]} or data_offsets {shown[1]} are not valid", path=path, key=name)
    shape = convert_to_element_shape(dtype, tuple(shape), path, name)
    if prod(shape) * dtype.item_bytes != offsets[1] - offsets[0]:
        raise MalformedError(
            f"{format_count(offsets[1] - offsets[0], 'byte')} cannot hold {list(shape)} of {dtype.value}",
            path=path,
            key=name,
        )
    return get_shared_columns(shape, dtype)


def convert_to_element_shape(dtype: DType, shape: Shape, path: str, key: str) -> Shape:
    """The shape in elements of one that counts values, which may be packed. Raises UnsupportedError if rows end within
    an element: torch cannot hold them either."""
    if dtype.num_values == 1:
        return shape
    if not shape or shape[-1] % dtype.num_values:
        why = f"rows of {list(shape)} are not whole elements of {dtype.num_values} {dtype.safetensors_name} values"
        raise UnsupportedError(why, path=path, key=key)
    return (*shape[:-1], shape[-1] // dtype.num_values)


def _check_ranges(entries: Mapping[str, RawEntry], data_start: int, size: int, path: str) -> None:
    # The format's rule against overlaps and hidden bytes: sorted by start, each range begins where the one before it
    # ends, and the last one ends with the file.
    expected_start = 0
    for (start, stop), name in sorted(zip((entry.data_offsets for entry in entries.values()), entries, strict=True)):
        if start != expected_start:
            kind = "overlaps the tensor before it" if start < expected_start else "leaves a gap before it"
            raise MalformedError(f"its range {kind}", path=path, key=name)
        expected_start = stop
    expected_size = data_start + expected_start
    if expected_size > size:
        raise IncompleteError(
            f"it has {format_count(size, 'byte')} instead of {expected_size:,}; the file is truncated", path=path
        )
    if expected_size < size:
        raise MalformedError(
            f"no tensor has the {format_count(size - expected_size, 'byte')} after the last one", path=path
        )


def _join_files(headers: Mapping[str, SafetensorsHeader]) -> Mapping[str, ShardTable]:
    tables: dict[str, ShardTable] = {}
    for path, header in headers.items():
        for name in filter(tables.__contains__, header.tensors):
            other = tables[name].files[0]
            why = f"this tensor is in two files, {other} too: they may be those of ranks, with a part of it each"
            raise MalformedError(why, path=path, key=name)
        tables |= header.tensors
    return tables


def _join_rank_pieces(headers: Mapping[str, SafetensorsHeader]) -> Mapping[str, ShardTable]:
    pieces_by_name: dict[str, list[RankPiece]] = {}
    for path, header in headers.items():
        offsets = parse_offsets(header.metadata, path)
        for name, table in header.tensors.items():
            piece = make_rank_piece(name, table.dtype, table.shape, table.get_byte_range(0), offsets)
            pieces_by_name.setdefault(name, []).append(piece)
    return {name: join_pieces(name, pieces) for name, pieces in pieces_by_name.items()}


def _find_stated_ties(headers: Iterable[SafetensorsHeader], tensors: Collection[str]) -> dict[str, str]:
    return {
        alias: owner
        for header in headers
        for alias, owner in header.metadata.items()
        if owner in tensors and alias not in tensors
    }


def _collect_texts(headers: Iterable[SafetensorsHeader], ties: Mapping[str, str]) -> tuple[dict[str, str], list[Note]]:
    """The texts of the headers but for ties, pieces and our own state, and notes on names that have several texts."""
    texts: dict[str, str] = {}
    conflicting_names = set[str]()
    for name, text in (each for header in headers for each in header.metadata.items()):
        if ties.get(name) != text and name not in (STATE_KEY, OFFSETS_KEY, VERSION_KEY):
            conflicting_names |= {name} if texts.setdefault(name, text) != text else set()
    if texts.get("format") == _TORCH_FORMAT:
        del texts["format"]
    why = "the files have different texts, and each file that is written has all texts"
    notes = [Note(Outcome.DROPPED, f"{HEADER_ENTRY}.{name}", why) for name in sorted(conflicting_names)]
    return {name: text for name, text in texts.items() if name not in conflicting_names}, notes


def get_header_texts(manifest: Manifest) -> Mapping[str, str]:
    """The texts in the headers of the source. Raises UnsupportedError if an entry of this name is something else."""
    texts = manifest.extra.get(HEADER_ENTRY, {})
    if not isinstance(texts, Mapping) or not all(type(text) is str for each in texts.items() for text in each):
        raise UnsupportedError(f"the entry {HEADER_ENTRY!r} of the checkpoint does not map names to texts")
    return texts


def drop_header_texts(manifest: Manifest) -> Manifest:
    return replace(manifest, extra={name: value for name, value in manifest.extra.items() if name != HEADER_ENTRY})


def layout(manifest: Manifest, options: WriteOptions) -> Layout:
    from ckpt_tools.core.layout import Layout
    from ckpt_tools.state_tree.build import entries_of
    from ckpt_tools.state_tree.packed import TREE, packed

    header_texts = get_header_texts(manifest)
    manifest = drop_header_texts(manifest)
    entries = entries_of(manifest, TREE, whole_values=True)
    packed_state = packed(manifest, entries) if _is_whole_state(manifest) else None
    state_metadata = {STATE_KEY: packed_state.text} if packed_state else {}
    tensors = {**entries.tensors, **(packed_state.tensors if packed_state else {})}
    contents = {name: (key, manifest.tensors[key]) for name, key in tensors.items()}
    # Names of a whole state are those of its tree.
    options = replace(options, shard_map={}) if packed_state else options
    tensors_by_file = _assign_files({name: entry for name, (_, entry) in contents.items()}, options)
    files = [
        build_file_layout(
            name,
            {n: contents[n] for n in part},
            entries.aliases,
            {**header_texts, **({} if number else state_metadata)},
        )
        for number, (name, part) in enumerate(tensors_by_file.items())
    ]
    # One file of a folder may have another name than the one that is loaded without an index.
    needs_index = len(tensors_by_file) > 1 or (options.file_name is None and MODEL_NAME not in tensors_by_file)
    index = [build_index_layout(INDEX_NAME, tensors_by_file, {})] if needs_index else []
    return Layout((*files, *index), entries.notes)


def _is_whole_state(manifest: Manifest) -> bool:
    from ckpt_tools.state_tree.build import is_model_only

    return bool(manifest.values) or not is_model_only(manifest)


def loading(path: str, manifest: Manifest, layout: Layout, options: WriteOptions) -> str:
    """``from_pretrained`` of a folder with ``config.json``, else the functions of safetensors; a whole state is in a
    form of our own."""
    from ckpt_tools.messages.loading_code import (
        make_from_pretrained_snippet,
        make_joined_files_snippet,
        make_load_into_snippet,
        make_open_snippet,
        quote_literal,
    )

    if _is_whole_state(drop_header_texts(manifest)):
        return make_load_into_snippet(path)
    if not all(entry.dtype.is_torch_dtype for entry in manifest.tensors.values()):
        return make_open_snippet(path)
    if (pretrained_code := make_from_pretrained_snippet(layout.config, path)) is not None:
        return pretrained_code
    files = [file.path for file in layout.files if file.path.endswith(".safetensors")]
    name = quote_literal(path if options.file_name else f"{path}/{files[0]}")
    if len(files) > 1:
        return make_joined_files_snippet(
            path, "*.safetensors", "from safetensors.torch import load_file", "load_file(file)"
        )
    if manifest.aliases:
        return f"from safetensors.torch import load_model\nload_model(model, {name})"
    return f"from safetensors.torch import load_file\nstate_dict = load_file({name})"


def _assign_files(entries: Mapping[str, TensorEntry], options: WriteOptions) -> dict[str, dict[str, TensorEntry]]:
    """The tensors of each file: by the options' map of names to files, in which a tensor without a file lies with the
    one before it, or by size."""
    if not options.shard_map or options.max_shard_bytes is not None or options.file_name is not None:
        return split_into_shards(entries, options, MODEL_NAME)
    tensors_by_file: dict[str, dict[str, TensorEntry]] = {}
    file = next(iter(options.shard_map.values()))
    for name, entry in entries.items():
        file = options.shard_map.get(name, file)
        tensors_by_file.setdefault(file, {})[name] = entry
    return tensors_by_file


def build_file_layout(
    path: str, tensors: Mapping[str, tuple[StateKey, TensorEntry]], aliases: Mapping[str, str], texts: Mapping[str, str]
) -> FileLayout:
    """A file of the tensors in ``tensors``, with ``aliases`` and ``texts`` in its metadata."""
    from ckpt_tools.core.layout import FileLayout, Literal, Payload

    # Wide elements come first, so that every tensor is aligned to the largest power of two that divides its width.
    widths = {name: entry.dtype.item_bytes for name, (_, entry) in tensors.items()}
    aligned_tensors = {name: tensors[name] for name in sorted(tensors, key=lambda n: -(widths[n] & -widths[n]))}
    payloads = [
        Payload(key, Box.whole(entry.shape), entry.shape, entry.dtype) for key, entry in aligned_tensors.values()
    ]
    stored_aliases = {alias: owner for alias, owner in aliases.items() if owner in aligned_tensors}
    header = encode_header({name: entry for name, (_, entry) in aligned_tensors.items()}, {**texts, **stored_aliases})
    return FileLayout(path, (Literal(header), *payloads))


def encode_header(tensors: Mapping[str, TensorEntry], metadata: Mapping[str, str]) -> bytes:
    """The length and the header of a file of ``tensors``, one after another. Raises UnsupportedError."""
    header: dict[str, Any] = {"__metadata__": {"format": _TORCH_FORMAT, **metadata}}
    data_stop = 0
    for name, entry in tensors.items():
        if name in header:
            raise UnsupportedError(f"safetensors has no tensor {name!r}; rename it with {format_option('rename')}")
        if entry.dtype.safetensors_name is None:
            instead = f"write it with {format_option('to', 'torch')} or exclude it"
            raise UnsupportedError(f"safetensors does not support {entry.dtype.value}; {instead}", key=name)
        values_per_element = entry.dtype.num_values  # the shape counts values
        header[name] = {
            "dtype": entry.dtype.safetensors_name,
            "shape": [*entry.shape[:-1], entry.shape[-1] * values_per_element]
            if values_per_element > 1
            else list(entry.shape),
            "data_offsets": [data_stop, data_stop + entry.num_bytes],
        }
        data_stop += entry.num_bytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise UnsupportedError(
            f"a header of {len(text):,} bytes is more than the format allows; use {format_option('max_shard_size')}"
        )
    return struct.pack("<Q", len(text)) + text

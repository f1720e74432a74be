"""numpy's ``.npz`` as a checkpoint: each member of the zip is one array.

Members have to be stored: a range of a deflated one is found only by inflating all that is before it.
"""

from __future__ import annotations

from contextlib import suppress
from math import prod
from typing import Final

from ckpt_tools.core.boxes import Box
from ckpt_tools.core.layout import FileLayout, Layout, Literal, Payload
from ckpt_tools.core.manifest import Kind, Manifest, StateKey, TensorEntry
from ckpt_tools.core.notes import Note, Outcome
from ckpt_tools.core.option_names import format_option
from ckpt_tools.core.options import ReadOptions, WriteOptions
from ckpt_tools.core.shards import ByteRange, Shard, ShardTable
from ckpt_tools.errors import MalformedError, SeveralCheckpointsError, UnsupportedError
from ckpt_tools.formats.flat_names import collect_weights_by_name
from ckpt_tools.formats.npz.npy import NpyHeader, build_npy_header, check_array_size, parse_npy_header
from ckpt_tools.messages.loading_code import quote_literal
from ckpt_tools.messages.wording import format_count, join_names
from ckpt_tools.serialization.npy_header import PREFIX_BYTES, read_header_length
from ckpt_tools.serialization.zip_archive import ReadRange, ZipDirectory, is_safe_name, read_directory
from ckpt_tools.serialization.zip_writer import ArchiveWriter
from ckpt_tools.stores.source import Source
from ckpt_tools.trainers.saved import SavedCheckpoint

SUFFIX = ".npz"
MEMBER_SUFFIX = ".npy"

TAIL_BYTES: Final = 1 << 16
"""One read from the end that holds the directory of about 900 arrays."""

EMPTY_TAIL_BYTES: Final = 1 << 12
"""The same for a look at whether there is an array at all."""

HEAD_BYTES: Final = 128
"""What numpy's header of an array of few dims takes: read at once."""

COMPRESSED_ADVICE = (
    "numpy.savez_compressed made it; pack it again without compression: "
    "numpy.savez(OUT, **numpy.load(FILE, allow_pickle=False))"
)


def detect(source: Source) -> bool:
    return any("/" not in path and path.endswith(SUFFIX) for path in source.files)


def read(source: Source, options: ReadOptions) -> Manifest:
    path = _find_file(source)

    def read_range(start: int, stop: int) -> bytes:
        return source.read(path, start, stop)

    directory = read_directory(
        read_range, source.size(path), path, tail_bytes=TAIL_BYTES, compressed_advice=COMPRESSED_ADVICE
    )
    if directory is None or not directory.records:
        raise MalformedError("it is not a zip archive of arrays, or it is cut", path=path)
    arrays, text_notes = _read_arrays(directory, read_range)
    void_names = [name for name, (header, _) in arrays.items() if header.is_void]
    tensors = dict[StateKey, TensorEntry]()
    for name, (header, data_range) in arrays.items():
        strides = header.strides if prod(header.shape) else None  # an empty array has none
        shard = Shard(Box.whole(header.shape), data_range, strides)
        kind = Kind.PARAMETER if header.dtype.is_floating else Kind.BUFFER
        table = ShardTable.build(header.shape, header.dtype, [shard])
        tensors[StateKey(name)] = TensorEntry(header.shape, header.dtype, kind, table)
    why = "numpy keeps it as void of 2 bytes, the form in which it saves bfloat16, and it is read as bfloat16"
    what = f"dtype of {void_names[0] if len(void_names) == 1 else format_count(len(void_names), 'array')}"
    notes = (Note(Outcome.DEFAULTED, what, why, len(void_names)),) if void_names else ()
    return Manifest("npz", tensors, notes=(*notes, *text_notes))


def own_files(source: Source, manifest: Manifest) -> frozenset[str]:
    return frozenset([_find_file(source)])


def is_empty(saved: SavedCheckpoint, path: str) -> bool:
    """True if the archive has no array; False if it is compressed, not a zip, or another file."""
    if path.endswith(SUFFIX):
        read_range, size, _ = saved.get_archive_arguments(path)
        with suppress(UnsupportedError):
            directory = read_directory(read_range, size, path, tail_bytes=EMPTY_TAIL_BYTES)
            return directory is not None and not directory.records
    return False


def _find_file(source: Source) -> str:
    """The one file that is read; with ``from_`` it may have any name. Raises SeveralCheckpointsError."""
    files = [path for path in source.files if "/" not in path and path.endswith(SUFFIX)] or list(source.files)
    if len(files) > 1:
        raise SeveralCheckpointsError(f"there are several files here ({join_names(files)}); name the one you mean")
    return files[0]


def _read_arrays(
    directory: ZipDirectory, read_range: ReadRange
) -> tuple[dict[str, tuple[NpyHeader, ByteRange]], tuple[Note, ...]]:
    """Every array by its name, with the bytes of its elements; and a note for each that holds text."""
    path = directory.path
    arrays: dict[str, tuple[NpyHeader, ByteRange]] = {}
    text_notes: list[Note] = []
    for member, (start, stop) in directory.locate_payloads(read_range, directory.records).items():
        name = member.removesuffix(MEMBER_SUFFIX)
        if name == member or not name:
            raise UnsupportedError(f"its member {member!r} is not a .npy array", path=path)
        header = _read_npy_header(read_range, start, stop, path, name)
        if header is None:
            text_notes.append(Note(Outcome.DROPPED, name, "it is an array of text", num_bytes=stop - start))
            continue
        check_array_size(header, stop - start, path, name)
        arrays[name] = header, ByteRange(path, start + header.offset, stop)
    if not arrays:
        raise UnsupportedError("it holds no arrays of numbers", path=path)
    return arrays, tuple(text_notes)


def _read_npy_header(read_range: ReadRange, start: int, stop: int, path: str, name: str) -> NpyHeader | None:
    data = read_range(start, min(start + HEAD_BYTES, stop))
    length = read_header_length(data[:PREFIX_BYTES], path, name)
    if start + length > stop:
        raise MalformedError("its header does not fit the array", path=path, key=name)
    data = data[:length] if length <= len(data) else read_range(start, start + length)
    return parse_npy_header(data, path, name)


def layout(manifest: Manifest, options: WriteOptions) -> Layout:
    keys_by_name, notes = collect_weights_by_name(manifest, "numpy")
    archive = ArchiveWriter("", base=0)
    for name, key in keys_by_name.items():
        # np.load(FILE)["a.npy"] is the member a.npy, which is the array a: the two cannot be in one file.
        is_taken_for_another = name.endswith(MEMBER_SUFFIX) and name.removesuffix(MEMBER_SUFFIX) in keys_by_name
        if not name or not is_safe_name(name + MEMBER_SUFFIX) or is_taken_for_another:
            raise UnsupportedError(
                f"the tensor is called {name!r:.80}, which cannot be a member of npz; rename it with "
                f"{format_option('rename')}"
            )
        entry = manifest.tensors[key]
        header = Literal(build_npy_header(entry.shape, entry.dtype, name))
        payload = Payload(key, Box.whole(entry.shape), entry.shape, entry.dtype)
        archive.add_record(name + MEMBER_SUFFIX, [header, payload] if payload.num_bytes else [header])
    return Layout((FileLayout(options.file_name or f"model{SUFFIX}", tuple(archive.finish())),), notes)


def loading(path: str, manifest: Manifest, layout: Layout, options: WriteOptions) -> str:
    name = path if options.file_name else f"{path}/{layout.files[0].path}"
    return f"import numpy as np\narrays = np.load({quote_literal(name)})"

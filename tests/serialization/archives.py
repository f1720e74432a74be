"""Segments as bytes, and zip archives with one field changed."""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ckpt_tools.core.boxes import Box
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.layout import Crc32, FileLayout, Literal, Padding, Payload, Segment
from ckpt_tools.core.manifest import StateKey
from ckpt_tools.serialization.torch_archive import TorchArchive
from ckpt_tools.serialization.torch_zip import archive_segments, open_archive

Elements = Mapping[StateKey, bytes]


def materialised(segments: Sequence[Segment], elements: Elements, *, base: int = 0) -> bytes:
    """The bytes of ``segments`` in a file at ``base``; a slow second road to what executing a plan writes."""
    before: Sequence[Segment] = [Padding(base)]
    FileLayout("x", (*before, *segments))
    out = bytearray(base)
    for segment in segments:
        match segment:
            case Literal(data):
                out += data
            case Padding(num_bytes):
                out += bytes(num_bytes)
            case Payload(key=key):
                assert len(elements[key]) == segment.num_bytes
                out += elements[key]
            case Crc32(start, stop):
                assert stop <= len(out)
                out += struct.pack("<I", zlib.crc32(out[start:stop]))
    return bytes(out[base:])


def saved(value: Any, **options: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream, **options)
    return stream.getvalue()


def reader(data: bytes, reads: list[tuple[int, int]] | None = None) -> Callable[[int, int], bytes]:
    def read(start: int, stop: int) -> bytes:
        assert 0 <= start <= stop <= len(data)
        if reads is not None:
            reads.append((start, stop))
        return data[start:stop]

    return read


def opened(data: bytes, reads: list[tuple[int, int]] | None = None) -> TorchArchive:
    return open_archive(reader(data, reads), len(data), "some.pt")


def rewritten(data: bytes, *, base: int = 0, root: str = "archive") -> bytes:
    """A torch file read and written again."""
    archive = opened(data)
    storages: dict[str, list[Segment]] = {}
    elements: dict[StateKey, bytes] = {}
    for key in archive.storages:
        start, stop = archive.storage_range(key)
        name, shape = StateKey(key), (stop - start,)
        elements[name] = data[start:stop]
        storages[key] = [Payload(name, Box.whole(shape), shape, DType.UINT8)]
    segments = archive_segments(archive.value, storages, root=root, base=base)
    return materialised(segments, elements, base=base)


def zipped(records: Mapping[str, bytes], *, compress: bool = False) -> bytes:
    """An archive as Python's zipfile writes it."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED if compress else zipfile.ZIP_STORED) as archive:
        for name, data in records.items():
            archive.writestr(name, data)
    return stream.getvalue()


def central(data: bytes, name: str) -> int:
    """Where the directory's entry of ``name`` starts."""
    return data.rindex(name.encode()) - 46


def patched(data: bytes, at: int, form: str, *values: int) -> bytes:
    packed = struct.pack(form, *values)
    return data[:at] + packed + data[at + len(packed) :]

"""Files of torch, numpy, safetensors and zip as bytes, segments as bytes, and archives with one field changed."""

import io
import json
import struct
import tarfile
import warnings
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ckpt_tools.core.boxes import Box
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.layout import Crc32, FileLayout, Literal, Padding, Payload, Segment
from ckpt_tools.core.manifest import StateKey
from ckpt_tools.serialization.pickle.dcp_metadata import BytesStorageMetadata, Metadata, MetadataIndex, StorageInfo
from ckpt_tools.serialization.pickle.dump import dumps
from ckpt_tools.serialization.torch_archive import TorchArchive
from ckpt_tools.serialization.torch_zip import make_archive_segments, open_archive

Elements = Mapping[StateKey, bytes]


def materialised(segments: Sequence[Segment], elements: Elements, *, base: int = 0) -> bytes:
    """The bytes of ``make_segments`` in a file at ``base``; a slow second road to what executing a plan writes."""
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
    """A file of ``torch.save``; torch is imported here, because one process of the tests does without it."""
    import torch

    stream = io.BytesIO()
    with warnings.catch_warnings(action="ignore"):
        torch.save(value, stream, **options)
    return stream.getvalue()


def saved_legacy(value: Any, **options: Any) -> bytes:
    return saved(value, _use_new_zipfile_serialization=False, **options)


def npy(value: Any) -> bytes:
    stream = io.BytesIO()
    np.save(stream, value, allow_pickle=True)
    return stream.getvalue()


def safetensors(payload: bytes, **metadata: str) -> bytes:
    """One tensor of bytes, which is the end of the file."""
    noted = {"__metadata__": metadata} if metadata else {}
    entry = {"dtype": "U8", "shape": [len(payload)], "data_offsets": [0, len(payload)]}
    header = json.dumps({**noted, "w": entry}, separators=(",", ":"), ensure_ascii=False).encode()
    return struct.pack("<Q", len(header)) + header + payload


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
        start, stop = archive.locate_storage(key)
        name, shape = StateKey(key), (stop - start,)
        elements[name] = data[start:stop]
        storages[key] = [Payload(name, Box.whole(shape), shape, DType.UINT8)]
    segments = make_archive_segments(archive.value, storages, root=root, base=base)
    return materialised(segments, elements, base=base)


def zipped(records: Mapping[str, bytes], *, compress: bool = False) -> bytes:
    """An archive as Python's zipfile writes it, with the same time in each."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name, data in records.items():
            archive.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED if compress else zipfile.ZIP_STORED)
    return stream.getvalue()


def records_of(archive: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(archive)) as opened:
        return {name: opened.read(name) for name in opened.namelist()}


def tarred(members: Mapping[str, bytes], *, form: int = tarfile.USTAR_FORMAT, mode: Any = "w") -> bytes:
    """A tar of files, and of folders where a name ends in a slash."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode=mode, format=form) as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size, info.type = len(data), tarfile.DIRTYPE if name.endswith("/") else tarfile.REGTYPE
            archive.addfile(info, io.BytesIO(data))
    return stream.getvalue()


# Files of torch around a pickle


def torch_zip(pickle: bytes, *, compress: bool = False) -> bytes:
    records = {"data.pkl": pickle, "byteorder": b"little", "version": b"3\n"}
    return zipped({f"archive/{name}": data for name, data in records.items()}, compress=compress)


def legacy(pickle: bytes) -> bytes:
    """The format before torch 1.6: magic number, version, machine, the object, the keys of its storages."""
    magic = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
    machine = b"\x80\x02}(Vprotocol_version\nM\xe9\x03Vlittle_endian\n\x88Vtype_sizes\n}u."
    return magic + b"\x80\x02M\xe9\x03." + machine + pickle + b"\x80\x02]."


def oldest(pickle: bytes, form: int = tarfile.USTAR_FORMAT) -> bytes:
    """The format before torch 0.1.10: a tar."""
    members = {"sys_info": b"}.", "pickle": pickle, "tensors": b"K\x00.", "storages": b"K\x00.]."}
    return tarred(members, form=form)


def dcp_of(item: bytes, before: bytes = b"", *, offset: int = 0, length: int | None = None) -> dict[str, bytes]:
    """A DCP of one object, whose item has others before it in its file. The index may say where it is not."""
    data = before + item
    place = StorageInfo("__0_0.distcp", len(before) + offset, len(item) if length is None else length)
    names, places = {"a": BytesStorageMetadata()}, {MetadataIndex("a"): place}
    if before:
        names["b"], places[MetadataIndex("b")] = BytesStorageMetadata(), StorageInfo("__0_0.distcp", 0, len(before))
    return {".metadata": dumps(Metadata(names, None, places)), "__0_0.distcp": data}


def central(data: bytes, name: str) -> int:
    """Where the directory's entry of ``name`` starts."""
    return data.rindex(name.encode()) - 46


def patched(data: bytes, at: int, form: str, *values: int) -> bytes:
    packed = struct.pack(form, *values)
    return data[:at] + packed + data[at + len(packed) :]

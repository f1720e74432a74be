"""The zip around a torch file: one field of it changed, or records that no honest writer lays so."""

import io
import pickle
import zipfile
from collections.abc import Iterator

from ckpt_tools.errors import FormatError, UnsafeError
from tests.end_to_end.fuzzing.mutations import zipped
from tests.end_to_end.fuzzing.seeds import tensors, torch_bytes
from tests.end_to_end.malformed.case import HOSTILE_NAMES, Case

Record = tuple[str, bytes]

# Offset and width of each field, APPNOTE 4.3.7, 4.3.12 and 4.3.14 to 4.3.16.
LOCAL = {"signature": (0, 4), "version": (4, 2), "flags": (6, 2), "method": (8, 2), "crc": (14, 4), "packed": (18, 4),
         "size": (22, 4), "name length": (26, 2), "extra length": (28, 2), "name": (30, 4)}  # fmt: skip
CENTRAL = {"signature": (0, 4), "flags": (8, 2), "method": (10, 2), "crc": (16, 4), "packed": (20, 4), "size": (24, 4),
           "name length": (28, 2), "extra length": (30, 2), "comment length": (32, 2), "disk": (34, 2),
           "header offset": (42, 4), "name": (46, 4)}  # fmt: skip
END = {"signature": (0, 4), "disk": (4, 2), "first disk": (6, 2), "here": (8, 2), "count": (10, 2), "bytes": (12, 4),
       "start": (16, 4), "comment length": (20, 2)}  # fmt: skip
STRUCTURES = {b"PK\3\4": LOCAL, b"PK\1\2": CENTRAL, b"PK\5\6": END}

VALUES = (0, 1, 8, 0xFFFF, 0xFFFFFFFF)


def cases() -> Iterator[Case]:
    yield from _fields()
    for rule, name, data, must_fail in [*_records(), *_bombs(), *_kinds()]:
        yield Case("torch", rule, name, {"model.pt": data}, (UnsafeError, FormatError), must_fail=must_fail)
    for hostile in HOSTILE_NAMES:
        fails = hostile in ("..", "../x", "a\0b", "\0", "a\\b", "..\\x", "C:\\x") or ".." in hostile.split("/")
        for rule, name in (("path out of the archive", hostile), ("path out of the archive", f"archive/{hostile}")):
            data = zipped([*_genuine(), (name, b"x")])
            yield Case("torch", rule, repr(name), {"model.pt": data}, (UnsafeError, FormatError), must_fail=fails)


def _model() -> bytes:
    return torch_bytes(tensors())


def _genuine() -> list[Record]:
    with zipfile.ZipFile(io.BytesIO(_model())) as archive:
        return [(name, archive.read(name)) for name in archive.namelist()]


def _fields() -> Iterator[Case]:
    data = _model()
    for magic, fields in STRUCTURES.items():
        for number, at in enumerate(_all(data, magic)):
            for field, (offset, width) in fields.items():
                for value in VALUES:
                    name = f"{magic!r} {number} {field} = {value:#x}"
                    changed = bytearray(data)
                    changed[at + offset : at + offset + width] = (value % (1 << 8 * width)).to_bytes(width, "little")
                    files = {"model.pt": bytes(changed)}
                    yield Case("torch", "zip field", name, files, (UnsafeError, FormatError), must_fail=False)


def _all(data: bytes, magic: bytes) -> list[int]:
    found, at = [], data.find(magic)
    while at >= 0:
        found.append(at)
        at = data.find(magic, at + 1)
    return found


Made = Iterator[tuple[str, str, bytes, bool]]


def _records() -> Made:
    records = _genuine()
    for number, (name, content) in enumerate(records):
        needed = name.endswith(("data.pkl", "data/0", "data/1", "data/2", "data/3"))
        yield "duplicate record", name, zipped([*records, (name, content)]), True
        yield "record missing", name, zipped(records[:number] + records[number + 1 :]), needed
        longer = [*records[:number], (name, content + b"x"), *records[number + 1 :]]
        yield "record too long", name, zipped(longer), needed or name.endswith("byteorder")
        if content:
            shorter = [*records[:number], (name, content[:-1]), *records[number + 1 :]]
            yield "record too short", name, zipped(shorter), needed or name.endswith("byteorder")
    for order in (b"big", b"middle", b"", b"little\n", b"x" * 10**6):
        changed = [(name, order if name.endswith("byteorder") else content) for name, content in records]
        yield "byte order", repr(order[:9]), zipped(changed), True
    yield "root", "two of them", zipped([(f"{n % 2}/{name}", c) for n, (name, c) in enumerate(records)]), True
    yield "root", "none", zipped([(name.partition("/")[2], content) for name, content in records]), True
    yield "empty", "no record", zipped([]), True
    yield "empty", "no name", zipped([("", b"x"), *records]), True
    yield "many records", "20,000", zipped([*records, *((f"archive/x{n}", b"") for n in range(20_000))]), False


def _bombs() -> Made:
    for size in (10**4, 10**7, 4 * 10**7):
        for record in ("data.pkl", "data/0", "byteorder", "x"):
            yield "zip bomb", f"{record} of {size:,}", _deflated(record, size), True


def _deflated(record: str, size: int) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in _genuine():
            method = zipfile.ZIP_DEFLATED if name.endswith(record) else zipfile.ZIP_STORED
            with archive.open(zipfile.ZipInfo(name) if method == zipfile.ZIP_STORED else _info(name), "w") as stream:
                _write(stream, size, content if method == zipfile.ZIP_STORED else None)
        if record == "x":
            with archive.open(_info("archive/x"), "w") as stream:
                _write(stream, size, None)
    return out.getvalue()


def _info(name: str) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name)
    info.compress_type = zipfile.ZIP_DEFLATED
    return info


def _write(stream: object, size: int, content: bytes | None) -> None:
    write = stream.write  # type: ignore[attr-defined]
    if content is not None:
        write(content)
        return
    for _ in range(size // 10**4):
        write(bytes(10**4))


def _kinds() -> Made:
    """Files that are of another kind than their name says."""
    records = _genuine()
    code = [*records, ("archive/code/__torch__.py", b"import os"), ("archive/constants.pkl", pickle.dumps(()))]
    yield "another kind", "TorchScript", zipped(code), True
    yield "another kind", "a bare pickle", pickle.dumps(dict.fromkeys("ab", 0)), True
    yield "another kind", "legacy", b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19." + pickle.dumps({}), True
    yield "another kind", "tar", bytes(257) + b"ustar" + bytes(512), True
    for name, head in {"gzip": b"\x1f\x8b", "zstd": b"\x28\xb5\x2f\xfd", "ELF": b"\x7fELF", "zeros": bytes(4)}.items():
        yield "another kind", name, head + bytes(4096), True
    yield "another kind", "zip in zip", zipped([("archive/model.pt", _model())]), True
    yield "another kind", "a zip behind text", b"#!/bin/sh\n" + _model(), True
    yield "another kind", "two zips", _model() + _model(), True

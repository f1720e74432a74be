"""Entries of a corpus, and builders: pickles that name what is not installed, and the archives around them."""

from __future__ import annotations

import io
import pickle
import struct
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar

from tests.serialization.archives import zipped
from tests.verification.scan.generator import Files


class Label(StrEnum):
    MALICIOUS = "malicious"
    INNOCUOUS = "innocuous"
    NO_MODEL = "no model"
    """Data that no loader of models reads."""


@dataclass(frozen=True, slots=True)
class Entry:
    """``advisory`` is the id of the advisory that the entry was made for, or empty."""

    name: str
    label: Label
    files: Files
    advisory: str = ""


def entries(
    label: Label, found: Mapping[str, bytes | Files], advisories: Mapping[str, str] | None = None
) -> list[Entry]:
    """Entries of one ``label``. Bytes are a file of the entry's own name."""
    return [
        Entry(name, label, {name: data} if isinstance(data, bytes) else data, (advisories or {}).get(name, ""))
        for name, data in found.items()
    ]


class Global:
    """A name in a pickle, as ``module:name``. It is never imported."""

    def __init__(self, name: str) -> None:
        self.module, _, self.name = name.partition(":")

    def __call__(self) -> None:
        raise AssertionError("a test ran a name of a corpus")


class Call:
    """A call in a pickle, with a state that is set on its result if there is one."""

    def __init__(self, function: Global | Call, args: tuple[Any, ...], state: Any = None) -> None:
        self.function, self.args, self.state = function, args, state

    def __call__(self) -> None:
        raise AssertionError("a test ran a call of a corpus")

    def __reduce__(self) -> tuple[Any, ...]:
        return (self.function, self.args) if self.state is None else (self.function, self.args, self.state)


class New(Call):
    """An object that is made without its ``__init__``."""


def call(function: str | Call, *args: Any, state: Any = None) -> Call:
    return Call(Global(function) if isinstance(function, str) else function, args, state)


_PYTHON: Any = pickle
"""Its attributes of the pickler in Python have no types."""


class _Pickler(_PYTHON._Pickler):  # type: ignore[misc]
    """CPython's own, which writes names that cannot be imported."""

    dispatch: ClassVar[dict[type, Callable[..., None]]] = dict(_PYTHON._Pickler.dispatch)

    def save_name(self, obj: Global) -> None:
        if self.proto >= 4:
            self.save(obj.module)
            self.save(obj.name)
            self.write(pickle.STACK_GLOBAL)
        else:
            self.write(pickle.GLOBAL + f"{obj.module}\n{obj.name}\n".encode())
        self.memoize(obj)

    def save_new(self, obj: New) -> None:
        self.save(obj.function)
        self.save(obj.args)
        self.write(pickle.NEWOBJ)
        self.memoize(obj)
        self.save(obj.state)
        self.write(pickle.BUILD)

    dispatch[Global] = save_name
    dispatch[New] = save_new


def pickled(value: Any, protocol: int = 4) -> bytes:
    stream = io.BytesIO()
    _Pickler(stream, protocol).dump(value)
    return stream.getvalue()


def raw(*parts: Any) -> bytes:
    """Opcodes: bytes as they are, other values as protocol 4 writes them, without a header and an end."""
    return b"".join(part if isinstance(part, bytes) else _pickled_body(part) for part in parts)


def _pickled_body(value: Any) -> bytes:
    data = pickled(value)[2:-1]
    return data[9:] if data[:1] == pickle.FRAME else data


def framed(body: bytes, stated: int) -> bytes:
    """Protocol 5, and a frame that states ``stated`` bytes."""
    return b"\x80\x05\x95" + struct.pack("<Q", stated) + body


# Archives


def flagged(data: bytes, flags: int) -> bytes:
    """A zip with further ``flags`` in the header and in the directory of its one record."""
    out = bytearray(data)
    out[6] |= flags
    out[out.index(b"PK\x01\x02") + 8] |= flags
    return bytes(out)


def encrypted() -> bytes:
    """A zip whose one record is marked as encrypted; its bytes mean nothing."""
    return flagged(zipped({"test.txt": bytes(range(100, 127))}), 1)


def seven_zip(name: str, data: bytes) -> bytes:
    """A 7z archive of one file, copied as it is (py7zr/docs/archive_format.rst)."""
    size = bytes([0x80 | len(data) >> 8, len(data) & 255])
    checksum = struct.pack("<I", zlib.crc32(data))
    packed = b"\x06\x00\x01\x09" + size + b"\x00"
    folder = b"\x07\x0b\x01\x00\x01\x01\x00\x0c" + size + b"\x0a\x01" + checksum + b"\x00"
    named = name.encode("utf-16-le") + b"\0\0"
    files = b"\x05\x01\x11" + bytes([len(named) + 1]) + b"\x00" + named + b"\x00"
    header = b"\x01\x04" + packed + folder + b"\x08\x00\x00" + files + b"\x00"
    start = struct.pack("<QQI", len(data), len(header), zlib.crc32(header))
    return b"7z\xbc\xaf\x27\x1c\x00\x04" + struct.pack("<I", zlib.crc32(start)) + start + data + header

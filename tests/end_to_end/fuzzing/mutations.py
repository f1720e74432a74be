"""Changes to a checkpoint, from single bits to whole files, each a pure function of its bytes and a random source.

A byte changed at random mostly ends at the first checksum. So there are changes of the structure too: of one record of
a torch zip, with sizes and checksums made right again, of one opcode of a pickle, of one value of a JSON header with
the length before it. What is inside is changed by the same functions again.
"""

import io
import json
import pickletools
import re
import struct
import zipfile
from collections.abc import Mapping
from functools import lru_cache
from random import Random
from typing import Any
from zlib import crc32

Files = Mapping[str, bytes]

NUMBERS = (0, 1, 2, 3, 7, 63, 64, 65, 127, 128, 255, 256, 65535, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53, 2**60,
           2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64, -1, -2, -(2**31), -(2**63), 10**400, 10**5000)  # fmt: skip

NAMES = ("", ".", "..", "../x", "/etc/passwd", "C:\\x", "C:x", "a\0b", "http://x/y", "a/../../b", "a//b", "model",
         "optim", "state", "param_groups", "step", "weight", "master", "fp32", "0", "\ud800", "[/b]", "9" * 5000,
         "state.a.b", "param_groups.a.b", "-", "\x1b[2J", "zero/" * 40)  # fmt: skip

LOOSE = ("\u0663", "\u00b2", "\uff14", "1_0", "+1", "-0", " 1", "1 ", "\x0c1", "1\x0c 3", "1\u2003", "\xa01", "01",
         "0x1", "1e3", "1.0", "1L", "nan", "inf", "", "9" * 19, "9" * 30, "9" * 5000, "\ud800", "'", "\\")  # fmt: skip
"""What ``int``, ``float``, ``str.isdigit``, a pattern or a parser may take for a number, or stumble over."""

MAX_DATA_BYTES = 1 << 17
"""Larger results are cut: an execution is to stay cheap."""


def mutated(files: Files, random: Random) -> dict[str, bytes]:
    """``files`` after one to four changes."""
    found = dict(files)
    for _ in range(random.choice((1, 1, 1, 2, 2, 3, 4))):
        change = _changed if random.random() < 5 / 6 else _rearranged
        found = change(found, random) if found else dict(files)
    return found


# Sets of files


def _changed(files: dict[str, bytes], random: Random) -> dict[str, bytes]:
    path = random.choice(list(files))
    return {**files, path: mutated_data(files[path], random)[:MAX_DATA_BYTES]}


def _rearranged(files: dict[str, bytes], random: Random) -> dict[str, bytes]:
    """A file is missing, there twice, moved, or exchanged with another."""
    one, other = random.choice(list(files)), random.choice(list(files))
    match random.randrange(4):
        case 0:
            return {path: data for path, data in files.items() if path != one}
        case 1:
            return {**files, _renamed(one, random): files[other]}
        case 2:
            return {(_renamed(path, random) if path == one else path): data for path, data in files.items()}
        case _:
            return {**files, one: files[other], other: files[one]}


def _renamed(path: str, random: Random) -> str:
    if re.search(r"\d", path) and random.random() < 0.6:
        return _digits_replaced(path, random)
    part = random.choice(NAMES)
    return random.choice((part, f"{part}/{path}", f"{path}{part}", path.rpartition("/")[2])) or "x"


def _digits_replaced(text: str, random: Random) -> str:
    """``text`` with one of its numbers written in another way, or another one."""
    found = random.choice([*re.finditer(r"[0-9]+", text)] or [re.match("", text)])
    assert found is not None
    other = random.choice(LOOSE) if random.random() < 0.5 else str(random.randrange(10))
    return text[: found.start()] + other + text[found.end() :]


# The bytes of a file


def mutated_data(data: bytes, random: Random) -> bytes:
    """``data`` with one thing in it changed, by what it looks like."""
    if random.random() < 0.75:
        if data[:2] == b"PK":
            return _changed_zip(data, random)
        if data[:1] == b"\x80" and data[-1:] == b".":
            return _changed_pickle(data, random)
        if data[:1] in b"{[" and data:
            return _changed_json(data, random)
        if data[8:9] == b"{":
            return _changed_header(data, random)
        if data.startswith(b"\x93NUMPY\1"):
            return _changed_npy(data, random)
        if b"PK\x03\x04" in data[:4096]:
            return _changed_inside(data, random)
    return _changed_bytes(data, random)


BYTES = ("flip", "flip", "set", "number", "loose", "cut", "drop", "repeat", "copy", "append")


def _changed_bytes(data: bytes, random: Random) -> bytes:
    found, at = bytearray(data), random.randrange(len(data) + 1)
    start = random.randrange(len(data) + 1)
    match random.choice(BYTES):
        case "flip" if at < len(data):
            found[at] ^= 1 << random.randrange(8)
        case "set" if at < len(data):
            found[at] = random.choice((0, 1, 0x7F, 0x80, 0xFF, random.randrange(256)))
        case "number":
            width = random.choice((1, 2, 4, 8))
            number = random.choice(NUMBERS) % (1 << 8 * width)
            found[at : at + width] = number.to_bytes(width, random.choice(("little", "big")))
        case "loose":  # some bytes of a text are digits
            if digits := [*re.finditer(rb"[0-9]+", data)]:
                each = random.choice(digits)
                found[each.start() : each.end()] = random.choice(LOOSE).encode(errors="surrogatepass")
        case "cut":
            del found[at:]
        case "drop":
            del found[at : at + random.choice((1, 2, 4, 8, 64))]
        case "repeat":
            part = data[start : start + random.choice((1, 4, 16, 64, 256))]
            found[at:at] = part * random.choice((1, 1, 2, 50))
        case "copy":
            width = random.choice((1, 4, 8, 30, 46))
            found[at : at + width] = data[start : start + width]
        case "append":
            found += random.choice((b"\0", b"x" * 8, b"N.", bytes(64), data[-22:]))
    return bytes(found)


# Zips


@lru_cache(maxsize=512)
def _records(data: bytes) -> tuple[tuple[str, bytes], ...] | None:
    """The records of a genuine archive, or None."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            return tuple((info.filename, archive.read(info)) for info in archive.infolist())
    except Exception:
        return None


def _changed_zip(data: bytes, random: Random) -> bytes:
    if random.random() < 0.25:
        return _changed_directory(data, random)
    records = _records(data)
    if not records:
        return _changed_bytes(data, random)
    found = list(records)
    at = 0 if random.random() < 0.7 else random.randrange(len(found))
    name, content = found[at]
    kind = random.random()
    if kind < 0.9:
        found[at] = (name, mutated_data(content, random))
    elif kind < 0.95:
        found[at] = (f"{name.partition('/')[0]}/{random.choice(NAMES)}", content)
    else:
        found.append((random.choice(found)[0], content))
    return zipped(found)


def zipped(records: list[tuple[str, bytes]]) -> bytes:
    """A stored zip with right checksums, as plain as one can be; names may repeat and be anything."""
    out, directory = bytearray(), bytearray()
    for name, content in records:
        raw = name.encode(errors="surrogatepass")
        sizes = (crc32(content), len(content), len(content), len(raw))
        directory += struct.pack("<4s6H3I5H2I", b"PK\1\2", 20, 20, 0, 0, 0, 0, *sizes, 0, 0, 0, 0, 0, len(out)) + raw
        out += struct.pack("<4s5H3I2H", b"PK\3\4", 20, 0, 0, 0, 0, *sizes, 0) + raw + content
    end = struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, len(records), len(records), len(directory), len(out), 0)
    return bytes(out + directory + end)


def _changed_directory(data: bytes, random: Random) -> bytes:
    """A field of one of the zip's own structures."""
    found = bytearray(data)
    places = [at for magic in (b"PK\1\2", b"PK\3\4", b"PK\5\6", b"PK\6\6", b"PK\6\7") for at in _all(data, magic)]
    if not places:
        return _changed_bytes(data, random)
    at = random.choice(places) + random.randrange(4, 46)
    width = random.choice((1, 2, 4, 8))
    found[at : at + width] = (random.choice(NUMBERS) % (1 << 8 * width)).to_bytes(width, "little")
    return bytes(found)


def _all(data: bytes, magic: bytes) -> list[int]:
    found, at = [], data.find(magic)
    while at >= 0 and len(found) < 64:
        found.append(at)
        at = data.find(magic, at + 1)
    return found


def _changed_inside(data: bytes, random: Random) -> bytes:
    """Items of a DCP one after the other: one of them changed, cut to its length."""
    starts = [at for at in _all(data, b"PK\3\4") if data[at + 30 : at + 46].endswith(b"archive/data.pkl")]
    if not starts:
        return _changed_bytes(data, random)
    number = random.randrange(len(starts))
    start, stop = starts[number], [*starts, len(data)][number + 1]
    item = _changed_zip(data[start:stop], random)
    return data[:start] + item[: stop - start].ljust(stop - start, b"\0") + data[stop:]


def _changed_npy(data: bytes, random: Random) -> bytes:
    """The text of the header, with its length made right again; in the third version that is UTF-8."""
    length = int.from_bytes(data[8:10], "little")
    text = changed_npy_text(data[10 : 10 + length].decode("latin1"), random)
    version, coding = random.choice(((1, "latin1"), (3, "utf-8")))
    header = text.encode(coding, errors="replace")
    told = len(header).to_bytes(2 if version == 1 else 4, "little")
    return data[:6] + bytes([version, 0]) + told + header + data[10 + length :]


def changed_npy_text(text: str, random: Random) -> str:
    """One number or one blank in it is another."""
    if random.random() < 0.5:
        return _digits_replaced(text, random)
    at = random.randrange(len(text) + 1)
    return text[:at] + random.choice(" \t\x0c\x0b\r\n\xa0\x1c\0,#") + text[at:]


# Pickles


@lru_cache(maxsize=512)
def _opcodes(data: bytes) -> tuple[bytes, ...] | None:
    try:
        starts = [at for _, _, at in pickletools.genops(data) if at is not None]
    except Exception:
        return None
    return tuple(data[start:stop] for start, stop in zip(starts, [*starts[1:], len(data)], strict=True))


def _changed_pickle(data: bytes, random: Random) -> bytes:
    found = _opcodes(data)
    if not found:
        return _changed_bytes(data, random)
    opcodes, at = list(found), random.randrange(len(found))
    match random.randrange(8):
        case 0:
            del opcodes[at]
        case 1:
            opcodes.insert(at, random.choice(opcodes))
        case 2:
            opcodes[at] = random.choice(opcodes)
        case 3:
            opcodes[at:at] = opcodes[at : at + random.choice((1, 2, 5, 20))] * random.choice((1, 2, 100))
        case 4:
            opcodes.insert(at, random.choice(_SINGLE))
        case _:
            _change_value(opcodes, at, random)
    return b"".join(opcodes)


def _change_value(opcodes: list[bytes], at: int, random: Random) -> None:
    """A number or a name in the place of the nearest of its kind."""
    is_number = random.random() < 0.6
    for place in [*range(at, len(opcodes)), *range(at)]:
        if opcodes[place][:1] in ((b"K", b"M", b"J", b"\x8a") if is_number else (b"X", b"\x8c")):
            opcodes[place] = _pickled_number(random.choice(NUMBERS)) if is_number else _text(opcodes, random)
            return


def _pickled_number(number: int) -> bytes:
    raw = number.to_bytes(number.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(raw)]) + raw if len(raw) < 256 else b"\x8b" + struct.pack("<I", len(raw)) + raw


def _text(opcodes: list[bytes], random: Random) -> bytes:
    others = [opcode for opcode in opcodes if opcode[:1] in (b"X", b"\x8c")]
    raw = random.choice((*NAMES, *LOOSE)).encode(errors="surrogatepass")
    return random.choice(others) if random.random() < 0.5 else b"X" + struct.pack("<I", len(raw)) + raw


_SINGLE = (b"N", b"\x88", b")", b"]", b"}", b"\x8f", b"(", b"0", b"1", b"2", b"t", b"l", b"d", b"a", b"e", b"s", b"u",
           b"b", b"R", b"o", b"\x81", b"\x85", b"\x86", b"\x87", b"\x94", b"h\0", b"h\1", b"h\5", b"q\0", b"Q", b"K\1",
           b"cos\nsystem\n", b"ctorch\nfloat32\n", b"G\x7f\xf8\0\0\0\0\0\0", b"\x91", b"\x90", b".")  # fmt: skip


# JSON


def _changed_json(data: bytes, random: Random) -> bytes:
    try:
        tree = json.loads(data)
    except (ValueError, RecursionError):
        return _changed_bytes(data, random)
    if random.random() < 0.15:
        return _changed_bytes(data, random)
    return json.dumps(_changed_value(tree, random)).encode()


def _changed_header(data: bytes, random: Random) -> bytes:
    """safetensors: the header, and usually its length made right again."""
    length = struct.unpack_from("<Q", data)[0]
    header = _changed_json(data[8 : 8 + length], random)
    told = len(header) if random.random() < 0.9 else random.choice(NUMBERS) % 2**64
    return struct.pack("<Q", told) + header + data[8 + length :]


def _changed_value(value: Any, random: Random) -> Any:
    """``value`` with a part of it changed, added, taken away or given another name."""
    if isinstance(value, dict) and value and random.random() < 0.9:
        name = random.choice(list(value))
        kind = random.random()
        if kind < 0.7:
            return {**value, name: _changed_value(value[name], random)}
        if kind < 0.8:
            return {other: inner for other, inner in value.items() if other != name}
        other = random.choice((*NAMES, *value))
        return {(other if old == name and kind < 0.9 else old): inner for old, inner in value.items()} | {
            other: value[name]
        }
    if isinstance(value, list) and value and random.random() < 0.8:
        at = random.randrange(len(value))
        return [*value[:at], _changed_value(value[at], random), *value[at + random.randrange(3) :]]
    if isinstance(value, str) and re.search(r"[0-9]", value) and random.random() < 0.5:
        return _digits_replaced(value, random)
    return random.choice(
        (*NUMBERS[:-1], *NAMES, *LOOSE, None, True, 0.5, [], {}, [0], [[]], {"a": {}}, "F32", "BF16", "F4")
    )

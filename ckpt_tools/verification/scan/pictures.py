"""Pictures and PDF: each byte from the first to the last belongs to the one picture, and a PDF has no action.

Sources: PNG (W3C, third edition) section 5, JPEG (ITU T.81) annex B, GIF89a (appendix A), the WebP container, and
PDF 32000-1:2008 sections 7.5 and 12.6.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterator
from itertools import chain

from ckpt_tools.errors import MalformedError
from ckpt_tools.verification.scan.budget import MAX_INFLATED_BYTES
from ckpt_tools.verification.scan.findings import CouldRunError, NotLookedIntoError

PDF_MAGIC = b"%PDF-1."

_ALONE = frozenset({0x01, *range(0xD0, 0xD8)})
"""Markers of JPEG without a segment behind them."""


def prove_picture(data: bytes) -> None:
    """Check ``data``, which begins as a picture or a PDF.

    Raises:
        MalformedError: it is damaged, or ends before or behind the picture. CouldRunError, NotLookedIntoError: a PDF
        has actions, or parts that are not read.
    """
    check = next(check for magic, check in _CHECKS.items() if data.startswith(magic))
    try:
        end = check(data)
    except (IndexError, StopIteration) as error:
        raise MalformedError("the picture ends early") from error
    if end != len(data):
        raise MalformedError("bytes behind the picture belong to nothing")


def _png_end(data: bytes) -> int:
    at = 8
    while at < len(data):
        length = int.from_bytes(data[at : at + 4], "big")
        crc32 = int.from_bytes(data[at + 8 + length : at + 12 + length], "big")
        if zlib.crc32(data[at + 4 : at + 8 + length]) != crc32:
            raise MalformedError("a chunk of the PNG has another checksum than it says")
        is_last = data[at + 4 : at + 8] == b"IEND"
        at += 12 + length
        if is_last:
            return at
    raise MalformedError("the picture ends early")


def _jpeg_end(data: bytes) -> int:
    at = 2
    while True:
        if data[at] != 0xFF:
            raise MalformedError("bytes between the segments of the JPEG belong to nothing")
        marker = data[at + 1]
        if marker == 0xD9:
            return at + 2
        if marker in _ALONE:
            at += 2
            continue
        at += 2 + int.from_bytes(data[at + 2 : at + 4], "big")
        if marker == 0xDA:
            # In coded data, 0xFF is followed by 0 or by the marker of a restart.
            at = next(found.start() for found in re.compile(rb"\xff[^\x00\xd0-\xd7]", re.S).finditer(data, at))


def _gif_end(data: bytes) -> int:
    at = _behind_colors(data, 13, data[10])
    while data[at] != 0x3B:
        if data[at] == 0x21:
            at += 2
        elif data[at] == 0x2C:
            at = _behind_colors(data, at + 10, data[at + 9]) + 1
        else:
            raise MalformedError("bytes between the blocks of the GIF belong to nothing")
        while data[at]:
            at += 1 + data[at]
        at += 1
    return at + 1


def _behind_colors(data: bytes, at: int, flags: int) -> int:
    return at + (3 << (1 + (flags & 7)) if flags & 0x80 else 0)


def _webp_end(data: bytes) -> int:
    end = 8 + int.from_bytes(data[4:8], "little")
    if end != len(data):
        return end
    if data[8:12] != b"WEBP":
        raise MalformedError("it is a RIFF file of another kind than WebP")
    at = 12
    while at < end:
        num_bytes = int.from_bytes(data[at + 4 : at + 8], "little")
        at += 8 + num_bytes + num_bytes % 2
    return at if at == end else -1


def _encoded(name: str) -> str:
    """A pattern for the name of PDF ``name`` with any of its characters in hexadecimal."""
    return "/" + "".join(f"(?:{character}|#{ord(character):02x}|#{ord(character):02X})" for character in name)


_ACTIONS = ("JavaScript", "Launch", "EmbeddedFile", "RichMedia", "XFA", "SubmitForm", "ImportData", "GoToR", "GoToE")
"""Names without which no reader of PDF runs, opens or sends anything but a link that is clicked on."""

_ACTION = re.compile("|".join(map(_encoded, (*_ACTIONS, "Rendition", "Movie", "Sound"))).encode())
_PACKED_OBJECTS = re.compile(_encoded("ObjStm").encode())
_MAX_DICTIONARY_BYTES = 1 << 10
_CHUNK_BYTES = 1 << 14


def _pdf_end(data: bytes) -> int:
    """The directory of a PDF may lead to any byte of it, so that all are searched."""
    if b"/Encrypt" in data:
        raise NotLookedIntoError("it is an encrypted PDF")
    for part in chain((data,), _packed_objects(data)):
        if action := _ACTION.search(part):
            raise CouldRunError(f"it is a PDF with an action: {action[0].decode()}")
    end = data.rfind(b"%%EOF")
    return len(data) if end >= 0 and not data[end + 5 :].strip() else -1


def _packed_objects(data: bytes) -> Iterator[bytes]:
    """The objects in each object stream, inflated."""
    left = MAX_INFLATED_BYTES
    for found in _PACKED_OBJECTS.finditer(data):
        start = data.find(b"stream", found.end(), found.end() + _MAX_DICTIONARY_BYTES)
        first = data.rfind(b"<<", max(0, found.start() - _MAX_DICTIONARY_BYTES), found.start())
        dictionary = data[first:start]
        is_deflated_once = b"/FlateDecode" in dictionary and dictionary.count(b"Decode") == 1
        if start < 0 or not is_deflated_once or b"#" in dictionary:
            raise NotLookedIntoError("it is a PDF with compressed objects that are not read")
        inflater = zlib.decompressobj()
        # A line ends between the word and the bytes.
        at = start + len(b"stream") + (2 if data[start + len(b"stream")] == ord("\r") else 1)
        objects = b""
        while not inflater.eof and at < len(data) and left > 0:
            try:
                chunk = inflater.decompress(data[at : at + _CHUNK_BYTES], left)
            except zlib.error as error:
                raise MalformedError("an object stream of the PDF is damaged") from error
            at += _CHUNK_BYTES
            left -= len(chunk)
            objects += chunk
        if not inflater.eof:
            raise NotLookedIntoError("it is a PDF whose compressed objects are too large to look into")
        yield objects


_CHECKS: dict[bytes, Callable[[bytes], int]] = {
    b"\x89PNG\r\n\x1a\n": _png_end,
    b"\xff\xd8\xff": _jpeg_end,
    b"GIF87a": _gif_end,
    b"GIF89a": _gif_end,
    b"RIFF": _webp_end,
    PDF_MAGIC: _pdf_end,
}

MAGICS = tuple(_CHECKS)
"""First bytes of pictures."""

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

_STANDALONE_MARKERS = frozenset({0x01, *range(0xD0, 0xD8)})
"""Markers of JPEG without a segment behind them."""


def prove_picture(data: bytes) -> None:
    """Check ``data``, which begins as a picture or a PDF.

    Raises:
        MalformedError: it is damaged, or ends before or behind the picture. CouldRunError, NotLookedIntoError: a PDF
        has actions, or parts that are not read.
    """
    find_end = next(check for magic, check in _END_FINDERS.items() if data.startswith(magic))
    try:
        end = find_end(data)
    except (IndexError, StopIteration) as error:
        raise MalformedError("the picture ends early") from error
    if end != len(data):
        raise MalformedError("bytes behind the picture belong to nothing")


def _find_png_end(data: bytes) -> int:
    chunk_start = 8
    while chunk_start < len(data):
        length = int.from_bytes(data[chunk_start : chunk_start + 4], "big")
        crc32 = int.from_bytes(data[chunk_start + 8 + length : chunk_start + 12 + length], "big")
        if zlib.crc32(data[chunk_start + 4 : chunk_start + 8 + length]) != crc32:
            raise MalformedError("a chunk of the PNG has another checksum than it says")
        is_last = data[chunk_start + 4 : chunk_start + 8] == b"IEND"
        chunk_start += 12 + length
        if is_last:
            return chunk_start
    raise MalformedError("the picture ends early")


def _find_jpeg_end(data: bytes) -> int:
    position = 2
    while True:
        if data[position] != 0xFF:
            raise MalformedError("bytes between the segments of the JPEG belong to nothing")
        marker = data[position + 1]
        if marker == 0xD9:
            return position + 2
        if marker in _STANDALONE_MARKERS:
            position += 2
            continue
        position += 2 + int.from_bytes(data[position + 2 : position + 4], "big")
        if marker == 0xDA:
            # In coded data, 0xFF is followed by 0 or by the marker of a restart.
            position = next(
                found.start() for found in re.compile(rb"\xff[^\x00\xd0-\xd7]", re.S).finditer(data, position)
            )


def _find_gif_end(data: bytes) -> int:
    position = _skip_color_table(data, 13, data[10])
    while data[position] != 0x3B:
        if data[position] == 0x21:
            position += 2
        elif data[position] == 0x2C:
            position = _skip_color_table(data, position + 10, data[position + 9]) + 1
        else:
            raise MalformedError("bytes between the blocks of the GIF belong to nothing")
        while data[position]:
            position += 1 + data[position]
        position += 1
    return position + 1


def _skip_color_table(data: bytes, at: int, flags: int) -> int:
    return at + (3 << (1 + (flags & 7)) if flags & 0x80 else 0)


def _find_webp_end(data: bytes) -> int:
    end = 8 + int.from_bytes(data[4:8], "little")
    if end != len(data):
        return end
    if data[8:12] != b"WEBP":
        raise MalformedError("it is a RIFF file of another kind than WebP")
    chunk_start = 12
    while chunk_start < end:
        num_bytes = int.from_bytes(data[chunk_start + 4 : chunk_start + 8], "little")
        chunk_start += 8 + num_bytes + num_bytes % 2
    return chunk_start if chunk_start == end else -1


def _build_name_pattern(name: str) -> str:
    """A pattern for the name of PDF ``name`` with any of its characters in hexadecimal."""
    return "/" + "".join(f"(?:{character}|#{ord(character):02x}|#{ord(character):02X})" for character in name)


_ACTION_NAMES = (
    "JavaScript",
    "Launch",
    "EmbeddedFile",
    "RichMedia",
    "XFA",
    "SubmitForm",
    "ImportData",
    "GoToR",
    "GoToE",
)
"""Names without which no reader of PDF runs, opens or sends anything but a link that is clicked on."""

_ACTION_NAME = re.compile("|".join(map(_build_name_pattern, (*_ACTION_NAMES, "Rendition", "Movie", "Sound"))).encode())
_OBJECT_STREAM_NAME = re.compile(_build_name_pattern("ObjStm").encode())
_MAX_DICTIONARY_BYTES = 1 << 10
_CHUNK_BYTES = 1 << 14


def _find_pdf_end(data: bytes) -> int:
    """The directory of a PDF may lead to any byte of it, so that all are searched."""
    if b"/Encrypt" in data:
        raise NotLookedIntoError("it is an encrypted PDF")
    for part in chain((data,), _inflate_object_streams(data)):
        if action := _ACTION_NAME.search(part):
            raise CouldRunError(f"it is a PDF with an action: {action[0].decode()}")
    end = data.rfind(b"%%EOF")
    return len(data) if end >= 0 and not data[end + 5 :].strip() else -1


def _inflate_object_streams(data: bytes) -> Iterator[bytes]:
    """The objects in each object stream, inflated."""
    num_bytes_left = MAX_INFLATED_BYTES
    for match in _OBJECT_STREAM_NAME.finditer(data):
        start = data.find(b"stream", match.end(), match.end() + _MAX_DICTIONARY_BYTES)
        dictionary_start = data.rfind(b"<<", max(0, match.start() - _MAX_DICTIONARY_BYTES), match.start())
        dictionary = data[dictionary_start:start]
        is_deflated_once = b"/FlateDecode" in dictionary and dictionary.count(b"Decode") == 1
        if start < 0 or not is_deflated_once or b"#" in dictionary:
            raise NotLookedIntoError("it is a PDF with compressed objects that are not read")
        inflater = zlib.decompressobj()
        # A line ends between the word and the bytes.
        position = start + len(b"stream") + (2 if data[start + len(b"stream")] == ord("\r") else 1)
        objects = b""
        while not inflater.eof and position < len(data) and num_bytes_left > 0:
            try:
                chunk = inflater.decompress(data[position : position + _CHUNK_BYTES], num_bytes_left)
            except zlib.error as error:
                raise MalformedError("an object stream of the PDF is damaged") from error
            position += _CHUNK_BYTES
            num_bytes_left -= len(chunk)
            objects += chunk
        if not inflater.eof:
            raise NotLookedIntoError("it is a PDF whose compressed objects are too large to look into")
        yield objects


_END_FINDERS: dict[bytes, Callable[[bytes], int]] = {
    b"\x89PNG\r\n\x1a\n": _find_png_end,
    b"\xff\xd8\xff": _find_jpeg_end,
    b"GIF87a": _find_gif_end,
    b"GIF89a": _find_gif_end,
    b"RIFF": _find_webp_end,
    PDF_MAGIC: _find_pdf_end,
}

MAGICS = tuple(_END_FINDERS)
"""First bytes of pictures."""

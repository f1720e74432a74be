"""Arrays of numpy: the header of a ``.npy`` as numpy writes it, and deflated members of a ``.npz``."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Iterator
from math import prod
from typing import NoReturn

from ckpt_tools.errors import MalformedError
from ckpt_tools.serialization.npy_header import (
    MAX_HEADER_BYTES,
    PREFIX_BYTES,
    header_length,
    parse_text,
    text_start,
)
from ckpt_tools.serialization.zip_archive import Record
from ckpt_tools.verification.scan.budget import MAX_INFLATED_BYTES, InflationBudget, PickleBudget
from ckpt_tools.verification.scan.findings import NotLookedIntoError
from ckpt_tools.verification.scan.piece import Piece

MAX_STRUCT_DEPTH = 8
"""Structures within structures of a dtype."""

_CODE = r"[<>|=]?(?:([biufcSV?])(\d{1,9})|([U])(\d{1,9})|([mM])(8)(?:\[\w{1,8}\])?)"
_DESCR = re.compile(f"'{_CODE}'", re.ASCII)
_SHAPE = r"\((?:\d{1,18}(?:, \d{1,18})*(?:, |,)?)?\)"
_FIELD = rf"\('[^'\\()\[\]]*', '{_CODE}'(?:, ({_SHAPE}))?\)"
_FIELDS = re.compile(_FIELD, re.ASCII)
_STRUCT = re.compile(rf"\[(?:{_FIELD}(?:, (?!\])|(?=\])))*\]", re.ASCII)
"""A structure without structures in it. Names hold no quotes and no brackets, so that each has one meaning."""

_OF_FIELDS = re.compile(
    rf"\{{'descr': (\[.*\]), 'fortran_order': (?:True|False), 'shape': ({_SHAPE})(?:, )?\}} *\n", re.ASCII
)
"""The header of an array of structures, as numpy writes it (numpy/lib/_format_impl.py)."""


class Elements:
    """Elements of an array, as its header states them: objects, or ``num_bytes`` of them."""

    def __init__(self, start: int, descr: str, shape: Iterable[int]) -> None:
        self.start = start
        self.are_objects = descr == "'|O'"
        self.num_bytes = 0 if self.are_objects else _item_bytes(descr) * prod(shape)


def npy_elements(piece: Piece) -> Elements:
    """The elements of an array of a plain dtype, of fields of such, or of objects.

    Raises:
        FormatError: the header is written in another way.
    """
    prefix = piece.head(PREFIX_BYTES)
    start = header_length(prefix, piece.file, piece.place)
    if start > piece.size:
        raise MalformedError("the header of the array is longer than the file")
    text = piece.read(text_start(prefix), start)
    plain = parse_text(text)
    if plain is not None:
        return Elements(start, repr(plain.descr), plain.shape)
    # Each byte becomes a character: no byte of a name in UTF-8 is a quote or a bracket.
    found = _OF_FIELDS.fullmatch(text.decode("latin-1"))
    if found is None:
        raise MalformedError("the header of the array is not as numpy writes it; it may mean objects")
    return Elements(start, found[1], _extents(found[2]))


def _item_bytes(descr: str) -> int:
    for _ in range(MAX_STRUCT_DEPTH):
        if not descr.startswith("["):
            break
        descr = _STRUCT.sub(_as_void, descr)
    found = _DESCR.fullmatch(descr)
    if found is None:
        raise MalformedError("the array is of a dtype that is not plain, and not of fields of such")
    return _code_bytes(found.groups())


def _as_void(struct: re.Match[str]) -> str:
    """The code of as many bytes as the fields of a structure have."""
    fields = (found.groups() for found in _FIELDS.finditer(struct[0]))
    return f"'|V{sum(_code_bytes(groups[:6]) * prod(_extents(groups[6] or '')) for groups in fields)}'"


def _code_bytes(groups: tuple[str | None, ...]) -> int:
    kind, digits = next((groups[n], groups[n + 1]) for n in (0, 2, 4) if groups[n])
    return int(digits or 0) * (4 if kind == "U" else 1)


def _extents(shape: str) -> list[int]:
    return [int(extent) for extent in re.findall(r"\d{1,18}", shape)]


def check_end(elements: Elements, num_bytes: int) -> None:
    """Raises MalformedError where ``num_bytes`` behind the header are not those of its elements."""
    if num_bytes != elements.num_bytes:
        raise MalformedError("the array does not end where the file does")


def inflated_array(piece: Piece, record: Record, inflation: InflationBudget, pickles: PickleBudget) -> Piece | None:
    """A deflated record of an archive, inflated, if it is an array of objects. Of any other, only the header is kept.

    Raises:
        MalformedError: the deflated data has another length, checksum or end than the archive says, or holds something
        else than one array. NotLookedIntoError: it is too large to inflate.
    """
    if record.size > inflation.limit(piece.size, most=record.size):
        raise NotLookedIntoError(_TOO_LARGE)
    inflation.spend(record.size)
    chunks = _inflated(piece, record)
    head = b""
    while len(head) < min(record.size, PREFIX_BYTES + MAX_HEADER_BYTES) and (chunk := next(chunks, b"")):
        head += chunk
    elements = npy_elements(piece.holding(head, ""))
    num_read = record.size if elements.are_objects else elements.start
    if not pickles.spend(num_read, piece.size) or (elements.are_objects and record.size > MAX_INFLATED_BYTES):
        raise NotLookedIntoError(_TOO_LARGE)
    if elements.are_objects:
        return piece.holding(head + b"".join(chunks), "")
    for _ in chunks:
        pass
    check_end(elements, record.size - elements.start)
    return None


_TOO_LARGE = "it is compressed, and too large outside of its compression"
_CHUNK_BYTES = 1 << 18


def _inflated(piece: Piece, record: Record) -> Iterator[bytes]:
    """The inflated data in pieces. It ends where the record does, and is as long as the archive says."""
    inflater = zlib.decompressobj(-zlib.MAX_WBITS)
    num_bytes, crc32, at = 0, 0, 0
    while not inflater.eof:
        packed = inflater.unconsumed_tail or piece.read(at, min(at + _CHUNK_BYTES, piece.size))
        at += 0 if inflater.unconsumed_tail else len(packed)
        try:
            chunk = inflater.decompress(packed, _CHUNK_BYTES)
        except zlib.error:
            _fail(record, "is damaged")
        if not chunk and not packed and not inflater.eof:
            _fail(record, "ends early")
        num_bytes += len(chunk)
        if num_bytes > record.size:
            _fail(record, "is longer than the archive says")
        crc32 = zlib.crc32(chunk, crc32)
        if chunk:
            yield chunk
    if at - len(inflater.unused_data) != piece.size:
        _fail(record, "ends before the record does")
    if num_bytes != record.size:
        _fail(record, "is shorter than the archive says")
    if crc32 != record.crc32:
        _fail(record, "has another checksum than the archive says")


def _fail(record: Record, reason: str) -> NoReturn:
    raise MalformedError(f"the compressed data of record {record.name!r} {reason}")

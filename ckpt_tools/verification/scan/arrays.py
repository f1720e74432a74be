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
    get_text_start,
    parse_header_text,
    read_header_length,
)
from ckpt_tools.serialization.zip_archive import ZipRecord
from ckpt_tools.verification.scan.budget import MAX_INFLATED_BYTES, InflationBudget, PickleBudget
from ckpt_tools.verification.scan.findings import NotLookedIntoError
from ckpt_tools.verification.scan.piece import FileView

MAX_STRUCT_DEPTH = 8
"""Structures within structures of a dtype."""

_TYPE_CODE = r"[<>|=]?(?:([biufcSV?])(\d{1,9})|([U])(\d{1,9})|([mM])(8)(?:\[\w{1,8}\])?)"
_DESCR = re.compile(f"'{_TYPE_CODE}'", re.ASCII)
_SHAPE = r"\((?:\d{1,18}(?:, \d{1,18})*(?:, |,)?)?\)"
_FIELD = rf"\('[^'\\()\[\]]*', '{_TYPE_CODE}'(?:, ({_SHAPE}))?\)"
_FIELD_FORM = re.compile(_FIELD, re.ASCII)
_STRUCT = re.compile(rf"\[(?:{_FIELD}(?:, (?!\])|(?=\])))*\]", re.ASCII)
"""A structure without structures in it. Names hold no quotes and no brackets, so that each has one meaning."""

_STRUCT_ARRAY_HEADER = re.compile(
    rf"\{{'descr': (\[.*\]), 'fortran_order': (?:True|False), 'shape': ({_SHAPE})(?:, )?\}} *\n", re.ASCII
)
"""The header of an array of structures, as numpy writes it (numpy/lib/_format_impl.py)."""


class ArrayElements:
    """Elements of an array, as its header states them: objects, or ``num_bytes`` of them."""

    def __init__(self, start: int, descr: str, shape: Iterable[int]) -> None:
        self.start = start
        self.are_objects = descr == "'|O'"
        self.num_bytes = 0 if self.are_objects else _count_item_bytes(descr) * prod(shape)


def parse_npy_elements(view: FileView) -> ArrayElements:
    """The elements of an array of a plain dtype, of fields of such, or of objects.

    Raises:
        FormatError: the header is written in another way.
    """
    prefix = view.read_head(PREFIX_BYTES)
    start = read_header_length(prefix, view.file, view.place)
    if start > view.size:
        raise MalformedError("the header of the array is longer than the file")
    header_text = view.read(get_text_start(prefix), start)
    plain_header = parse_header_text(header_text)
    if plain_header is not None:
        return ArrayElements(start, repr(plain_header.descr), plain_header.shape)
    # Each byte becomes a character: no byte of a name in UTF-8 is a quote or a bracket.
    struct_match = _STRUCT_ARRAY_HEADER.fullmatch(header_text.decode("latin-1"))
    if struct_match is None:
        raise MalformedError("the header of the array is not as numpy writes it; it may mean objects")
    return ArrayElements(start, struct_match[1], _parse_extents(struct_match[2]))


def _count_item_bytes(descr: str) -> int:
    # Innermost structures become codes of as many bytes, until none is left:
    #     [('a', '<f4'), ('b', [('c', '<i8', (2,))])]   ->   [('a', '<f4'), ('b', '|V16')]   ->   '|V20'
    for _ in range(MAX_STRUCT_DEPTH):
        if not descr.startswith("["):
            break
        descr = _STRUCT.sub(_replace_with_void, descr)
    match = _DESCR.fullmatch(descr)
    if match is None:
        raise MalformedError("the array is of a dtype that is not plain, and not of fields of such")
    return _count_code_bytes(match.groups())


def _replace_with_void(struct: re.Match[str]) -> str:
    """The code of as many bytes as the fields of a structure have."""
    fields = (found.groups() for found in _FIELD_FORM.finditer(struct[0]))
    return f"'|V{sum(_count_code_bytes(groups[:6]) * prod(_parse_extents(groups[6] or '')) for groups in fields)}'"


def _count_code_bytes(groups: tuple[str | None, ...]) -> int:
    type_code, digits = next((groups[n], groups[n + 1]) for n in (0, 2, 4) if groups[n])
    return int(digits or 0) * (4 if type_code == "U" else 1)


def _parse_extents(shape: str) -> list[int]:
    return [int(extent) for extent in re.findall(r"\d{1,18}", shape)]


def check_array_end(elements: ArrayElements, num_bytes: int) -> None:
    """Raises MalformedError where ``num_bytes`` behind the header are not those of its elements."""
    if num_bytes != elements.num_bytes:
        raise MalformedError("the array does not end where the file does")


def inflate_array(
    view: FileView, record: ZipRecord, inflation_budget: InflationBudget, pickle_budget: PickleBudget
) -> FileView | None:
    """A deflated record of an archive, inflated, if it is an array of objects. Of any other, only the header is kept.

    Raises:
        MalformedError: the deflated data has another length, checksum or end than the archive says, or holds something
        else than one array. NotLookedIntoError: it is too large to inflate.
    """
    if record.size > inflation_budget.grant_bytes(view.size, max_bytes=record.size):
        raise NotLookedIntoError(_TOO_LARGE)
    inflation_budget.spend_bytes(record.size)
    chunks = _inflate_chunks(view, record)
    header_bytes = b""
    while len(header_bytes) < min(record.size, PREFIX_BYTES + MAX_HEADER_BYTES) and (chunk := next(chunks, b"")):
        header_bytes += chunk
    elements = parse_npy_elements(view.wrap_data(header_bytes, ""))
    num_read = record.size if elements.are_objects else elements.start
    if not pickle_budget.try_spend(num_read, view.size) or (elements.are_objects and record.size > MAX_INFLATED_BYTES):
        raise NotLookedIntoError(_TOO_LARGE)
    if elements.are_objects:
        return view.wrap_data(header_bytes + b"".join(chunks), "")
    for _ in chunks:
        pass
    check_array_end(elements, record.size - elements.start)
    return None


_TOO_LARGE = "it is compressed, and too large outside of its compression"
_CHUNK_BYTES = 1 << 18


def _inflate_chunks(view: FileView, record: ZipRecord) -> Iterator[bytes]:
    """The inflated data of a record in pieces. Raises MalformedError if it does not end where the record does, or has
    another length or checksum than the archive says."""
    inflater = zlib.decompressobj(-zlib.MAX_WBITS)
    num_bytes, crc32, num_read = 0, 0, 0
    while not inflater.eof:
        compressed = inflater.unconsumed_tail or view.read(num_read, min(num_read + _CHUNK_BYTES, view.size))
        num_read += 0 if inflater.unconsumed_tail else len(compressed)
        try:
            chunk = inflater.decompress(compressed, _CHUNK_BYTES)
        except zlib.error:
            _raise_damaged(record, "is damaged")
        if not chunk and not compressed and not inflater.eof:
            _raise_damaged(record, "ends early")
        num_bytes += len(chunk)
        if num_bytes > record.size:
            _raise_damaged(record, "is longer than the archive says")
        crc32 = zlib.crc32(chunk, crc32)
        if chunk:
            yield chunk
    if num_read - len(inflater.unused_data) != view.size:
        _raise_damaged(record, "ends before the record does")
    if num_bytes != record.size:
        _raise_damaged(record, "is shorter than the archive says")
    if crc32 != record.crc32:
        _raise_damaged(record, "has another checksum than the archive says")


def _raise_damaged(record: ZipRecord, reason: str) -> NoReturn:
    raise MalformedError(f"the compressed data of record {record.name!r} {reason}")

"""Checks that a file proved as one kind cannot be a file of another kind, which another loader would take it for.

Each check is a condition that a loader needs before it runs anything: a tar's checksum, the directory of a zip, the
first bytes of a compressor, or a pickle from the first byte on.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Collection

from ckpt_tools.errors import MalformedError
from ckpt_tools.serialization.zip_archive import (
    CENTRAL_MAGIC,
    END,
    END64_MAGIC,
    END_MAGIC,
    LOCAL_MAGIC,
    LOCATOR64,
    LOCATOR64_MAGIC,
)
from ckpt_tools.verification.scan import kinds
from ckpt_tools.verification.scan.kinds import Kind
from ckpt_tools.verification.scan.piece import Piece
from ckpt_tools.verification.scan.tokens import imports_as_a_pickle

_END_BYTES = (1 << 16) + END.size + (1 << 12)
"""Bytes at the end of a file in which zipfile and miniz look for the end record of an archive."""

_BLOCK = 512

_COMPRESSED = re.compile(rb"\x1f\x8b|BZh[1-9](1AY&SY|\x17rE8P\x90)|\xfd7zXZ\0|\]\0\0|\x28\xb5\x2f\xfd|\x04\x22\x4d\x18")
_ZLIB = re.compile(rb"\x78[\x01\x5e\x9c\xda]")
"""Both bytes of the header, without a dictionary."""
_OLD_JOBLIB = re.compile(rb"ZF\s*(0x)?[0-9a-f]+L?\s*", re.I)
"""A length of 18 characters in hexadecimal; zlib follows (joblib/numpy_pickle_utils.py)."""

RUNS_AS_A_PICKLE = "a loader of pickles could run it"


class RunsElsewhereError(MalformedError):
    """A file that a loader of pickles could run, although its name and first bytes are those of another kind."""


def check_one_meaning(piece: Piece, kind: Kind) -> None:
    """Raises MalformedError if the file, proved as ``kind``, may be an archive, compressed, or a pickle that imports
    something."""
    head = piece.head(_BLOCK)
    if _is_compressed(head):
        raise MalformedError("a loader may take it for compressed data")
    _check_no_tar(head)
    if not head.startswith(LOCAL_MAGIC) and has_zip_end(piece):
        raise MalformedError("a loader may take its end for a zip archive")
    if kind is not Kind.PICKLED and imports_as_a_pickle(piece):
        raise RunsElsewhereError(RUNS_AS_A_PICKLE)


def _check_no_tar(head: bytes) -> None:
    if is_tar(head):
        raise MalformedError("a loader may take it for a tar archive")


def runs_as_a_pickle(piece: Piece) -> bool:
    """True if a loader of pickles could import something from ``piece``, whose name is not that of a pickle."""
    return not kinds.PICKLED.search(piece.file) and imports_as_a_pickle(piece)


def _is_compressed(head: bytes) -> bool:
    if _ZLIB.match(head):
        try:
            zlib.decompressobj().decompress(head)
        except zlib.error:
            return False
        return True
    return _COMPRESSED.match(head) is not None or _OLD_JOBLIB.fullmatch(head[:20]) is not None


def has_zip_end(piece: Piece) -> bool:
    """True if the end of the file has the end record of an archive, and there is a directory where the record says,
    counted from the start of the file or backwards from the record."""
    first = max(0, piece.size - _END_BYTES)
    tail = piece.read(first, piece.size)
    return any(_leads_to_a_directory(piece, first + found.start()) for found in re.finditer(re.escape(END_MAGIC), tail))


def _leads_to_a_directory(piece: Piece, at: int) -> bool:
    end = piece.read(at, min(at + END.size, piece.size))
    if len(end) < END.size:
        return False
    locator = max(0, at - LOCATOR64.size)
    if piece.read(locator, locator + 4) == LOCATOR64_MAGIC:
        return True
    *_, num_bytes, start, _ = END.unpack(end)
    places = [place for place in (start, at - num_bytes) if 0 <= place < piece.size]
    return any(piece.read(place, min(place + 4, piece.size)) == CENTRAL_MAGIC for place in places)


def check_items(whole: Piece, tails: Collection[tuple[int, int]]) -> None:
    """Raises MalformedError if a file of items may be a tar, or if a loader that takes it for one zip would find a
    directory in it that is not one of an item; these are at ``tails``.

    The last item's end record counts from the start of the item, such a loader (miniz) from that of the file.
    """
    _check_no_tar(whole.head(_BLOCK))
    first = max(0, whole.size - _END_BYTES)
    tail = whole.read(first, whole.size)
    at = tail.rfind(END_MAGIC)
    if at < 0 or at + END.size > len(tail):
        return
    places = [(END.unpack_from(tail, at)[-2], CENTRAL_MAGIC)]
    locator = tail[max(0, at - LOCATOR64.size) : at]
    if locator.startswith(LOCATOR64_MAGIC):
        places.append((LOCATOR64.unpack(locator)[2], END64_MAGIC))
    for at, magic in places:
        is_there = at < whole.size and whole.read(at, min(at + 4, whole.size)) == magic
        if is_there and not any(start <= at < stop for start, stop in tails):
            raise MalformedError("a loader may take all of its items for one zip archive")


def is_tar(block: bytes) -> bool:
    """True if the first block has the checksum of a tar of any variant (Lib/tarfile.py ``frombuf``)."""
    if len(block) < _BLOCK:
        return False
    stated = _number(block[148:156])
    signed = 256 + sum(byte - 256 if byte > 127 else byte for byte in (*block[:148], *block[156:]))
    return stated in (256 + sum(block[:148]) + sum(block[156:]), signed)


def _number(field: bytes) -> int | None:
    if field[0] in (0o200, 0o377):
        return int.from_bytes(field[1:], "big") - (256 ** (len(field) - 1) if field[0] == 0o377 else 0)
    try:
        return int(field.partition(b"\0")[0].strip() or b"0", 8)
    except ValueError:
        return None

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
from ckpt_tools.verification.scan.kinds import FileKind
from ckpt_tools.verification.scan.piece import FileView
from ckpt_tools.verification.scan.tokens import is_importing_pickle

_ZIP_END_SEARCH_BYTES = (1 << 16) + END.size + (1 << 12)
"""Bytes at the end of a file in which zipfile and miniz look for the end record of an archive."""

_TAR_BLOCK_BYTES = 512

_COMPRESSED_MAGIC = re.compile(
    rb"\x1f\x8b|BZh[1-9](1AY&SY|\x17rE8P\x90)|\xfd7zXZ\0|\]\0\0|\x28\xb5\x2f\xfd|\x04\x22\x4d\x18"
)
_ZLIB_HEADER = re.compile(rb"\x78[\x01\x5e\x9c\xda]")
"""Both bytes of the header, without a dictionary."""
_OLD_JOBLIB_HEADER = re.compile(rb"ZF\s*(0x)?[0-9a-f]+L?\s*", re.I)
"""A length of 18 characters in hexadecimal; zlib follows (joblib/numpy_pickle_utils.py)."""

RUNNABLE_PICKLE_REASON = "a loader of pickles could run it"


class RunnableElsewhereError(MalformedError):
    """A file that a loader of pickles could run, although its name and first bytes are those of another kind."""


def check_no_polyglot(view: FileView, kind: FileKind) -> None:
    """Raises MalformedError if the file, proved as ``kind``, may be an archive, compressed, or a pickle that imports
    something."""
    head_bytes = view.read_head(_TAR_BLOCK_BYTES)
    if _is_compressed(head_bytes):
        raise MalformedError("a loader may take it for compressed data")
    _check_no_tar(head_bytes)
    if not head_bytes.startswith(LOCAL_MAGIC) and has_zip_end(view):
        raise MalformedError("a loader may take its end for a zip archive")
    if kind is not FileKind.PICKLED and is_importing_pickle(view):
        raise RunnableElsewhereError(RUNNABLE_PICKLE_REASON)


def _check_no_tar(head: bytes) -> None:
    if is_tar(head):
        raise MalformedError("a loader may take it for a tar archive")


def is_runnable_pickle(view: FileView) -> bool:
    """True if a loader of pickles could import something from ``view``, whose name is not that of a pickle."""
    return not kinds.PICKLE_NAME.search(view.file) and is_importing_pickle(view)


def _is_compressed(head: bytes) -> bool:
    if _ZLIB_HEADER.match(head):
        try:
            zlib.decompressobj().decompress(head)
        except zlib.error:
            return False
        return True
    return _COMPRESSED_MAGIC.match(head) is not None or _OLD_JOBLIB_HEADER.fullmatch(head[:20]) is not None


def has_zip_end(view: FileView) -> bool:
    """True if the end of the file has the end record of an archive, and there is a directory where the record says,
    counted from the start of the file or backwards from the record."""
    tail_start = max(0, view.size - _ZIP_END_SEARCH_BYTES)
    tail_bytes = view.read(tail_start, view.size)
    return any(
        _has_directory(view, tail_start + found.start()) for found in re.finditer(re.escape(END_MAGIC), tail_bytes)
    )


def _has_directory(view: FileView, end_record_start: int) -> bool:
    end_record = view.read(end_record_start, min(end_record_start + END.size, view.size))
    if len(end_record) < END.size:
        return False
    locator_start = max(0, end_record_start - LOCATOR64.size)
    if view.read(locator_start, locator_start + 4) == LOCATOR64_MAGIC:
        return True
    *_, num_bytes, start, _ = END.unpack(end_record)
    directory_offsets = [place for place in (start, end_record_start - num_bytes) if 0 <= place < view.size]
    return any(view.read(place, min(place + 4, view.size)) == CENTRAL_MAGIC for place in directory_offsets)


def check_item_file(view: FileView, directory_ranges: Collection[tuple[int, int]]) -> None:
    """Raises MalformedError if a file of items may be a tar, or if a loader that takes it for one zip would find a
    directory in it that is not one of an item; these are at ``directory_ranges``.

    The last item's end record counts from the start of the item, such a loader (miniz) from that of the file.
    """
    _check_no_tar(view.read_head(_TAR_BLOCK_BYTES))
    tail_start = max(0, view.size - _ZIP_END_SEARCH_BYTES)
    tail_bytes = view.read(tail_start, view.size)
    at = tail_bytes.rfind(END_MAGIC)
    if at < 0 or at + END.size > len(tail_bytes):
        return
    candidates = [(END.unpack_from(tail_bytes, at)[-2], CENTRAL_MAGIC)]
    locator_bytes = tail_bytes[max(0, at - LOCATOR64.size) : at]
    if locator_bytes.startswith(LOCATOR64_MAGIC):
        candidates.append((LOCATOR64.unpack(locator_bytes)[2], END64_MAGIC))
    for at, magic in candidates:
        is_there = at < view.size and view.read(at, min(at + 4, view.size)) == magic
        if is_there and not any(start <= at < stop for start, stop in directory_ranges):
            raise MalformedError("a loader may take all of its items for one zip archive")


def is_tar(block: bytes) -> bool:
    """True if the first block has the checksum of a tar of any variant (Lib/tarfile.py ``frombuf``)."""
    if len(block) < _TAR_BLOCK_BYTES:
        return False
    stated_checksum = _parse_tar_number(block[148:156])
    signed_checksum = 256 + sum(byte - 256 if byte > 127 else byte for byte in (*block[:148], *block[156:]))
    return stated_checksum in (256 + sum(block[:148]) + sum(block[156:]), signed_checksum)


def _parse_tar_number(field: bytes) -> int | None:
    if field[0] in (0o200, 0o377):
        return int.from_bytes(field[1:], "big") - (256 ** (len(field) - 1) if field[0] == 0o377 else 0)
    try:
        return int(field.partition(b"\0")[0].strip() or b"0", 8)
    except ValueError:
        return None

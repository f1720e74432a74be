"""Files that are proved as one thing, and that another loader could take for another."""

from __future__ import annotations

from ckpt_tools.errors import MalformedError
from ckpt_tools.serialization.zip_archive import END_MAGIC
from ckpt_tools.verification.scan import kinds
from ckpt_tools.verification.scan.piece import Piece
from ckpt_tools.verification.scan.tokens import imports_as_a_pickle

_END_BYTES = (1 << 16) + 22
"""Bytes at the end of a file in which Python's zipfile looks for the end record of an archive."""

_BLOCK = 512

_NO_PICKLES = (b"PK\x03\x04", b"\x93NUMPY")
"""First bytes with which no pickle starts."""

_NUMBER_LINES = (b"P", b"p", b"g", b"I", b"L", b"F", b"S")
"""Opcodes of pickles that take a line: the length of a header holds a NUL, with which none of these means anything."""


def check_one_meaning(piece: Piece) -> None:
    """Raises MalformedError where a proven file may be an archive, or a pickle that imports something, for another
    loader."""
    head = piece.head(_BLOCK)
    if head.startswith(_NO_PICKLES):
        # An archive that starts here is the only one in it.
        return
    if is_tar(head):
        raise MalformedError("a loader may take it for a tar archive")
    is_safetensors = piece.file.lower().endswith(".safetensors")
    if not is_safetensors and END_MAGIC in piece.read(max(0, piece.size - _END_BYTES), piece.size):
        raise MalformedError("a loader may take its end for a zip archive")
    if is_safetensors and head[:1] in _NUMBER_LINES:
        return
    if runs_as_a_pickle(piece):
        raise RunsElsewhereError(RUNS_AS_A_PICKLE)


RUNS_AS_A_PICKLE = "a loader of pickles could run it"


def runs_as_a_pickle(piece: Piece) -> bool:
    """True if a loader of pickles could import something from ``piece``, whose name is not that of a pickle."""
    is_other = not kinds.PICKLED.search(piece.file) and not piece.head(_BLOCK).startswith(_NO_PICKLES)
    return is_other and imports_as_a_pickle(piece)


class RunsElsewhereError(MalformedError):
    """A file that a loader of pickles could run, although its name and first bytes are those of another kind."""


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

"""Decides by opcodes alone whether data could be a pickle that imports something.

What an opcode means is not followed, so that nothing depends on following it as every unpickler does. An unpickler that
reads from the start meets these opcodes in this order, or fails before.
"""

from __future__ import annotations

import re

from ckpt_tools.verification.scan.piece import Piece

MAX_OPCODES = 1 << 20
"""More in a row are not an accident."""

_SKIPPED = dict.fromkeys(b"(.012NQRabdelost)u]}\x81\x85\x86\x87\x88\x89\x8f\x90\x91\x92\x94\x97\x98", 0)
_SKIPPED |= {ord(b"J"): 4, ord(b"K"): 1, ord(b"M"): 2, ord(b"G"): 8, ord(b"h"): 1, ord(b"j"): 4, ord(b"q"): 1,
             ord(b"r"): 4, 0x80: 1, 0x95: 8}  # fmt: skip
"""Opcodes, and the bytes of their argument. What a frame holds is read as if it were not in one."""

_COUNTED = {ord(b"U"): 1, ord(b"C"): 1, 0x8C: 1, 0x8A: 1, ord(b"T"): 4, ord(b"B"): 4, ord(b"X"): 4, 0x8B: 4, 0x8D: 8,
            0x8E: 8, 0x96: 8}  # fmt: skip
"""Opcodes with a counted argument, and the bytes of its length."""

_LINE = frozenset(b"ILFVSPpg")
_NAMES = frozenset(b"ci")
_IMPORTS = frozenset(b"\x93\x82\x83\x84")
_MODULE = re.compile(rb"[A-Za-z_]\w*(\.\w+)*\r?")
_CHUNK_BYTES = 1 << 16


def imports_as_a_pickle(piece: Piece) -> bool:
    """True if pickles that follow one another from the start of ``piece`` name anything that could be imported."""
    reader = _Reader(piece)
    for _ in range(MAX_OPCODES):
        if reader.at >= piece.size:
            return False
        (opcode,) = reader.take(1)
        if opcode in _IMPORTS:
            return True
        if opcode in _NAMES:
            return _MODULE.fullmatch(reader.line()) is not None and _MODULE.fullmatch(reader.line()) is not None
        if opcode in _SKIPPED:
            reader.at += _SKIPPED[opcode]
        elif opcode in _COUNTED:
            num_bytes = int.from_bytes(reader.take(_COUNTED[opcode]), "little")
            reader.at += num_bytes
        elif opcode in _LINE:
            reader.skip_line()
        else:
            return False
    return True


class _Reader:
    def __init__(self, piece: Piece) -> None:
        self.at = 0
        self._piece = piece
        self._window = (0, b"")

    def take(self, num_bytes: int) -> bytes:
        start, data = self._window
        if not start <= self.at <= self.at + num_bytes <= start + len(data):
            start = self.at
            data = (
                self._piece.read(start, min(start + _CHUNK_BYTES, self._piece.size))
                if start < self._piece.size
                else b""
            )
            self._window = start, data
        found = data[self.at - start : self.at - start + num_bytes]
        self.at += num_bytes
        return found

    def line(self) -> bytes:
        """The line, if it is short enough to be a name."""
        start = self.at
        self.skip_line()
        if self.at - start > _CHUNK_BYTES:
            return b""
        return self._piece.read(start, min(self.at, self._piece.size)).removesuffix(b"\n")

    def skip_line(self) -> None:
        while self.at < self._piece.size:
            start, known = self._window
            data = self.take(max(start + len(known) - self.at, 1) if self.at >= start else 1)
            end = data.find(b"\n")
            if end >= 0:
                self.at += end + 1 - len(data)
                return

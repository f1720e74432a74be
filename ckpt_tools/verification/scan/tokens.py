"""Decides by opcodes and the depth of the stack if data could be a pickle that imports something.

What an opcode makes is not followed, so that nothing depends on following it as every unpickler does. An unpickler that
reads from the start meets these opcodes in this order, or fails before: on an opcode that takes more values than the
stack holds, on a memo that is empty, on a number or a string that is not one.
"""

from __future__ import annotations

import re
import sys

from ckpt_tools.verification.scan.piece import Piece

MAX_OPCODES = 1 << 20
"""More in a row are not an accident."""

_Effect = tuple[int, int, int]
"""Bytes of the argument, values that the opcode takes, and values that it leaves."""

_PLAIN: dict[int, _Effect] = {
    **dict.fromkeys(b"N)]}\x88\x89\x8f", (0, 0, 1)),
    **{ord(opcode): (num_bytes, 0, 1) for opcode, num_bytes in {"K": 1, "M": 2, "J": 4, "G": 8}.items()},
    **dict.fromkeys(b"aRb\x81\x86", (0, 2, 1)),
    **dict.fromkeys(b"s\x92\x87", (0, 3, 1)),
    **dict.fromkeys(b"Q\x85\x98", (0, 1, 1)),
    ord("2"): (0, 1, 2),
    0x95: (8, 0, 0),
}
"""Bytes in a frame are read as if they were not in one."""

_COUNTED = {ord(b"U"): 1, ord(b"C"): 1, 0x8C: 1, 0x8A: 1, ord(b"T"): 4, ord(b"B"): 4, ord(b"X"): 4, 0x8B: 4, 0x8D: 8,
            0x8E: 8, 0x96: 8}  # fmt: skip
"""Opcodes with a counted argument, and the bytes of its length."""

_PUTS = {ord("q"): 1, ord("r"): 4, 0x94: 0, ord("p"): None}
_GETS = {ord("h"): 1, ord("j"): 4, ord("g"): None}
"""Opcodes of the memo, and the bytes of their argument; None if it is a line."""

_NEW_FROM_MARK = b"tld\x91o"
_ADD_FROM_MARK = b"ue\x90"
_MAX_PROTOCOL = 5

_NUMBER = re.compile(rb"[\s\w.+-]*(\0|$)", re.ASCII)
"""A line of a number; CPython's C unpickler reads it up to a NUL."""

_MODULE = re.compile(r"[\w.-]+\r?")
"""A name as modules have it. An import of another name, such as a line of text, counts if something is called behind it
or another import follows: torch makes storages of any module, and a file or a folder may have any name."""

_CALLS = b"Rb\x81\x92"

_CHUNK_BYTES = 1 << 16


def imports_as_a_pickle(piece: Piece) -> bool:
    """True if pickles that follow one another from the start of ``piece`` import anything."""
    return _Tokens(piece).import_something()


class _FailsError(Exception):
    """Every unpickler fails here."""


class _Tokens:
    def __init__(self, piece: Piece) -> None:
        self._reader = _Reader(piece)
        self._size = piece.size
        self._start()

    def _start(self) -> None:
        self._depth = 0
        self._marks: list[int] = []
        self._has_memo = False
        self._has_odd_import = False

    def import_something(self) -> bool:
        try:
            for _ in range(MAX_OPCODES):
                if self._reader.at >= self._size:
                    return False
                (opcode,) = self._reader.take(1)
                if self._imports(opcode):
                    return True
        except _FailsError:
            return False
        return True

    def _imports(self, opcode: int) -> bool:
        if opcode in _PLAIN:
            num_bytes, taken, left = _PLAIN[opcode]
            self._reader.at += num_bytes
            self._take(taken)
            if opcode in _CALLS and self._has_odd_import:
                return True
            self._depth += left
        elif opcode in _COUNTED:
            num_bytes = int.from_bytes(self._reader.take(_COUNTED[opcode]), "little")
            self._reader.at += num_bytes
            self._depth += 1
        elif opcode in b"ci":
            return self._imports_by_lines(is_inst=opcode == ord("i"))
        elif opcode == 0x93:
            self._take(2)
            return True
        elif opcode in b"ILFSV":
            self._line_of_a_value(opcode)
        else:
            return self._changes_the_stack(opcode)
        return False

    def _changes_the_stack(self, opcode: int) -> bool:
        """Follow another opcode; True if it calls what was imported."""
        if opcode in _PUTS or opcode in _GETS:
            self._memo(opcode)
        elif opcode in _NEW_FROM_MARK:
            self._pop_mark()
            self._depth += 1
            return opcode == ord("o") and self._has_odd_import
        elif opcode in _ADD_FROM_MARK:
            self._pop_mark()
            self._take(1)
            self._depth += 1
        elif opcode == ord("("):
            self._marks.append(self._depth)
            self._depth = 0
        elif opcode == ord("1") or (opcode == ord("0") and not self._depth):
            self._pop_mark()
        elif opcode == ord("0"):
            self._take(1)
        elif opcode == ord("."):
            self._take(1)
            self._start()
        elif opcode == 0x80:
            if self._reader.take(1) > bytes([_MAX_PROTOCOL]):
                raise _FailsError
        else:
            # Not an opcode; or an id of a line, a buffer or a code of the extension registry, none of which a loader of
            # checkpoints has.
            raise _FailsError
        return False

    def _take(self, num: int) -> None:
        if self._depth < num:
            raise _FailsError
        self._depth -= num

    def _pop_mark(self) -> None:
        if not self._marks:
            raise _FailsError
        self._depth = self._marks.pop()

    def _memo(self, opcode: int) -> None:
        is_put = opcode in _PUTS
        if not (self._depth if is_put else self._has_memo):
            raise _FailsError
        num_bytes = (_PUTS if is_put else _GETS)[opcode]
        if num_bytes is None:
            self._number()
        self._reader.at += num_bytes or 0
        self._has_memo = True
        self._depth += not is_put

    def _line_of_a_value(self, opcode: int) -> None:
        if opcode == ord("S"):
            first, last = self._reader.ends_of_line()
            if first != last or first not in (b"'", b'"'):
                raise _FailsError
        elif opcode == ord("V"):
            self._reader.skip_line()
        else:
            self._number()
        self._depth += 1

    def _number(self) -> None:
        if not _NUMBER.match(self._reader.line()):
            raise _FailsError

    def _imports_by_lines(self, *, is_inst: bool) -> bool:
        """True for an import of a name as modules have it, and for one that is called at once.

        Raises _FailsError if every unpickler fails here. Without an attribute, Python's unpickler fails behind the
        import, which counts if it is of a module of Python: some of them act when they are imported.
        """
        module, attribute = self._reader.line(), self._reader.line()
        try:
            # The end of a line that is cut may be half of a character.
            name = module.decode(errors="strict" if len(module) < _CHUNK_BYTES else "replace")
        except UnicodeDecodeError:
            raise _FailsError from None
        if not attribute:
            # Python's unpickler leaves out the last byte of a line at the end of the data.
            if sys.stdlib_module_names.isdisjoint(each.partition(".")[0] for each in (name, name[:-1])):
                raise _FailsError
            return True
        if _MODULE.fullmatch(name):
            return True
        if is_inst:
            # INST calls what it imports.
            self._pop_mark()
            return True
        self._has_odd_import = True
        self._depth += 1
        return False


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
        """The line without its end, or the first part of one that is longer than any name or number."""
        start = self.at
        self.skip_line()
        return self._piece.read(start, min(self.at, start + _CHUNK_BYTES, self._piece.size)).removesuffix(b"\n")

    def ends_of_line(self) -> tuple[bytes, bytes]:
        """The first and the last byte of the line, without white space at its end."""
        start = self.at
        line = self.line().rstrip()
        if self.at - start > _CHUNK_BYTES:
            end = self._piece.read(max(start, self.at - _CHUNK_BYTES), min(self.at, self._piece.size)).rstrip()
            return line[:1], end[-1:]
        return line[:1], line[-1:]

    def skip_line(self) -> None:
        while self.at < self._piece.size:
            start, known = self._window
            data = self.take(max(start + len(known) - self.at, 1) if self.at >= start else 1)
            end = data.find(b"\n")
            if end >= 0:
                self.at += end + 1 - len(data)
                return

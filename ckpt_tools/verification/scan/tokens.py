"""Decides by opcodes and the depth of the stack if data could be a pickle that imports something.

What an opcode makes is not followed, so that nothing depends on following it as every unpickler does. An unpickler that
reads from the start meets these opcodes in this order, or fails before: on an opcode that takes more values than the
stack holds, on a memo that is empty, on a number or a string that is not one.
"""

from __future__ import annotations

import re
import sys

from ckpt_tools.verification.scan.piece import FileView

MAX_OPCODES = 1 << 20
"""More in a row are not an accident."""

_StackEffect = tuple[int, int, int]
"""Bytes of the argument, values that the opcode takes, and values that it leaves."""

_STACK_EFFECTS: dict[int, _StackEffect] = {
    **dict.fromkeys(b"N)]}\x88\x89\x8f", (0, 0, 1)),
    **{ord(opcode): (num_bytes, 0, 1) for opcode, num_bytes in {"K": 1, "M": 2, "J": 4, "G": 8}.items()},
    **dict.fromkeys(b"aRb\x81\x86", (0, 2, 1)),
    **dict.fromkeys(b"s\x92\x87", (0, 3, 1)),
    **dict.fromkeys(b"Q\x85\x98", (0, 1, 1)),
    ord("2"): (0, 1, 2),
    0x95: (8, 0, 0),
}
"""Bytes in a frame are read as if they were not in one."""

_LENGTH_PREFIX_BYTES = {
    **dict.fromkeys((ord(b"U"), ord(b"C"), 0x8C, 0x8A), 1),
    **dict.fromkeys((ord(b"T"), ord(b"B"), ord(b"X"), 0x8B), 4),
    **dict.fromkeys((0x8D, 0x8E, 0x96), 8),
}
"""Opcodes with a counted argument, and the bytes of its length."""

_PUT_ARGUMENT_BYTES = {ord("q"): 1, ord("r"): 4, 0x94: 0, ord("p"): None}
_GET_ARGUMENT_BYTES = {ord("h"): 1, ord("j"): 4, ord("g"): None}
"""Opcodes of the memo, and the bytes of their argument; None if it is a line."""

_NEW_FROM_MARK = b"tld\x91o"
_ADD_FROM_MARK = b"ue\x90"
_MAX_PROTOCOL = 5

_NUMBER_LINE = re.compile(rb"[\s\w.+-]*(\0|$)", re.ASCII)
"""A line of a number; CPython's C unpickler reads it up to a NUL."""

_MODULE_NAME = re.compile(r"[\w.-]+\r?")
"""A name as modules have it. An import of another name, such as a line of text, counts if something is called behind it
or another import follows: torch makes storages of any module, and a file or a folder may have any name."""

_CALL_OPCODES = b"Rb\x81\x92"

_CHUNK_BYTES = 1 << 16


def is_importing_pickle(view: FileView) -> bool:
    """True if pickles that follow one another from the start of ``view`` import anything."""
    return _OpcodeScanner(view).does_import()


class _UnpicklingFailsError(Exception):
    """Every unpickler fails here."""


class _OpcodeScanner:
    def __init__(self, view: FileView) -> None:
        self._reader = _WindowedReader(view)
        self._size = view.size
        self._reset_state()

    def _reset_state(self) -> None:
        self._depth = 0
        self._mark_depths: list[int] = []
        self._has_memo = False
        self._has_odd_import = False

    def does_import(self) -> bool:
        try:
            for _ in range(MAX_OPCODES):
                if self._reader.position >= self._size:
                    return False
                (opcode,) = self._reader.read_bytes(1)
                if self._follow_opcode(opcode):
                    return True
        except _UnpicklingFailsError:
            return False
        return True  # more opcodes than an accident has: they count as an import

    def _follow_opcode(self, opcode: int) -> bool:
        """Follow an opcode; True if it imports something, or calls what was imported."""
        if opcode in _STACK_EFFECTS:
            num_bytes, num_taken, num_left = _STACK_EFFECTS[opcode]
            self._reader.position += num_bytes
            self._pop_values(num_taken)
            if opcode in _CALL_OPCODES and self._has_odd_import:
                return True
            self._depth += num_left
        elif opcode in _LENGTH_PREFIX_BYTES:
            num_bytes = int.from_bytes(self._reader.read_bytes(_LENGTH_PREFIX_BYTES[opcode]), "little")
            self._reader.position += num_bytes
            self._depth += 1
        elif opcode in b"ci":
            return self._follow_line_import(is_inst=opcode == ord("i"))
        elif opcode == 0x93:
            self._pop_values(2)
            return True
        elif opcode in b"ILFSV":
            self._push_line_value(opcode)
        else:
            return self._follow_stack_opcode(opcode)
        return False

    def _follow_stack_opcode(self, opcode: int) -> bool:
        """Follow another opcode; True if it calls what was imported."""
        if opcode in _PUT_ARGUMENT_BYTES or opcode in _GET_ARGUMENT_BYTES:
            self._follow_memo_opcode(opcode)
        elif opcode in _NEW_FROM_MARK:
            self._pop_mark()
            self._depth += 1
            return opcode == ord("o") and self._has_odd_import
        elif opcode in _ADD_FROM_MARK:
            self._pop_mark()
            self._pop_values(1)
            self._depth += 1
        elif opcode == ord("("):
            self._mark_depths.append(self._depth)
            self._depth = 0
        elif opcode == ord("1") or (opcode == ord("0") and not self._depth):
            self._pop_mark()
        elif opcode == ord("0"):
            self._pop_values(1)
        elif opcode == ord("."):
            self._pop_values(1)
            self._reset_state()
        elif opcode == 0x80:
            if self._reader.read_bytes(1) > bytes([_MAX_PROTOCOL]):
                raise _UnpicklingFailsError
        else:
            # Not an opcode; or an id of a line, a buffer or a code of the extension registry, none of which a loader of
            # checkpoints has.
            raise _UnpicklingFailsError
        return False

    def _pop_values(self, num: int) -> None:
        if self._depth < num:
            raise _UnpicklingFailsError
        self._depth -= num

    def _pop_mark(self) -> None:
        if not self._mark_depths:
            raise _UnpicklingFailsError
        self._depth = self._mark_depths.pop()

    def _follow_memo_opcode(self, opcode: int) -> None:
        is_put = opcode in _PUT_ARGUMENT_BYTES
        if not (self._depth if is_put else self._has_memo):
            raise _UnpicklingFailsError
        num_bytes = (_PUT_ARGUMENT_BYTES if is_put else _GET_ARGUMENT_BYTES)[opcode]
        if num_bytes is None:
            self._check_number_line()
        self._reader.position += num_bytes or 0
        self._has_memo = True
        self._depth += not is_put

    def _push_line_value(self, opcode: int) -> None:
        if opcode == ord("S"):
            first, last = self._reader.read_line_ends()
            if first != last or first not in (b"'", b'"'):
                raise _UnpicklingFailsError
        elif opcode == ord("V"):
            self._reader.skip_line()
        else:
            self._check_number_line()
        self._depth += 1

    def _check_number_line(self) -> None:
        if not _NUMBER_LINE.match(self._reader.read_line()):
            raise _UnpicklingFailsError

    def _follow_line_import(self, *, is_inst: bool) -> bool:
        """True for an import of a name as modules have it, and for one that is called at once.

        Raises _UnpicklingFailsError if every unpickler fails here. Without an attribute, Python's unpickler fails
        behind the import, which counts if it is of a module of Python: some of them act when they are imported.
        """
        module, attribute = self._reader.read_line(), self._reader.read_line()
        try:
            # The end of a line that is cut may be half of a character.
            module_name = module.decode(errors="strict" if len(module) < _CHUNK_BYTES else "replace")
        except UnicodeDecodeError:
            raise _UnpicklingFailsError from None
        if not attribute:
            # Python's unpickler leaves out the last byte of a line at the end of the data.
            if sys.stdlib_module_names.isdisjoint(each.partition(".")[0] for each in (module_name, module_name[:-1])):
                raise _UnpicklingFailsError
            return True
        if _MODULE_NAME.fullmatch(module_name):
            return True
        if is_inst:
            # INST calls what it imports.
            self._pop_mark()
            return True
        # A text such as "config of a run" begins like an import, whose opcode is "c": it counts if something is called.
        self._has_odd_import = True
        self._depth += 1
        return False


class _WindowedReader:
    def __init__(self, view: FileView) -> None:
        self.position = 0
        self._view = view
        self._window = (0, b"")

    def read_bytes(self, num_bytes: int) -> bytes:
        window_start, data = self._window
        if not window_start <= self.position <= self.position + num_bytes <= window_start + len(data):
            window_start = self.position
            data = (
                self._view.read(window_start, min(window_start + _CHUNK_BYTES, self._view.size))
                if window_start < self._view.size
                else b""
            )
            self._window = window_start, data
        chunk = data[self.position - window_start : self.position - window_start + num_bytes]
        self.position += num_bytes
        return chunk

    def read_line(self) -> bytes:
        """The line without its end, or the first part of one that is longer than any name or number."""
        start = self.position
        self.skip_line()
        return self._view.read(start, min(self.position, start + _CHUNK_BYTES, self._view.size)).removesuffix(b"\n")

    def read_line_ends(self) -> tuple[bytes, bytes]:
        """The first and the last byte of the line, without white space at its end."""
        start = self.position
        line = self.read_line().rstrip()
        if self.position - start > _CHUNK_BYTES:
            end = self._view.read(
                max(start, self.position - _CHUNK_BYTES), min(self.position, self._view.size)
            ).rstrip()
            return line[:1], end[-1:]
        return line[:1], line[-1:]

    def skip_line(self) -> None:
        while self.position < self._view.size:
            start, window_bytes = self._window
            data = self.read_bytes(max(start + len(window_bytes) - self.position, 1) if self.position >= start else 1)
            newline_at = data.find(b"\n")
            if newline_at >= 0:
                self.position += newline_at + 1 - len(data)
                return

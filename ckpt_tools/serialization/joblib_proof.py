"""Proof that loading a file of ``joblib.dump`` runs no code: one pickle, with the elements of arrays in its midst.

Where the pickle completes a ``NumpyArrayWrapper``, joblib.load reads as many bytes as its shape and dtype say, and
continues behind them (joblib 0.10 to 1.6, numpy_pickle.py). Since 1.2 a byte with the number of bytes of padding stands
before them. It is not an opcode, so that any other loader of pickles ends there. Before 1.2, and in a stream without a
position, the elements follow at once: a file is proved only if they end another loader before it does anything.

Elements are not read. A part of the file behind them is read instead, so that a file may be larger than the memory.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Collection
from math import prod

from ckpt_tools.core.values import StorageRef
from ckpt_tools.errors import MalformedError
from ckpt_tools.serialization.pickle.machine import ArrayFollows, EndsEarlyError, Machine
from ckpt_tools.serialization.pickle.numpy_rules import JOBLIB_ALIGNMENT, JOBLIB_STATE, get_item_bytes
from ckpt_tools.serialization.pickle.proof import Proof, prove_pickle
from ckpt_tools.serialization.zip_archive import ReadRange

FIRST_READ_BYTES = 1 << 20
"""A pickle without its arrays is smaller, mostly. A larger one takes reads of eight times as much until it fits."""

_REQUIRED_ATTRIBUTES = {"subclass", "shape", "order", "dtype", "allow_mmap"}
_PADDING_BYTE = b"\xff"


def prove_joblib(
    read: ReadRange,
    size: int,
    path: str,
    *,
    allowed: Collection[str] = (),
    read_inner_storage: Callable[[bytes], StorageRef] | None = None,
) -> Proof:
    """The proof of the file of ``size`` bytes that ``read(start, stop)`` reads.

    Raises:
        FormatError: joblib did not write it, it holds an array of objects, or another loader could read something else.
    """
    num_bytes = FIRST_READ_BYTES
    while True:
        num_bytes = min(num_bytes, size)
        try:
            proof = prove_pickle(
                read(0, num_bytes),
                path=path,
                allowed=allowed,
                is_prefix=num_bytes < size,
                read_inner_storage=read_inner_storage,
                arrays=_ArraySkipper(read, size, num_bytes),
            )
        except EndsEarlyError:
            if num_bytes == size:
                raise
            num_bytes *= 8
            continue
        if proof.stop != size:
            raise MalformedError(f"more data follows the end of the pickle at byte {proof.stop - 1:,}", path=path)
        return proof


class _ArraySkipper:
    """The arrays of a file, which is read in parts of ``part_bytes``."""

    def __init__(self, read: ReadRange, size: int, part_bytes: int) -> None:
        self._read = read
        self._size = size
        self._part_bytes = part_bytes
        # What other loaders could read of all arrays together takes no more time than reading the file.
        self._opcodes_left = size + FIRST_READ_BYTES

    def skip_array(self, machine: Machine, array: ArrayFollows) -> int:
        num_bytes, is_aligned = _read_description(machine, array)
        start = array.at + machine.shift
        if is_aligned:
            stop = start + self._check_padding(machine, start) + num_bytes
        else:
            self._check_other_loaders(machine, array.at)
            stop = start + num_bytes
        if stop > self._size:
            machine.fail("the elements of an array are longer than the file")
        machine.num_skipped += stop - start
        if stop - machine.shift > len(machine.data):
            machine.continue_with(self._read(stop, min(stop + self._part_bytes, self._size)), stop)
        return stop - machine.shift

    def _check_padding(self, machine: Machine, start: int) -> int:
        """Number of bytes before the elements, which must be as joblib writes them: a byte with the number of bytes of
        padding, and these up to a multiple of the alignment."""
        num_bytes = JOBLIB_ALIGNMENT - (start + 1) % JOBLIB_ALIGNMENT
        expected_padding = bytes([num_bytes]) + _PADDING_BYTE * num_bytes
        if self._read(start, min(start + len(expected_padding), self._size)) != expected_padding:
            machine.fail("the padding before the elements of an array is not as joblib writes it")
        return len(expected_padding)

    def _check_other_loaders(self, machine: Machine, position: int) -> None:
        """Refuse elements that another loader could take for opcodes that do anything.

        A plain unpickler runs them as opcodes: they are walked as it would run them, and are fine if it fails, ends, or
        only pushes values before that. The first opcode finds the wrapper on top of the stack, which is not a tuple,
        text or dict: an opcode that needs one of these fails, and one that puts the wrapper into a container does what
        the pickle would have done. A loader also fails at the name of a module that is not text.
        """
        data, first = machine.data, position
        while position < len(data) and data[position] in _ARGUMENT_BYTES:
            opcode = data[position]
            self._opcodes_left -= 1
            if opcode == _PERSISTENT_ID_OPCODE or (position == first and opcode in _OPCODES_FAILING_FIRST):
                return
            if opcode in _NAME_OPCODES and not _is_module_name(data, position + 1):
                self._check_not_cut_off(machine, data.find(b"\n", position) + 1 or len(data))
                return
            is_inert = opcode in _INERT_OPCODES or (position == first and opcode in _OPCODES_INERT_FIRST)
            if not is_inert or self._opcodes_left < 0:
                machine.fail("a loader of pickles other than joblib could run the elements of an array")
            position = _skip_argument(data, position + 1, _ARGUMENT_BYTES[opcode])
        self._check_not_cut_off(machine, position)

    def _check_not_cut_off(self, machine: Machine, position: int) -> None:
        if position >= len(machine.data) and machine.shift + len(machine.data) < self._size:
            machine.fail_early("the elements of an array may be opcodes")


def _read_description(machine: Machine, array: ArrayFollows) -> tuple[int, bool]:
    """Number of bytes of the elements, and whether padding is before them."""
    state = array.description.state
    if not JOBLIB_STATE.accepts(state) or not state.keys() >= _REQUIRED_ATTRIBUTES:
        machine.fail("an array is not described as joblib does it")
    num_bytes = get_item_bytes(state["dtype"])
    if not num_bytes:
        machine.fail("it holds an array of objects, which joblib stores as a pickle within the pickle")
    return num_bytes * prod(state["shape"]), state.get("numpy_array_alignment_bytes") is not None


def _skip_argument(data: bytes, position: int, width: int) -> int:
    """The position after the argument of an opcode, in the terms of ``pickletools``: its bytes, or what counts them."""
    if width >= 0:
        return position + width
    if width == pickletools.UP_TO_NEWLINE:
        newline = data.find(b"\n", position)
        return newline + 1 if newline >= 0 else len(data)
    length = _LENGTH_FIELD_BYTES[width]
    return position + length + int.from_bytes(data[position : position + length], "little")


def _is_module_name(data: bytes, position: int) -> bool:
    """True if the line could be the name of a module."""
    newline = data.find(b"\n", position)
    try:
        line = data[position : newline if newline >= 0 else len(data)].decode()
    except UnicodeDecodeError:
        return False
    return "\0" not in line


_LENGTH_FIELD_BYTES = {
    pickletools.TAKEN_FROM_ARGUMENT1: 1,
    pickletools.TAKEN_FROM_ARGUMENT4: 4,
    pickletools.TAKEN_FROM_ARGUMENT4U: 4,
    pickletools.TAKEN_FROM_ARGUMENT8U: 8,
}
_ARGUMENT_BYTES = {ord(each.code): each.arg.n if each.arg else 0 for each in pickletools.opcodes}
"""Bytes of the argument of each opcode, or how they are counted."""

_PERSISTENT_ID_OPCODE = ord("P")
_NAME_OPCODES = frozenset(b"ci")
_OPCODES_FAILING_FIRST = frozenset(b"RQ\x81\x92\x93")
_OPCODES_INERT_FIRST = frozenset(b"aesubd\x90\x91")
_INERT_OPCODES = frozenset(b"(.012NIJKMLFGSTUVXBC)]}tl\x80\x85\x86\x87\x88\x89\x8a\x8b\x8c\x8d\x8e\x8f\x94\x96ghjpqr")
"""Opcodes that push values, make tuples and lists of them, or end a pickle."""

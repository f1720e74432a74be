"""The files that contain pickles: streams of pickles, torch zips, the tar of torch before 0.1.10, numpy's arrays.

A file is taken for what its first bytes make a loader take it for (torch/serialization.py ``load``), not for what its
name says. The name decides one thing: where it is one that loaders unpickle, what cannot be followed is a finding.
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from ckpt_tools.core.dtypes import from_torch_storage
from ckpt_tools.core.values import GlobalRef, Value
from ckpt_tools.errors import FormatError, UnsafeError, UnsupportedError
from ckpt_tools.serialization.pickle.load import recorded
from ckpt_tools.serialization.pickle.trace.recorder import Recording
from ckpt_tools.serialization.zip_archive import ReadRange, read_directory
from ckpt_tools.verification.scan.archives import (
    Member,
    has_one_directory,
    is_zip_at_the_end,
    members_of_any_zip,
    tar_members,
)
from ckpt_tools.verification.scan.findings import Danger, FindingCollector

UNPICKLED = re.compile(r"\.(pt|pth|bin|ckpt|pkl|pickle|pk|mdl|th|pyt|dill|joblib|metadata|distcp|pth?\.tar)$", re.I)
"""Names of files that loaders unpickle. Others may hold anything, and are no finding where they are no pickle."""

LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
"""torch/serialization.py MAGIC_NUMBER: the first of the five pickles of a file before torch 1.6."""

FIRST_READ_BYTES = 1 << 16
"""Most pickles are smaller: one read. Others take a read of eight times as much until they fit."""

MAX_PICKLE_BYTES = 1 << 32
"""As where they are read: the pickle of a model of a million tensors takes 200 MB."""

MAX_PICKLES = 1000
"""Pickles in one stream. A legacy file has five; more than a thousand would only serve to keep us busy."""

MAX_NESTING = 4
"""Pickles in byte strings of pickles."""

MIN_PICKLE_BYTES = 6
"""The shortest pickle that names anything: ``ca\\nb\\n.``."""

MAX_KNOWN_BYTES, MAX_KNOWN = 4096, 256
"""Pickles that are remembered, at up to 100 KB each: the items of a DCP repeat a few small ones a million times."""

TAIL_BYTES = 1 << 13
"""One read from the end that holds the directory of an item of a DCP; larger ones take another read."""

_ZIP_MAGIC, _NUMPY_MAGIC, _PROTOCOL = b"PK\x03\x04", b"\x93NUMPY", re.compile(rb"\x80[\x00-\x05]")
_HEAD_BYTES = 512
_NO_PICKLES = re.compile(r"[^/]+/(data/\d+|version|byteorder|\.format_version|\.storage_alignment|\.data/.*)")
_OBJECTS = re.compile(rb"['\"][|<>=]?O8?['\"]|object")
_PROGRAM = re.compile(r"[^/]+/(constants\.pkl$|code/)")
_TAR_OF_TORCH = {"sys_info", "pickle", "storages", "tensors"}


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes that a loader would take for a file of their own; ``is_expected`` where it would unpickle them.

    ``place`` says where they are in ``file``, ``depth`` how many pickles they lie in.
    """

    file: str
    place: str
    size: int
    read: ReadRange
    is_expected: bool
    depth: int = 0

    def part(self, start: int, stop: int, place: str, *, is_expected: bool) -> Piece:
        read = self.read
        inner = self._inner(place, stop - start, is_expected)
        return replace(inner, read=lambda first, last: read(start + first, start + last))

    def holding(self, data: bytes, place: str, *, is_expected: bool) -> Piece:
        """``data``, which came out of this."""
        inner = self._inner(place, len(data), is_expected)
        return replace(inner, read=lambda start, stop: data[start:stop], depth=self.depth + 1)

    def _inner(self, place: str, size: int, is_expected: bool) -> Piece:
        where = ", ".join(filter(None, (self.place, place)))
        return replace(self, place=where, size=size, is_expected=is_expected)


class Inspector:
    """Checks pieces, and records the calls that a loader would execute."""

    def __init__(self, notebook: FindingCollector) -> None:
        self._notebook = notebook
        self._known: dict[bytes, Recording] = {}
        self._nested: set[bytes] = set()

    def inspect(self, piece: Piece) -> None:
        """Check ``piece``, of whatever kind it is. Raises only StoreError and MemoryBudgetError."""
        if not piece.size:
            return
        if piece.depth > MAX_NESTING:
            self._unreadable(piece, f"pickles are nested more than {MAX_NESTING} levels deep")
            return
        head = piece.read(0, min(piece.size, _HEAD_BYTES))
        if head.startswith(_ZIP_MAGIC):
            self._zip(piece)
        elif head.startswith(_NUMPY_MAGIC):
            self._numpy(piece, head)
        elif head[257:262] == b"ustar":
            self._tar(piece)
        else:
            self._stream(piece)
            if is_zip_at_the_end(piece.read, piece.size):
                self._any_zip(replace(piece, is_expected=False), None)

    def _unreadable(self, piece: Piece, what: str) -> None:
        self._notebook.add(piece.file, piece.place, Danger.UNREADABLE, what)

    # Pickles one after the other

    def _stream(self, piece: Piece) -> None:
        """Every pickle of ``piece``; the five of a legacy file are followed by its storages."""
        at, series = 0, list[Recording]()
        for _ in range(MAX_PICKLES):
            if at >= piece.size:
                return
            found = self._follow(piece, at)
            if not self._noted(piece, at, found):
                return
            at += found.stop
            series.append(found)
            if len(series) == 5 and series[0].value == LEGACY_MAGIC:
                at = self._after_storages(piece, at, series)
                series.clear()
        if at < piece.size and piece.is_expected:
            self._unreadable(piece, f"more than {MAX_PICKLES:,} pickles follow each other")

    def _follow(self, piece: Piece, at: int) -> Recording:
        num_bytes = FIRST_READ_BYTES
        while True:
            data = piece.read(at, min(at + num_bytes, piece.size))
            found = self._recorded(data, piece.file)
            if not found.is_cut or at + num_bytes >= piece.size or num_bytes > MAX_PICKLE_BYTES:
                return found
            num_bytes *= 8

    def _recorded(self, data: bytes, path: str) -> Recording:
        if len(data) > MAX_KNOWN_BYTES:
            return recorded(data, path=path)
        if data not in self._known:
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
            self._known[data] = recorded(data, path=path)
        return self._known[data]

    def _noted(self, piece: Piece, at: int, found: Recording) -> bool:
        """Note what was found at ``at``; False where nothing can follow it."""
        if found.failure is None:
            self._notebook.num_pickles += 1
            self._note_uses(piece, at, found)
            return True
        if piece.is_expected or (found.uses and _PROTOCOL.match(piece.read(at, min(at + 2, piece.size)))):
            self._note_uses(piece, at, found)
            self._note_failure(piece, at, found)
        return False

    def _note_uses(self, piece: Piece, at: int, found: Recording) -> None:
        def where(position: int) -> str:
            return ", ".join(filter(None, (piece.place, f"byte {at + position:,}")))

        for use in found.uses:
            self._notebook.add(piece.file, where(use.at), Danger.RUNS, use.shown)
        if found.num_uses > len(found.uses):
            left = found.num_uses - len(found.uses)
            self._notebook.add(piece.file, piece.place, Danger.RUNS, f"{left:,} more calls", count=left)
        for data in found.nested:
            self._look_inside(piece, data)

    def _look_inside(self, piece: Piece, data: bytes) -> None:
        """A byte string once, however often and from wherever it is given: copies of copies would keep us busy."""
        if len(data) < MIN_PICKLE_BYTES:
            return
        digest = hashlib.blake2b(data, digest_size=16).digest()
        if digest not in self._nested:
            self._nested.add(digest)
            self.inspect(piece.holding(data, "a byte string", is_expected=False))

    def _note_failure(self, piece: Piece, at: int, found: Recording) -> None:
        if at == 0 and not found.uses and _is_safetensors(piece):
            return
        what = (
            f"{piece.size - at:,} bytes follow a pickle but are not a pickle"
            if at and not found.stop > 2
            else found.failure
        )
        self._unreadable(piece, f"it cannot be read to its end, so there may be more calls: {what}")

    def _after_storages(self, piece: Piece, at: int, series: list[Recording]) -> int:
        """Where the storages of a legacy file end, which lie there in the order of the fifth pickle's keys."""
        kinds = {pid[2]: pid[1] for pid in series[3].persistent_ids if _is_storage(pid)}
        keys = series[4].value
        for key in keys if type(keys) is list else ():
            kind = kinds.get(key) if type(key) is str else None
            at = self._after_storage(piece, at, kind)
        return at

    def _after_storage(self, piece: Piece, at: int, kind: Value) -> int:
        """A storage is its number of elements and they themselves; ``piece.size`` where that cannot be."""
        item_bytes = _item_bytes(kind)
        head = piece.read(at, min(at + 8, piece.size))
        stop = at + 8 + int.from_bytes(head, "little") * (item_bytes or 0)
        if item_bytes is None or len(head) < 8 or stop > piece.size:
            self._unreadable(piece, f"the storage at byte {at:,} cannot be read to its end, so there may be more calls")
            return piece.size
        return stop

    # Archives

    def _zip(self, piece: Piece) -> None:
        try:
            directory = read_directory(piece.read, piece.size, piece.file, tail_bytes=TAIL_BYTES)
            ranges = directory.payload_ranges(piece.read, _with_pickles(directory.records)) if directory else {}
        except (FormatError, UnsafeError) as error:
            self._any_zip(piece, error)
            return
        if directory is None:
            self._no_archive(piece, "the zip archive has no end; it is truncated or damaged")
        elif not has_one_directory(piece.read, piece.size):
            self._any_zip(piece, None)
            self._no_archive(piece, "the zip archive has a second directory, which a loader may read instead")
        self._note_program(piece, list(ranges))
        for name, (start, stop) in ranges.items():
            part = piece.part(start, stop, name, is_expected=bool(UNPICKLED.search(name)))
            self.inspect(replace(part, depth=piece.depth + 1))

    def _no_archive(self, piece: Piece, what: str) -> None:
        if piece.is_expected:
            self._unreadable(piece, f"it cannot be read to its end, so there may be more calls: {what}")

    def _any_zip(self, piece: Piece, error: FormatError | UnsafeError | None) -> None:
        """An archive that torch did not write. A compressed one can be followed; of others, as much as can be."""
        members, reason = members_of_any_zip(piece.read, piece.size)
        if reason or (error is not None and not isinstance(error, UnsupportedError)):
            self._no_archive(piece, reason or str(error and error.message))
        self._note_program(piece, [member.name for member in members])
        for member in members:
            if not _NO_PICKLES.fullmatch(member.name):
                self._look_at_member(piece, member)

    def _look_at_member(self, piece: Piece, member: Member) -> None:
        expected = bool(UNPICKLED.search(member.name))
        self.inspect(piece.holding(member.data, member.name, is_expected=expected))

    def _note_program(self, piece: Piece, names: list[str]) -> None:
        if any(map(_PROGRAM.match, names)):
            self._notebook.add(piece.file, piece.place, Danger.RUNS, "the TorchScript program in its folder code/")

    def _numpy(self, piece: Piece, head: bytes) -> None:
        """An array of objects is a pickle after the header (numpy/lib/_format_impl.py)."""
        wide = head[6:7] != b"\x01"
        start = (12 if wide else 10) + int.from_bytes(head[8 : 12 if wide else 10], "little")
        if start < piece.size and _OBJECTS.search(piece.read(0, start)):
            self._stream(piece.part(start, piece.size, "objects", is_expected=True))

    def _tar(self, piece: Piece) -> None:
        """torch before 0.1.10. A loader that knows no tar takes it for a pickle."""
        self._stream(replace(piece, is_expected=False))
        members, reason = tar_members(piece.read, piece.size)
        if reason:
            self._no_archive(piece, reason)
        for name, start, stop in members:
            expected = name in _TAR_OF_TORCH or bool(UNPICKLED.search(name))
            part = replace(piece.part(start, stop, name, is_expected=expected), depth=piece.depth + 1)
            walk = {"storages": self._tar_storages, "tensors": self._tar_tensors}.get(name, self.inspect)
            walk(part)

    def _tar_storages(self, piece: Piece) -> None:
        self._alternating(piece, lambda at, args: self._after_storage(piece, at, args[2]))

    def _tar_tensors(self, piece: Piece) -> None:
        """After each pickle: dims (4 bytes and 4 of nothing), sizes, strides, offset."""

        def after(at: int, args: Value) -> int:
            dims = piece.read(at, min(at + 4, piece.size))
            return min(at + 16 + 16 * int.from_bytes(dims, "little"), piece.size)

        self._alternating(piece, after)

    def _alternating(self, piece: Piece, after: Callable[[int, Value], int]) -> None:
        """A pickled number, so many pickles of three values with raw bytes after each, and more pickles."""
        if not piece.size:
            return
        found = self._follow(piece, 0)
        at, left = found.stop, found.value
        going = self._noted(piece, 0, found) and type(left) is int
        while going and left > 0 and at < piece.size:
            found = self._follow(piece, at)
            going = self._noted(piece, at, found)
            if going and type(found.value) is tuple and len(found.value) == 3:
                at = after(at + found.stop, found.value)
                left -= 1
            elif going:
                self._unreadable(piece, f"the pickle at byte {at:,} is not one of torch's")
                going = False
        if going and at < piece.size:
            self._stream(piece.part(at, piece.size, f"from byte {at:,}", is_expected=True))


def _with_pickles(names: Iterable[str]) -> list[str]:
    """Of the records of a torch file, those that are not elements."""
    return [name for name in names if not _NO_PICKLES.fullmatch(name)]


def _is_storage(pid: Value) -> bool:
    """``("storage", class, key, location, numel, view)``."""
    return type(pid) is tuple and len(pid) >= 5 and pid[0] == "storage" and type(pid[2]) is str


def _item_bytes(kind: Value) -> int | None:
    if type(kind) is not GlobalRef:
        return None
    dtype = from_torch_storage(kind.name)
    return 1 if kind.name == "UntypedStorage" else dtype.item_bytes if dtype else None


def _is_safetensors(piece: Piece) -> bool:
    """Whether a JSON object starts where it would, which no pickle that runs anything has there without a finding."""
    head = piece.read(0, min(9, piece.size))
    return len(head) == 9 and head[8:] == b"{" and struct.unpack_from("<Q", head)[0] <= piece.size - 8

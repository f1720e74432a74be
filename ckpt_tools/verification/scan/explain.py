"""What a loader would run of data that could not be proved, as far as a recording can follow it.

This only explains: it names the calls, and it makes nothing clean. A file is taken for whatever a loader could take it
for: pickles one after the other, torch zips, the tar of torch before 0.1.10, numpy's arrays, whatever the ending.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace

from ckpt_tools.core.dtypes import from_torch_storage
from ckpt_tools.core.values import GlobalRef, Value
from ckpt_tools.errors import FormatError, UnsafeError
from ckpt_tools.serialization.pickle.load import recorded
from ckpt_tools.serialization.pickle.trace.recorder import Recording
from ckpt_tools.serialization.torch_legacy import FIRST_READ_BYTES, MAGIC_NUMBER
from ckpt_tools.serialization.zip_archive import read_directory
from ckpt_tools.verification.scan.archives import (
    has_one_directory,
    is_zip_at_the_end,
    members_of_any_zip,
    tar_members,
)
from ckpt_tools.verification.scan.budget import MAX_INFLATED_BYTES, FollowedBudget
from ckpt_tools.verification.scan.findings import Danger, FindingCollector
from ckpt_tools.verification.scan.piece import Piece
from ckpt_tools.verification.scan.strict_zip import TAIL_BYTES

MAX_FOLLOWED_BYTES = 1 << 25
"""Of one pickle."""

FREE_BYTES = 1 << 12
"""Of each file, whatever was followed before."""

MAX_PICKLES = 1000
"""Pickles in one stream. A legacy file has five; more than a thousand would only serve to keep us busy."""

MAX_NESTING = 4
"""Pickles in byte strings of pickles."""

MIN_PICKLE_BYTES = 6
"""The shortest pickle that names anything: ``ca\\nb\\n.``."""

MAX_KNOWN_BYTES, MAX_KNOWN = 4096, 256
"""Pickles that are remembered, at up to 100 KB each: the items of a DCP repeat a few small ones a million times."""

_ZIP_MAGIC, _NUMPY_MAGIC = b"PK\x03\x04", b"\x93NUMPY"
_HEAD_BYTES = 512
_NO_PICKLES = re.compile(
    r"[^/]+/(data/\d+|version|byteorder|\.format_version|\.storage_alignment|\.data/.*|code/.*\.py)"
)
_OBJECTS = re.compile(rb"['\"][|<>=]?O8?['\"]|object")


class Explainer:
    """Follows pieces, and notes the calls that a loader would execute. Raises only StoreError and MemoryBudgetError."""

    def __init__(self, notebook: FindingCollector) -> None:
        self._notebook = notebook
        self._known: dict[bytes, Recording] = {}
        self._nested: set[bytes] = set()
        self._budget = FollowedBudget()
        self._shown: list[str] = []

    def explain(self, piece: Piece) -> list[str]:
        """Note what a loader would run of ``piece``, of whatever kind it takes it for; the calls as they are shown."""
        # What was inflated is no size of a file.
        self._budget.grant(0 if piece.depth else piece.size, FREE_BYTES)
        self._shown.clear()
        # It was found not to be proved before; this is only the attempt to say more.
        with suppress(FormatError, UnsafeError, RecursionError, ValueError, IndexError):
            self._explain(piece)
        return list(self._shown)

    def _explain(self, piece: Piece) -> None:
        if not piece.size or piece.depth > MAX_NESTING or self._budget.left <= 0:
            return
        head = piece.head(_HEAD_BYTES)
        if head.startswith(_ZIP_MAGIC):
            self._zip(piece)
        elif head.startswith(_NUMPY_MAGIC):
            self._numpy(piece, head)
        elif head[257:262] == b"ustar":
            self._tar(piece)
        else:
            self._stream(piece)
            if is_zip_at_the_end(piece.read, piece.size):
                self._any_zip(piece)

    # Pickles one after the other

    def _stream(self, piece: Piece) -> None:
        """Every pickle of ``piece``; the five of a legacy file are followed by its storages."""
        at, series = 0, list[Recording]()
        for _ in range(MAX_PICKLES):
            if at >= piece.size:
                return
            found = self._follow(piece, at)
            self._note_uses(piece, at, found)
            if found.failure is not None:
                return
            at += found.stop
            series.append(found)
            if len(series) == 5 and series[0].value == MAGIC_NUMBER:
                at = self._after_storages(piece, at, series)
                series.clear()

    def _follow(self, piece: Piece, at: int) -> Recording:
        num_bytes = FIRST_READ_BYTES
        while True:
            data = piece.read(at, min(at + num_bytes, piece.size))
            found = self._recorded(data, piece.file)
            if not found.is_cut or at + num_bytes >= piece.size or self._budget.left <= 0:
                return found
            num_bytes *= 8

    def _recorded(self, data: bytes, path: str) -> Recording:
        if len(data) > MAX_KNOWN_BYTES:
            self._budget.left -= len(data)
            return recorded(data[:MAX_FOLLOWED_BYTES], path=path)
        if data not in self._known:
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
            self._known[data] = recorded(data, path=path)
        return self._known[data]

    def _note_uses(self, piece: Piece, at: int, found: Recording) -> None:
        for use in found.uses:
            if not self._is_allowed(use.shown):
                where = piece.within(f"byte {at + use.at:,}")
                self._shown.append(use.shown)
                self._notebook.add(piece.file, where, Danger.RUNS, use.shown)
        if found.num_uses > len(found.uses):
            left = found.num_uses - len(found.uses)
            self._notebook.add(piece.file, piece.place, Danger.RUNS, f"{left:,} more calls", count=left)
        for data in found.nested:
            self._look_inside(piece, data)

    def _is_allowed(self, shown: str) -> bool:
        return shown.partition("(")[0].removesuffix(".__new__") in self._notebook.allowed

    def _look_inside(self, piece: Piece, data: bytes) -> None:
        """A byte string once, however often and from wherever it is given: copies of copies would keep us busy."""
        if len(data) < MIN_PICKLE_BYTES:
            return
        digest = hashlib.blake2b(data, digest_size=16).digest()
        if digest not in self._nested:
            self._nested.add(digest)
            self._budget.left -= len(data)
            self._explain(piece.holding(data, "a byte string"))

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
            return piece.size
        return stop

    # Archives

    def _zip(self, piece: Piece) -> None:
        try:
            directory = read_directory(piece.read, piece.size, piece.file, tail_bytes=TAIL_BYTES)
            ranges = directory.payload_ranges(piece.read, _with_pickles(directory.records)) if directory else {}
        except (FormatError, UnsafeError):
            self._any_zip(piece)
            return
        if directory is None or not has_one_directory(piece.read, piece.size):
            self._any_zip(piece)
        for name, (start, stop) in ranges.items():
            self._explain(replace(piece.part(start, stop, name), depth=piece.depth + 1))

    def _any_zip(self, piece: Piece) -> None:
        """An archive that torch did not write. A compressed one can be followed; of others, as much as can be."""
        members, _ = members_of_any_zip(piece.read, piece.size, min(self._budget.left, MAX_INFLATED_BYTES))
        for member in members:
            self._budget.left -= len(member.data)
            if not _NO_PICKLES.fullmatch(member.name):
                self._explain(piece.holding(member.data, member.name))

    def _numpy(self, piece: Piece, head: bytes) -> None:
        """An array of objects is a pickle after the header (numpy/lib/_format_impl.py)."""
        wide = head[6:7] != b"\x01"
        start = (12 if wide else 10) + int.from_bytes(head[8 : 12 if wide else 10], "little")
        if start < piece.size and _OBJECTS.search(piece.read(0, start)):
            self._stream(piece.part(start, piece.size, "objects"))

    def _tar(self, piece: Piece) -> None:
        """torch before 0.1.10. A loader that knows no tar takes it for a pickle."""
        self._stream(piece)
        members, _ = tar_members(piece.read, piece.size)
        for name, start, stop in members:
            part = replace(piece.part(start, stop, name), depth=piece.depth + 1)
            walk = {"storages": self._tar_storages, "tensors": self._tar_tensors}.get(name, self._explain)
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
        self._note_uses(piece, 0, found)
        at, left = found.stop, found.value
        going = found.failure is None and type(left) is int
        while going and left > 0 and at < piece.size:
            found = self._follow(piece, at)
            self._note_uses(piece, at, found)
            going = found.failure is None and type(found.value) is tuple and len(found.value) == 3
            if going:
                at = after(at + found.stop, found.value)
                left -= 1
        if going and at < piece.size:
            self._stream(piece.part(at, piece.size, f"from byte {at:,}"))


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

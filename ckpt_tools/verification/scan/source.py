"""Scans every file of a source, and every item of a DCP at the place that its metadata names."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from ckpt_tools.core.wording import listed
from ckpt_tools.errors import FormatError, IncompleteError, StoreError, UnsafeError
from ckpt_tools.serialization.pickle.dcp_metadata import Metadata, StorageInfo
from ckpt_tools.serialization.pickle.load import loads
from ckpt_tools.serialization.zip_archive import END, END_MAGIC
from ckpt_tools.stores.local import LocalStore
from ckpt_tools.stores.source import Source, checked_name
from ckpt_tools.verification.scan.archives import inflated_zstd
from ckpt_tools.verification.scan.findings import Danger, FindingCollector, ScanReport
from ckpt_tools.verification.scan.pickle_files import UNPICKLED, Inspector, Piece

MAX_METADATA_BYTES = 4 << 30
"""As where it is read: a million chunks take 150 MB."""

SEARCH_BYTES = 1 << 20
"""Read at once where a file is searched for the archives in it."""

_ZSTD = "stream.zstd/1"


def scan_source(source: Source, url: str) -> ScanReport:
    """The calls that a loader would execute for the files of ``source``. Nothing is executed or opened outside of it.

    Raises:
        StoreError: a file cannot be read. MemoryBudgetError: there is not enough memory for a pickle.
    """
    return _Scan(source).run(url)


class _Scan:
    def __init__(self, source: Source) -> None:
        self._notebook = FindingCollector()
        self._inspector = Inspector(self._notebook)
        hidden, links = _hidden(source.store)
        self._source = replace(source, files=dict(sorted({**hidden, **source.files}.items())))
        for link in links:
            self._notebook.add(link, "", Danger.OUTSIDE, "a link to a folder outside the checkpoint")

    def run(self, url: str) -> ScanReport:
        items = self._items()
        for path in self._source.files:
            self._guarded(path, items.get(path, {}))
        return self._notebook.report(url, len(self._source.files))

    def _guarded(self, path: str, items: Mapping[tuple[int, int], StorageInfo]) -> None:
        """A file that is not to be opened, or that changes meanwhile, is a finding and keeps none from being read."""
        try:
            self._file(path, items)
        except UnsafeError as error:
            self._notebook.add(path, "", Danger.OUTSIDE, error.message)
        except (FormatError, RecursionError) as error:
            self._notebook.add(path, "", Danger.UNREADABLE, str(error))

    def _file(self, path: str, items: Mapping[tuple[int, int], StorageInfo]) -> None:
        whole = self._whole(path)
        for (start, stop), info in items.items():
            self._item(whole, start, stop, info)
        if not items and path.endswith(".distcp"):
            self._search(whole)
        elif not items:
            self._inspector.inspect(whole)

    def _whole(self, path: str) -> Piece:
        size = self._source.size(path)
        expected = UNPICKLED.search(path) is not None
        return Piece(path, "", size, lambda start, stop: self._source.read(path, start, stop), expected)

    # DCP

    def _items(self) -> Mapping[str, Mapping[tuple[int, int], StorageInfo]]:
        """The items of every file, by their range."""
        found: dict[str, dict[tuple[int, int], StorageInfo]] = defaultdict(dict)
        for path in self._source.files:
            if path.endswith(".metadata"):
                for info in self._infos(path):
                    self._place(path, info, found)
        return found

    def _infos(self, path: str) -> list[StorageInfo]:
        """What the metadata in ``path`` says of items; it is itself looked at with all other files."""
        try:
            value = loads(self._source.read_all(path, limit_bytes=MAX_METADATA_BYTES), path=path)
        except (FormatError, UnsafeError) as error:
            self._notebook.add(path, "", Danger.UNREADABLE, f"its items cannot be found: {error.message}")
            return []
        return list(value.storage_data.values()) if isinstance(value, Metadata) else []

    def _place(self, path: str, info: StorageInfo, found: dict[str, dict[tuple[int, int], StorageInfo]]) -> None:
        folder = path.rpartition("/")[0]
        try:
            name = "/".join(filter(None, (folder, checked_name(info.relative_path))))
            if info.offset + info.length > self._source.size(name):
                raise IncompleteError(f"it ends before the item at byte {info.offset:,} does", path=name)
        except UnsafeError as error:
            self._notebook.add(path, "", Danger.OUTSIDE, error.message)
        except IncompleteError as error:
            self._notebook.add(path, "", Danger.UNREADABLE, str(error))
        else:
            found[name][info.offset, info.offset + info.length] = info

    def _item(self, whole: Piece, start: int, stop: int, info: StorageInfo) -> None:
        piece = whole.part(start, stop, f"item at byte {start:,}", is_expected=True)
        if not info.transform_descriptors:
            self._inspector.inspect(piece)
            return
        reason = self._inflated(piece, info.transform_descriptors)
        if reason:
            self._notebook.add(piece.file, piece.place, Danger.UNREADABLE, reason)

    def _inflated(self, piece: Piece, transforms: tuple[str, ...]) -> str | None:
        """Check an item that was stored with ``transforms``; returns the reason if that is not possible."""
        if transforms != (_ZSTD,):
            return f"it is compressed or transformed by {listed(transforms)}"
        data, reason = inflated_zstd(piece.read, piece.size)
        self._inspector.inspect(piece.holding(data, "", is_expected=not reason))
        return reason

    def _search(self, whole: Piece) -> None:
        """A file of items of which no metadata tells: the archives in it, by their end records."""
        num_found = 0
        for start, stop in _archives(whole):
            num_found += 1
            self._inspector.inspect(whole.part(start, stop, f"item at byte {start:,}", is_expected=True))
        if not num_found and whole.size:
            self._inspector.inspect(whole)


def _archives(whole: Piece) -> Iterator[tuple[int, int]]:
    """The ranges of archives that lie one after the other, each from the end of the last to the end of its own end."""
    start, keep = 0, END.size
    for first in range(0, whole.size, SEARCH_BYTES):
        data = whole.read(first, min(first + SEARCH_BYTES + keep, whole.size))
        at = data.find(END_MAGIC)
        while 0 <= at < SEARCH_BYTES and at + END.size <= len(data):
            stop = first + at + END.size
            if END.unpack_from(data, at)[1:3] == (0, 0):
                yield start, stop
                start = stop
            at = data.find(END_MAGIC, at + 4)


def _hidden(store: object) -> tuple[dict[str, int], list[str]]:
    """The files in hidden folders, which a store does not list, and links to folders elsewhere."""
    files: dict[str, int] = {}
    links: list[str] = []
    if not isinstance(store, LocalStore) or store.only is not None:
        return files, links
    root = Path(os.path.realpath(store.root))
    for folder, folders, names in os.walk(root, onerror=_raise):
        for name in folders:
            path = Path(folder, name)
            if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(root):
                links.append(path.relative_to(root).as_posix())
        for path in (Path(folder, name) for name in names):
            if path.is_file():
                files[path.relative_to(root).as_posix()] = path.stat().st_size
    return files, links


def _raise(error: OSError) -> None:
    raise StoreError(f"listing failed: {error.strerror}", path=error.filename) from error

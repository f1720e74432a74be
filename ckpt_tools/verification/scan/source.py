"""Scans every file of a source, and every item of a DCP at the place that its metadata names."""

from __future__ import annotations

import os
import stat
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import TypeVar

from ckpt_tools.core.wording import listed
from ckpt_tools.errors import IncompleteError, MalformedError, SourceNotFoundError
from ckpt_tools.serialization.pickle.dcp_metadata import StorageInfo
from ckpt_tools.stores.local.store import LocalStore
from ckpt_tools.stores.source import Source, checked_name
from ckpt_tools.verification.scan.budget import MAX_INFLATED_BYTES
from ckpt_tools.verification.scan.configuration import item_key
from ckpt_tools.verification.scan.findings import Danger, FindingCollector, NotLookedIntoError, Region, ScanReport
from ckpt_tools.verification.scan.kinds import PACKAGE
from ckpt_tools.verification.scan.other_loaders import (
    RUNS_AS_A_PICKLE,
    RunsElsewhereError,
    check_items,
    runs_as_a_pickle,
)
from ckpt_tools.verification.scan.piece import Piece
from ckpt_tools.verification.scan.prove import HELD_BYTES, REASONS, Prover, danger_of, reason_of

_ZSTD = "stream.zstd/1"

_ITEMS_SUFFIX = ".distcp"
"""The end of the names of files of items, which torch's FileSystemWriter always writes."""

Result = TypeVar("Result")

Items = dict[tuple[int, int], tuple[str, StorageInfo]]
"""The items of one file by their range, each with its key among the values of a checkpoint."""


def scan_source(
    source: Source,
    url: str,
    allowed: Collection[str] = (),
    *,
    allow_configuration: bool = False,
    exclude: Collection[str] = (),
) -> ScanReport:
    """Scan ``source``: prove each file, or note findings. Nothing is executed or opened outside of it.

    The user vouches for the names ``allowed``, and for configuration with ``allow_configuration``. Files whose name or
    path matches a glob of ``exclude`` are not looked at.

    Raises:
        SourceNotFoundError: there is no file. StoreError: a file cannot be read. MemoryBudgetError: there is not enough
        memory for a pickle.
    """
    return _Scan(source, FindingCollector(allowed, allow_configuration=allow_configuration), exclude).run(url)


class _Scan:
    def __init__(self, source: Source, notebook: FindingCollector, exclude: Collection[str]) -> None:
        self._notebook = notebook
        self._exclude = exclude
        self._prover = Prover(self._notebook)
        self._inflation = self._prover.inflation
        self._source = replace(source, files=dict(sorted({**source.store.hidden(), **source.files}.items())))

    def run(self, url: str) -> ScanReport:
        excluded = list(filter(self._is_excluded, self._source.files))
        store = self._source.store
        if isinstance(store, LocalStore) and store.only is None:
            for path, danger, what in _special_entries(Path(os.path.realpath(store.root)), self._source.files):
                if self._is_excluded(path):
                    excluded.append(path)
                else:
                    self._notebook.add(path, "", danger, what)
        if not self._source.files and not self._notebook.findings and not excluded:
            raise SourceNotFoundError("there is nothing to scan", path=url)
        judged = [path for path in self._source.files if not self._is_excluded(path)]
        item_files = {path for path in judged if path.endswith(_ITEMS_SUFFIX)}
        for path in judged:
            if path not in item_files:
                self._guarded(path)
        ranges = self._items()
        for path in item_files:
            self._guarded(path, ranges.get(path, {}))
        return self._notebook.report(url, excluded)

    def _is_excluded(self, path: str) -> bool:
        name = path.rpartition("/")[2]
        return any(fnmatchcase(path, glob) or fnmatchcase(name, glob) for glob in self._exclude)

    def _guarded(self, path: str, items: Items | None = None) -> None:
        """A file that cannot be proved is a finding, and keeps none from being read."""
        before = self._notebook.num_unproved
        try:
            piece = self._whole(path)
            if items is None:
                self._judged(piece, self._prover.prove)
            else:
                self._items_of(piece, items)
        except REASONS as error:
            self._refuse(path, "", error)
        if self._notebook.num_unproved == before:
            self._notebook.proved(self._source.size(path))

    def _judged(self, piece: Piece, prove: Callable[[Piece], Result]) -> Result | None:
        try:
            return prove(piece)
        except REASONS as error:
            if danger_of(error) in (Danger.NOT_UNDERSTOOD, Danger.NOT_LOOKED_INTO) and runs_as_a_pickle(piece):
                what = f"{reason_of(error)}; {RUNS_AS_A_PICKLE}"
                self._notebook.add(piece.file, piece.place, Danger.RUNS, what, region=_region(piece))
            else:
                self._refuse(piece.file, piece.place, error, _region(piece))
            return None

    def _refuse(self, path: str, place: str, error: Exception, region: Region | None = None) -> None:
        self._notebook.add(path, place, danger_of(error), reason_of(error), region=region)

    def _whole(self, path: str) -> Piece:
        size = self._source.size(path)
        return Piece(path, "", size, lambda start, stop: self._source.read(path, start, stop))

    # DCP

    def _items(self) -> dict[str, Items]:
        """The items of every file, as the metadata of its folder states them."""
        found: dict[str, Items] = defaultdict(dict)
        for path, metadata in self._prover.metadata.items():
            for index, info in metadata.storage_data.items():
                self._place(path, item_key(index.fqn), info, found)
        return found

    def _place(self, path: str, key: str, info: StorageInfo, found: dict[str, Items]) -> None:
        """Keep the range of an item in its file, or note why there is none."""
        folder = path.rpartition("/")[0]
        try:
            name = "/".join(filter(None, (folder, checked_name(info.relative_path))))
            if not name.endswith(_ITEMS_SUFFIX):
                raise RunsElsewhereError(f"it places an item in {name}, which is not a file of items (.distcp)")
            if info.offset + info.length > self._source.size(name):
                raise IncompleteError(f"it ends before the item at byte {info.offset:,} does", path=name)
        except REASONS as error:
            self._refuse(path, "", error)
        else:
            known_key, _ = found[name].setdefault((info.offset, info.offset + info.length), (key, info))
            if known_key != key:
                # What two keys share is settings under either.
                found[name][info.offset, info.offset + info.length] = "", info

    def _items_of(self, whole: Piece, items: Items) -> None:
        """Every byte of a file of items is in exactly one of them."""
        if not items:
            raise MalformedError("no metadata names the items of this file")
        at, tails = 0, []
        for (start, stop), (key, info) in sorted(items.items(), key=lambda item: item[0]):
            piece = whole.part(start, stop, f"item at byte {start:,}")
            if start != at:
                raise MalformedError(f"its items overlap, or leave bytes that belong to none, at byte {at:,}")
            directory = self._item(piece.held() if piece.size <= HELD_BYTES else piece, key, info)
            tails += [] if directory is None else [(start + directory, stop)]
            at = stop
        if at != whole.size:
            raise MalformedError(f"the bytes from byte {at:,} on belong to no item")
        check_items(whole, tails)

    def _item(self, piece: Piece, key: str, info: StorageInfo) -> int | None:
        """Start of the directory of an item that is proved, and not compressed."""
        try:
            whole = self._inflated(piece, info)
        except REASONS as error:
            self._refuse(piece.file, piece.place, error, _region(piece))
            return None
        is_inflated = whole is not piece
        prove = partial(self._prover.item, key=key, packed_bytes=piece.size if is_inflated else None)
        start = self._judged(whole, prove)
        return None if is_inflated else start

    def _inflated(self, piece: Piece, info: StorageInfo) -> Piece:
        if not info.transform_descriptors:
            return piece
        if info.transform_descriptors != (_ZSTD,):
            raise NotLookedIntoError(f"it is compressed or transformed by {listed(info.transform_descriptors)}")
        from ckpt_tools.serialization.zstd import ZstandardMissingError, inflated_frame

        limit = self._inflation.limit(piece.size)
        used_bytes = MAX_INFLATED_BYTES  # spent if the item is refused
        try:
            data = inflated_frame(piece.read, piece.size, piece.file, limit_bytes=limit)
            used_bytes = len(data)
        except ZstandardMissingError as error:
            used_bytes = 0
            raise NotLookedIntoError(error.message.removeprefix(f"{piece.file}: ")) from error
        finally:
            self._inflation.spend(used_bytes)
        return piece.holding(data, "")


def _region(piece: Piece) -> Region | None:
    """The bytes of an item; none for a whole file."""
    return piece.region if piece.place else None


_SPECIAL = {
    stat.S_IFIFO: "a named pipe: a loader that opens it may wait, or read what another process writes",
    stat.S_IFSOCK: "a socket",
    stat.S_IFBLK: "a device",
    stat.S_IFCHR: "a device",
}


def _special_entries(root: Path, files: Collection[str]) -> Iterator[tuple[str, Danger, str]]:
    """Entries below ``root`` that are neither a folder nor one of ``files``, and links to folders outside."""
    for folder, folders, names in os.walk(root):
        for path in (Path(folder, name) for name in folders):
            name = path.relative_to(root).as_posix()
            if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(root):
                yield name, Danger.OUTSIDE, "a link to a folder outside the checkpoint"
            elif PACKAGE.search(name):
                yield (
                    name,
                    Danger.COULD_RUN,
                    "a folder with the name of an installed package",
                )
        for path in (Path(folder, name) for name in names):
            if (name := path.relative_to(root).as_posix()) not in files:
                yield name, *_special(path)


def _special(path: Path) -> tuple[Danger, str]:
    try:
        kind = _SPECIAL.get(stat.S_IFMT(path.stat().st_mode), "not a regular file")
    except OSError:
        return Danger.OUTSIDE, "a link to nothing: a loader reads what is put there later"
    return Danger.NOT_LOOKED_INTO, kind

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

from ckpt_tools.errors import IncompleteError, MalformedError, SourceNotFoundError
from ckpt_tools.messages.wording import join_names
from ckpt_tools.serialization.pickle.dcp_metadata import StorageInfo
from ckpt_tools.stores.local.store import LocalStore
from ckpt_tools.stores.source import Source, check_file_name
from ckpt_tools.verification.scan.budget import MAX_INFLATED_BYTES
from ckpt_tools.verification.scan.configuration import parse_item_key
from ckpt_tools.verification.scan.findings import Danger, FindingCollector, NotLookedIntoError, Region, ScanReport
from ckpt_tools.verification.scan.kinds import PACKAGE_NAME
from ckpt_tools.verification.scan.other_loaders import (
    RUNNABLE_PICKLE_REASON,
    RunnableElsewhereError,
    check_item_file,
    is_runnable_pickle,
)
from ckpt_tools.verification.scan.piece import FileView
from ckpt_tools.verification.scan.prove import (
    IN_MEMORY_ITEM_BYTES,
    PROOF_ERRORS,
    Prover,
    classify_error,
    describe_error,
)

_ZSTD_TRANSFORM = "stream.zstd/1"

_ITEM_FILE_SUFFIX = ".distcp"
"""The end of the names of files of items, which torch's FileSystemWriter always writes."""

Result = TypeVar("Result")

ItemsByRange = dict[tuple[int, int], tuple[str, StorageInfo]]
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
    collector = FindingCollector(allowed, allow_configuration=allow_configuration)
    return _SourceScan(source, collector, exclude).scan_files(url)


class _SourceScan:
    def __init__(self, source: Source, collector: FindingCollector, exclude: Collection[str]) -> None:
        self._collector = collector
        self._exclude = exclude
        self._prover = Prover(self._collector)
        self._inflation_budget = self._prover.inflation_budget
        self._source = replace(source, files=dict(sorted({**source.store.list_hidden(), **source.files}.items())))

    def scan_files(self, url: str) -> ScanReport:
        excluded_paths = list(filter(self._is_excluded, self._source.files))
        store = self._source.store
        if isinstance(store, LocalStore) and store.only_file is None:
            for path, danger, what in _find_special_entries(Path(os.path.realpath(store.root)), self._source.files):
                if self._is_excluded(path):
                    excluded_paths.append(path)
                else:
                    self._collector.add_finding(path, "", danger, what)
        if not self._source.files and not self._collector.findings and not excluded_paths:
            raise SourceNotFoundError("there is nothing to scan", path=url)
        scanned_paths = [path for path in self._source.files if not self._is_excluded(path)]
        # Two passes: the items of a file lie where .metadata says, which the first pass proves, and the prover keeps.
        item_files = {path for path in scanned_paths if path.endswith(_ITEM_FILE_SUFFIX)}
        for path in scanned_paths:
            if path not in item_files:
                self._scan_file(path)
        items_by_file = self._collect_items()
        for path in item_files:
            self._scan_file(path, items_by_file.get(path, {}))
        return self._collector.build_report(url, excluded_paths)

    def _is_excluded(self, path: str) -> bool:
        name = path.rpartition("/")[2]
        return any(fnmatchcase(path, glob) or fnmatchcase(name, glob) for glob in self._exclude)

    def _scan_file(self, path: str, items: ItemsByRange | None = None) -> None:
        """Prove a file, or note a finding; the files after it are proved in any case."""
        num_unproved_before = self._collector.num_unproved
        try:
            view = self._view_file(path)
            if items is None:
                self._prove_or_record(view, self._prover.prove_file)
            else:
                self._scan_item_file(view, items)
        except PROOF_ERRORS as error:
            self._record_refusal(path, "", error)
        if self._collector.num_unproved == num_unproved_before:
            self._collector.count_proved_file(self._source.size(path))

    def _prove_or_record(self, view: FileView, prove: Callable[[FileView], Result]) -> Result | None:
        try:
            return prove(view)
        except PROOF_ERRORS as error:
            if classify_error(error) in (Danger.NOT_UNDERSTOOD, Danger.NOT_LOOKED_INTO) and is_runnable_pickle(view):
                what = f"{describe_error(error)}; {RUNNABLE_PICKLE_REASON}"
                self._collector.add_finding(view.file, view.place, Danger.RUNS, what, region=view.region)
            else:
                self._record_refusal(view.file, view.place, error, view.region)
            return None

    def _record_refusal(self, path: str, place: str, error: Exception, region: Region | None = None) -> None:
        self._collector.add_finding(path, place, classify_error(error), describe_error(error), region=region)

    def _view_file(self, path: str) -> FileView:
        size = self._source.size(path)
        return FileView(path, "", size, lambda start, stop: self._source.read(path, start, stop))

    # DCP

    def _collect_items(self) -> dict[str, ItemsByRange]:
        """The items of every file, as the metadata of its folder states them."""
        items_by_file: dict[str, ItemsByRange] = defaultdict(dict)
        for path, metadata in self._prover.metadata_by_file.items():
            for index, info in metadata.storage_data.items():
                self._locate_item(path, parse_item_key(index.fqn), info, items_by_file)
        return items_by_file

    def _locate_item(
        self, metadata_path: str, key: str, info: StorageInfo, items_by_file: dict[str, ItemsByRange]
    ) -> None:
        """Keep the range of an item in its file, or note why there is none."""
        folder = metadata_path.rpartition("/")[0]
        try:
            item_file = "/".join(filter(None, (folder, check_file_name(info.relative_path))))
            if not item_file.endswith(_ITEM_FILE_SUFFIX):
                raise RunnableElsewhereError(
                    f"it places an item in {item_file}, which is not a file of items (.distcp)"
                )
            if info.offset + info.length > self._source.size(item_file):
                raise IncompleteError(f"it ends before the item at byte {info.offset:,} does", path=item_file)
        except PROOF_ERRORS as error:
            self._record_refusal(metadata_path, "", error)
        else:
            known_key, _ = items_by_file[item_file].setdefault((info.offset, info.offset + info.length), (key, info))
            if known_key != key:
                # What two keys share is settings under either.
                items_by_file[item_file][info.offset, info.offset + info.length] = "", info

    def _scan_item_file(self, file_view: FileView, items: ItemsByRange) -> None:
        """Prove a file of items. Every byte must be in exactly one."""
        #     file of items    | item 0 | item 1 | item 2 | ...
        #     each item        | records ... | directory | end record |        the last two are in `directory_ranges`
        # A loader that takes the file for one zip uses the last end record, whose offset it counts from the start of
        # the file. `check_item_file` refuses the file if it finds a directory there that is not an item's.
        if not items:
            raise MalformedError("no metadata names the items of this file")
        expected_start, directory_ranges = 0, []
        for (start, stop), (key, info) in sorted(items.items(), key=lambda item: item[0]):
            item_view = file_view.slice_range(start, stop, f"item at byte {start:,}")
            if start != expected_start:
                raise MalformedError(
                    f"its items overlap, or leave bytes that belong to none, at byte {expected_start:,}"
                )
            directory_start = self._scan_item(
                item_view.load_into_memory() if item_view.size <= IN_MEMORY_ITEM_BYTES else item_view, key, info
            )
            directory_ranges += [] if directory_start is None else [(start + directory_start, stop)]
            expected_start = stop
        if expected_start != file_view.size:
            raise MalformedError(f"the bytes from byte {expected_start:,} on belong to no item")
        check_item_file(file_view, directory_ranges)

    def _scan_item(self, view: FileView, key: str, info: StorageInfo) -> int | None:
        """Start of the directory of an item that is proved, and not compressed."""
        try:
            content = self._inflate_item(view, info)
        except PROOF_ERRORS as error:
            self._record_refusal(view.file, view.place, error, view.region)
            return None
        is_inflated = content is not view
        prove = partial(self._prover.prove_item, key=key, packed_bytes=view.size if is_inflated else None)
        directory_start = self._prove_or_record(content, prove)
        return None if is_inflated else directory_start

    def _inflate_item(self, view: FileView, info: StorageInfo) -> FileView:
        if not info.transform_descriptors:
            return view
        if info.transform_descriptors != (_ZSTD_TRANSFORM,):
            raise NotLookedIntoError(f"it is compressed or transformed by {join_names(info.transform_descriptors)}")
        from ckpt_tools.serialization.zstd import ZstandardMissingError, decompress_frame

        limit_bytes = self._inflation_budget.grant_bytes(view.size)
        used_bytes = MAX_INFLATED_BYTES  # spent if the item is refused
        try:
            data = decompress_frame(view.read, view.size, view.file, limit_bytes=limit_bytes)
            used_bytes = len(data)
        except ZstandardMissingError as error:
            used_bytes = 0
            raise NotLookedIntoError(error.message.removeprefix(f"{view.file}: ")) from error
        finally:
            self._inflation_budget.spend_bytes(used_bytes)
        return view.wrap_data(data, "")


_SPECIAL_FILE_TYPES = {
    stat.S_IFIFO: "a named pipe: a loader that opens it may wait, or read what another process writes",
    stat.S_IFSOCK: "a socket",
    stat.S_IFBLK: "a device",
    stat.S_IFCHR: "a device",
}


def _find_special_entries(root: Path, files: Collection[str]) -> Iterator[tuple[str, Danger, str]]:
    """Entries below ``root`` that are neither a folder nor one of ``files``, and links to folders outside."""
    for folder, folders, names in os.walk(root):
        for path in (Path(folder, name) for name in folders):
            name = path.relative_to(root).as_posix()
            if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(root):
                yield name, Danger.OUTSIDE, "a link to a folder outside the checkpoint"
            elif PACKAGE_NAME.search(name):
                yield name, Danger.COULD_RUN, "a folder with the name of an installed package"
        for path in (Path(folder, name) for name in names):
            if (name := path.relative_to(root).as_posix()) not in files:
                yield name, *_classify_special_file(path)


def _classify_special_file(path: Path) -> tuple[Danger, str]:
    try:
        description = _SPECIAL_FILE_TYPES.get(stat.S_IFMT(path.stat().st_mode), "not a regular file")
    except OSError:
        return Danger.OUTSIDE, "a link to nothing: a loader reads what is put there later"
    return Danger.NOT_LOOKED_INTO, description

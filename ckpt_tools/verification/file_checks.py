"""Checks the files of a checkpoint against lists of other tools: the one that is named, or those with the files."""

from __future__ import annotations

import hashlib
import os
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from ckpt_tools.core.manifest import StateKey
from ckpt_tools.core.notes import Note, Outcome
from ckpt_tools.core.progress import Meter, Progress
from ckpt_tools.core.wording import listed
from ckpt_tools.errors import SourceNotFoundError, UsageError
from ckpt_tools.serialization.strict_json import parse_json
from ckpt_tools.stores.local.store import LocalStore
from ckpt_tools.stores.marker_files import DIGESTS_NAME, SIGNATURE_NAME
from ckpt_tools.stores.source import Source, Store
from ckpt_tools.stores.urls import StorageOptions, is_remote, local_path, open_source
from ckpt_tools.transfer.buffers import page_aligned
from ckpt_tools.transfer.runners.threads import ThreadRunner
from ckpt_tools.verification.digest_files import is_one_file
from ckpt_tools.verification.digests import FORMAT, MAX_LIST_BYTES
from ckpt_tools.verification.file_lists import (
    GIT,
    HUB_FOLDER,
    HUB_SUFFIX,
    INTEGRITY_NAME,
    SUFFIXES,
    SUMS,
    FileList,
    Wanted,
    hub_digest,
    parse_hub_metadata,
    parse_integrity,
    parse_sums,
)
from ckpt_tools.verification.report import FILE, Aspect, Difference, VerifyReport

BLOCK_BYTES = 4 << 20
"""Bytes of a file in memory at a time, for each worker."""

_HEAD_BYTES = 4096
_MAX_METADATA_BYTES = 4096
_OWN = re.compile(rb'\s*\{\s*"format"\s*:\s*"' + FORMAT.encode())
_OF_CKPT_TOOLS = {DIGESTS_NAME, SIGNATURE_NAME}


def named_list(url: str | Path, src: str | Path, storage_options: StorageOptions = None) -> FileList | None:
    """The list of files at ``url``, about those of ``src``; None if it is a list of digests of tensors.

    Names are relative to the folder of the list if that is in ``src``, else to ``src``. If all of them begin with the
    name of ``src``, they are relative to the folder that holds it.

    Raises:
        UsageError: ``url`` is not a file, or the list does not name the one file ``src``. FormatError: it is malformed.
        UnsafeError: a name in it leads out. CkptError: it cannot be read.
    """
    lists = open_source(url, storage_options)
    if len(lists.files) != 1:
        raise UsageError(f"{url} is not a file of digests")
    name = next(iter(lists.files))
    if _OWN.match(lists.read(name, 0, min(lists.size(name), _HEAD_BYTES))):
        return None
    source = open_source(src, storage_options)
    is_one = is_one_file(source)
    root = _absolute(source.store.url)
    folder = root.rpartition("/")[0] if is_one else root
    found = _parsed(lists, name)
    inner = _absolute(lists.store.url).removeprefix(f"{folder}/")
    if inner != _absolute(lists.store.url):
        found = _below(replace(found, name=inner), inner.rpartition("/")[0])
    else:
        found = _without_root(found, PurePosixPath(folder).name, source)
    if not is_one:
        return found
    files = {path: wanted for path, wanted in found.files.items() if path in source.files}
    if not files:
        raise UsageError(f"{found.name} does not name {listed(list(source.files))}")
    return replace(found, files=files)


def _absolute(url: str) -> str:
    """The URL or path without links in its folders; a file may itself be a link."""
    path = local_path(url) if not is_remote(url) else None
    return url.rstrip("/") if path is None else str(path.parent.resolve() / path.name)


def _without_root(found: FileList, root: str, source: Source) -> FileList:
    """Names such as ``step100/model.safetensors`` for the folder ``step100``, unless it has such a folder itself."""
    prefix = f"{root}/"
    if any(path.startswith(prefix) for path in source.files) or not all(
        path.startswith(prefix) for path in found.files
    ):
        return found
    return replace(found, files={path.removeprefix(prefix): wanted for path, wanted in found.files.items()})


def _below(found: FileList, folder: str) -> FileList:
    if not folder:
        return found
    return replace(found, files={f"{folder}/{path}": wanted for path, wanted in found.files.items()}, covers=folder)


def _parsed(source: Source, path: str) -> FileList:
    data = source.read_all(path, limit_bytes=MAX_LIST_BYTES)
    if data.lstrip().startswith(b"{"):
        return FileList(path, parse_integrity(parse_json(data, path), path), is_flat=True)
    return FileList(path, parse_sums(data, path))


def found_lists(source: Source, folders: Collection[str]) -> tuple[list[FileList], list[Note]]:
    """The lists that are with ``source``: in its first folder and in ``folders``, or beside its one file; and notes on
    files without a digest.

    Raises:
        FormatError: one is malformed. UnsafeError: a name in one leads out. CkptError: one cannot be read.
    """
    if is_one_file(source):
        return _beside(source), []
    lists = []
    for path in source.files:
        folder, _, name = path.rpartition("/")
        if folder in {"", *folders} and (name == INTEGRITY_NAME or SUMS.fullmatch(name)):
            lists.append(_below(_parsed(source, path), folder))
    downloaded, notes = _of_download(Source(source.store, {**source.store.hidden(), **source.files}))
    return [*lists, *downloaded, *_of_snapshot(source.store)], notes


def _beside(source: Source) -> list[FileList]:
    """The lists beside one local file that name it."""
    store = source.store
    if not isinstance(store, LocalStore) or store.only is None:
        return []
    around = {each.name for each in store.root.iterdir() if each.is_file()}
    names = [name for name in sorted(around) if SUMS.fullmatch(name) or name in {store.only + s for s in SUFFIXES}]
    metadata = f"{HUB_FOLDER}/{store.only}{HUB_SUFFIX}"
    wanted = [*names, *([metadata] if (store.root / metadata).is_file() else [])]
    folder = Source(LocalStore(store.root), {name: (store.root / name).stat().st_size for name in wanted})
    lists = [*(_parsed(folder, name) for name in names), *_of_download(folder)[0]]
    if store.root.parent.name == "snapshots":
        lists += _of_links({store.only: store.root / store.only})
    chosen = [replace(each, files={n: w for n, w in each.files.items() if n in source.files}) for each in lists]
    return [each for each in chosen if each.files]


def _of_download(source: Source) -> tuple[list[FileList], list[Note]]:
    files, notes = dict[str, Wanted](), []
    for path in source.files:
        name = path.removeprefix(f"{HUB_FOLDER}/").removesuffix(HUB_SUFFIX)
        if path == f"{HUB_FOLDER}/{name}{HUB_SUFFIX}":
            wanted = parse_hub_metadata(source.read_all(path, limit_bytes=_MAX_METADATA_BYTES), path)
            if wanted is None:
                notes.append(Note(Outcome.NOT_COMPARED, name, "the hub's etag of it is not a digest"))
            else:
                files[name] = wanted
    return [FileList(HUB_FOLDER, files)] if files else [], notes


def _of_snapshot(store: Store) -> list[FileList]:
    """The blobs that the links of a snapshot in the hub's cache lead to."""
    if not isinstance(store, LocalStore) or store.only is not None or store.root.absolute().parent.name != "snapshots":
        return []
    found = (Path(folder, name) for folder, _, names in os.walk(store.root) for name in names)
    return _of_links({path.relative_to(store.root).as_posix(): path for path in found})


def _of_links(links: Mapping[str, Path]) -> list[FileList]:
    blobs = {name: hub_digest(path.readlink().name) for name, path in links.items() if path.is_symlink()}
    files = {name: wanted for name, wanted in blobs.items() if wanted is not None}
    return [FileList("the names of the hub's blobs", files)] if files else []


def check_files(
    source: Source, lists: Collection[FileList], *, num_workers: int, on_progress: Progress
) -> VerifyReport:
    """Whether the files of ``source`` have the digests that ``lists`` state. Each is read once.

    Files that a list would name if they had been there are notes.

    Raises:
        UnsafeError: a file is a link that leads out. CkptError: a file cannot be read.
    """
    stated: defaultdict[str, list[tuple[str, Wanted]]] = defaultdict(list)
    for each in lists:
        for path, wanted in each.files.items():
            stated[path].append((each.name, wanted))
    there = {**source.store.hidden(), **source.files}
    jobs = [_Job(path, there[path], tuple(rows)) for path, rows in stated.items() if path in there]
    names = listed([each.name for each in lists])
    wrong = {path: f"it is missing; {names} names it" for path in stated if path not in there}
    meter = Meter(on_progress, sum(job.size for job in jobs))
    for job, digests in ThreadRunner(num_workers).run(_hashing(source.store, meter.add), jobs):
        for name, wanted in job.stated:
            if wanted.digest not in {digests[algorithm] for algorithm in wanted.algorithms}:
                wrong[job.path] = f"its {wanted} is not the one of {name}"
    differences = [Difference(StateKey(path, FILE), Aspect.FILE, wrong[path]) for path in stated if path in wrong]
    more = [path for path in source.files if path not in stated and _is_unlisted(path, lists)]
    notes = tuple(Note(Outcome.NOT_COMPARED, path, f"{names} does not name it") for path in more)
    return VerifyReport(
        {}, 0, tuple(differences), notes=notes, num_files=len(stated), lists=tuple(each.name for each in lists)
    )


def _is_unlisted(path: str, lists: Collection[FileList]) -> bool:
    is_list = path in {each.name for each in lists} or path.rpartition("/")[2] in _OF_CKPT_TOOLS
    return not is_list and any(each.is_about(path) for each in lists)


@dataclass(frozen=True, slots=True)
class _Job:
    """A file with the lists that name it."""

    path: str
    size: int
    stated: tuple[tuple[str, Wanted], ...]


def _hashing(store: Store, on_bytes: Callable[[int], None]) -> Callable[[_Job], tuple[_Job, dict[str, str]]]:
    def digests(job: _Job) -> tuple[_Job, dict[str, str]]:
        algorithms = {algorithm for _, wanted in job.stated for algorithm in wanted.algorithms}
        hashers = {algorithm: _hasher(algorithm, job.size) for algorithm in algorithms}
        for block in _blocks(store, job):
            for hasher in hashers.values():
                hasher.update(block)
            on_bytes(len(block))
        return job, {algorithm: hasher.hexdigest() for algorithm, hasher in hashers.items()}

    return digests


def _blocks(store: Store, job: _Job) -> Iterator[memoryview]:
    """The bytes of a file. A block is overwritten by the next."""
    buffer = page_aligned(min(job.size, BLOCK_BYTES)).data
    for start in range(0, job.size, BLOCK_BYTES):
        block = buffer[: min(BLOCK_BYTES, job.size - start)]
        store.read_into(job.path, start, block)
        yield block


def _hasher(algorithm: str, size: int) -> Any:
    if algorithm == GIT:
        return hashlib.sha1(f"blob {size}\0".encode(), usedforsecurity=False)
    if algorithm == "blake3":
        from blake3 import blake3

        return blake3()
    if algorithm.startswith("blake2b-"):
        return hashlib.blake2b(digest_size=int(algorithm.partition("-")[2]) // 8)
    return hashlib.new(algorithm, usedforsecurity=False)


def check_with_lists(
    src: str | Path,
    against: FileList | None,
    folders: Collection[str],
    *,
    num_workers: int,
    on_progress: Progress,
    storage_options: StorageOptions = None,
) -> VerifyReport | None:
    """``check_files`` of ``src`` with the list ``against``, or else with those found there; None if there are none.

    ``folders`` hold the tensors. Raises as ``found_lists`` and ``check_files``.
    """
    try:
        source = open_source(src, storage_options)
    except SourceNotFoundError:
        return None
    lists, notes = ([against], []) if against is not None else found_lists(source, folders)
    if not lists:
        return VerifyReport({}, 0, (), notes=tuple(notes)) if notes else None
    report = check_files(source, lists, num_workers=num_workers, on_progress=on_progress)
    return replace(report, notes=report.notes + tuple(notes))

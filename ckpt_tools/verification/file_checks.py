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

from ckpt_tools.arguments import is_remote
from ckpt_tools.core.manifest import StateKey
from ckpt_tools.core.notes import Note, Outcome
from ckpt_tools.errors import SourceNotFoundError, UsageError
from ckpt_tools.messages.progress import ProgressCallback, ProgressMeter
from ckpt_tools.messages.wording import join_names
from ckpt_tools.serialization.strict_json import parse_json
from ckpt_tools.stores.local.direct import bypass_cache_if_large
from ckpt_tools.stores.local.store import LocalStore
from ckpt_tools.stores.output_names import DIGESTS_NAME, SIGNATURE_NAME
from ckpt_tools.stores.source import Source, Store
from ckpt_tools.stores.urls import StorageOptions, local_path, open_source
from ckpt_tools.transfer.buffers import allocate_page_aligned
from ckpt_tools.transfer.runners.threads import ThreadRunner
from ckpt_tools.verification.digest_files import is_single_file
from ckpt_tools.verification.digests import LIST_FORMAT, MAX_LIST_BYTES
from ckpt_tools.verification.file_lists import (
    GIT_BLOB_SHA1,
    HUB_FOLDER,
    HUB_SUFFIX,
    INTEGRITY_NAME,
    SUMS_NAME,
    SUMS_SUFFIXES,
    FileList,
    StatedDigest,
    parse_hub_digest,
    parse_hub_metadata,
    parse_integrity,
    parse_sums,
)
from ckpt_tools.verification.report import FILE_SLOT, Aspect, Difference, VerifyReport

BLOCK_BYTES = 4 << 20
"""Bytes of a file in memory at a time, for each worker."""

_HEAD_BYTES = 4096
_MAX_METADATA_BYTES = 4096
_DIGEST_LIST_START = re.compile(rb'\s*\{\s*"format"\s*:\s*"' + LIST_FORMAT.encode())
_OWN_FILE_NAMES = {DIGESTS_NAME, SIGNATURE_NAME}


def read_named_list(url: str | Path, src: str | Path, storage_options: StorageOptions = None) -> FileList | None:
    """The list of files at ``url``, about those of ``src``; None if it is a list of digests of tensors.

    Names are relative to the folder of the list if that is in ``src``, else to ``src``. If all of them begin with the
    name of ``src``, they are relative to the folder that holds it.

    Raises:
        UsageError: ``url`` is not a file, or the list does not name the one file ``src``. FormatError: it is malformed.
        UnsafeError: a name in it leads out. CkptError: it cannot be read.
    """
    list_source = open_source(url, storage_options)
    if len(list_source.files) != 1:
        raise UsageError(f"{url} is not a file of digests")
    list_path = next(iter(list_source.files))
    if _DIGEST_LIST_START.match(list_source.read(list_path, 0, min(list_source.size(list_path), _HEAD_BYTES))):
        return None
    source = open_source(src, storage_options)
    is_single = is_single_file(source)
    root_url = _resolve_url(source.store.url)
    folder = root_url.rpartition("/")[0] if is_single else root_url
    file_list = _parse_list(list_source, list_path)
    relative_path = _resolve_url(list_source.store.url).removeprefix(f"{folder}/")
    if relative_path != _resolve_url(list_source.store.url):
        file_list = _prefix_folder(replace(file_list, name=relative_path), relative_path.rpartition("/")[0])
    else:
        file_list = _strip_root(file_list, PurePosixPath(folder).name, source)
    if not is_single:
        return file_list
    files = {path: wanted for path, wanted in file_list.files.items() if path in source.files}
    if not files:
        raise UsageError(f"{file_list.name} does not name {join_names(list(source.files))}")
    return replace(file_list, files=files)


def _resolve_url(url: str) -> str:
    """The URL or path without links in its folders; a file may itself be a link."""
    path = local_path(url) if not is_remote(url) else None
    return url.rstrip("/") if path is None else str(path.parent.resolve() / path.name)


def _strip_root(file_list: FileList, root_name: str, source: Source) -> FileList:
    """Names such as ``step100/model.safetensors`` for the folder ``step100``, unless it has such a folder itself."""
    prefix = f"{root_name}/"
    if any(path.startswith(prefix) for path in source.files) or not all(
        path.startswith(prefix) for path in file_list.files
    ):
        return file_list
    return replace(file_list, files={path.removeprefix(prefix): wanted for path, wanted in file_list.files.items()})


def _prefix_folder(file_list: FileList, folder: str) -> FileList:
    if not folder:
        return file_list
    return replace(
        file_list, files={f"{folder}/{path}": wanted for path, wanted in file_list.files.items()}, covers=folder
    )


def _parse_list(source: Source, path: str) -> FileList:
    data = source.read_all(path, limit_bytes=MAX_LIST_BYTES)
    if data.lstrip().startswith(b"{"):
        return FileList(path, parse_integrity(parse_json(data, path), path), is_flat=True)
    return FileList(path, parse_sums(data, path))


def find_file_lists(source: Source, folders: Collection[str]) -> tuple[list[FileList], list[Note]]:
    """The lists that are with ``source``: in its first folder and in ``folders``, or beside its one file; and notes on
    files without a digest.

    Raises:
        FormatError: one is malformed. UnsafeError: a name in one leads out. CkptError: one cannot be read.
    """
    if is_single_file(source):
        return _find_sibling_lists(source), []
    file_lists = []
    for path in source.files:
        folder, _, name = path.rpartition("/")
        if folder in {"", *folders} and (name == INTEGRITY_NAME or SUMS_NAME.fullmatch(name)):
            file_lists.append(_prefix_folder(_parse_list(source, path), folder))
    downloaded, notes = _read_download_metadata(Source(source.store, {**source.store.list_hidden(), **source.files}))
    return [*file_lists, *downloaded, *_list_snapshot_blobs(source.store)], notes


def _find_sibling_lists(source: Source) -> list[FileList]:
    """The lists beside one local file that name it."""
    store = source.store
    if not isinstance(store, LocalStore) or store.only_file is None:
        return []
    sibling_names = {each.name for each in store.root.iterdir() if each.is_file()}
    sums_names = [
        name
        for name in sorted(sibling_names)
        if SUMS_NAME.fullmatch(name) or name in {store.only_file + s for s in SUMS_SUFFIXES}
    ]
    metadata_path = f"{HUB_FOLDER}/{store.only_file}{HUB_SUFFIX}"
    list_names = [*sums_names, *([metadata_path] if (store.root / metadata_path).is_file() else [])]
    sibling_source = Source(LocalStore(store.root), {name: (store.root / name).stat().st_size for name in list_names})
    lists = [
        *(_parse_list(sibling_source, name) for name in sums_names),
        *_read_download_metadata(sibling_source)[0],
    ]
    if store.root.parent.name == "snapshots":
        lists += _list_linked_blobs({store.only_file: store.root / store.only_file})
    relevant = [replace(each, files={n: w for n, w in each.files.items() if n in source.files}) for each in lists]
    return [each for each in relevant if each.files]


def _read_download_metadata(source: Source) -> tuple[list[FileList], list[Note]]:
    files, notes = dict[str, StatedDigest](), []
    for path in source.files:
        name = path.removeprefix(f"{HUB_FOLDER}/").removesuffix(HUB_SUFFIX)
        if path == f"{HUB_FOLDER}/{name}{HUB_SUFFIX}":
            stated_digest = parse_hub_metadata(source.read_all(path, limit_bytes=_MAX_METADATA_BYTES), path)
            if stated_digest is None:
                notes.append(Note(Outcome.NOT_COMPARED, name, "the hub's etag of it is not a digest"))
            else:
                files[name] = stated_digest
    return [FileList(HUB_FOLDER, files)] if files else [], notes


def _list_snapshot_blobs(store: Store) -> list[FileList]:
    """The blobs that the links of a snapshot in the hub's cache lead to."""
    if (
        not isinstance(store, LocalStore)
        or store.only_file is not None
        or store.root.absolute().parent.name != "snapshots"
    ):
        return []
    link_paths = (Path(folder, name) for folder, _, names in os.walk(store.root) for name in names)
    return _list_linked_blobs({path.relative_to(store.root).as_posix(): path for path in link_paths})


def _list_linked_blobs(link_paths: Mapping[str, Path]) -> list[FileList]:
    digests = {name: parse_hub_digest(path.readlink().name) for name, path in link_paths.items() if path.is_symlink()}
    files = {name: wanted for name, wanted in digests.items() if wanted is not None}
    return [FileList("the names of the hub's blobs", files)] if files else []


def check_files(
    source: Source, lists: Collection[FileList], *, num_workers: int, on_progress: ProgressCallback
) -> VerifyReport:
    """Whether the files of ``source`` have the digests that ``lists`` state. Each is read once.

    Files that a list would name if they had been there are notes.

    Raises:
        UnsafeError: a file is a link that leads out. CkptError: a file cannot be read.
    """
    stated_digests: defaultdict[str, list[tuple[str, StatedDigest]]] = defaultdict(list)
    for each in lists:
        for path, stated_digest in each.files.items():
            stated_digests[path].append((each.name, stated_digest))
    sizes = {**source.store.list_hidden(), **source.files}
    jobs = [_HashJob(path, sizes[path], tuple(rows)) for path, rows in stated_digests.items() if path in sizes]
    list_names = join_names([each.name for each in lists])
    problems = {path: f"it is missing; {list_names} names it" for path in stated_digests if path not in sizes}
    num_bytes = sum(job.size for job in jobs)
    bypass_cache_if_large(source.store, num_bytes)
    meter = ProgressMeter(on_progress, num_bytes)
    for job, computed_digests in ThreadRunner(num_workers).run(_make_file_hasher(source.store, meter.add_bytes), jobs):
        for name, stated_digest in job.stated_digests:
            if stated_digest.digest not in {computed_digests[algorithm] for algorithm in stated_digest.algorithms}:
                problems[job.path] = f"its {stated_digest} is not the one of {name}"
    differences = [
        Difference(StateKey(path, FILE_SLOT), Aspect.FILE, problems[path])
        for path in stated_digests
        if path in problems
    ]
    known_paths = {*stated_digests, *(each.name for each in lists)}
    unlisted_paths = [
        path
        for path in source.files
        if path not in known_paths
        and path.rpartition("/")[2] not in _OWN_FILE_NAMES
        and any(each.does_cover(path) for each in lists)
    ]
    notes = tuple(Note(Outcome.NOT_COMPARED, path, f"{list_names} does not name it") for path in unlisted_paths)
    return VerifyReport(
        {}, 0, tuple(differences), notes=notes, num_files=len(stated_digests), lists=tuple(each.name for each in lists)
    )


@dataclass(frozen=True, slots=True)
class _HashJob:
    """A file, and its digests in the lists that name it, each with the name of the list."""

    path: str
    size: int
    stated_digests: tuple[tuple[str, StatedDigest], ...]


def _make_file_hasher(
    store: Store, on_bytes: Callable[[int], None]
) -> Callable[[_HashJob], tuple[_HashJob, dict[str, str]]]:
    def hash_file(job: _HashJob) -> tuple[_HashJob, dict[str, str]]:
        algorithms = {algorithm for _, wanted in job.stated_digests for algorithm in wanted.algorithms}
        hashers_by_algorithm = {algorithm: _make_hasher(algorithm, job.size) for algorithm in algorithms}
        for block in _read_blocks(store, job):
            for hasher in hashers_by_algorithm.values():
                hasher.update(block)
            on_bytes(len(block))
        return job, {algorithm: hasher.hexdigest() for algorithm, hasher in hashers_by_algorithm.items()}

    return hash_file


def _read_blocks(store: Store, job: _HashJob) -> Iterator[memoryview]:
    """The bytes of a file. A block is overwritten by the next."""
    buffer = allocate_page_aligned(min(job.size, BLOCK_BYTES)).data
    for start in range(0, job.size, BLOCK_BYTES):
        block = buffer[: min(BLOCK_BYTES, job.size - start)]
        store.read_into(job.path, start, block)
        yield block


def _make_hasher(algorithm: str, size: int) -> Any:
    if algorithm == GIT_BLOB_SHA1:
        return hashlib.sha1(f"blob {size}\0".encode(), usedforsecurity=False)
    if algorithm == "blake3":
        from blake3 import blake3

        return blake3()
    if algorithm.startswith("blake2b-"):
        return hashlib.blake2b(digest_size=int(algorithm.partition("-")[2]) // 8)
    return hashlib.new(algorithm, usedforsecurity=False)


def check_against_lists(
    src: str | Path,
    against: FileList | None,
    folders: Collection[str],
    *,
    num_workers: int,
    on_progress: ProgressCallback,
    storage_options: StorageOptions = None,
) -> VerifyReport | None:
    """``check_files`` of ``src`` with the list ``against``, or else with those found there; None if there are none.

    ``folders`` hold the tensors. Raises as ``find_file_lists`` and ``check_files``.
    """
    try:
        source = open_source(src, storage_options)
    except SourceNotFoundError:
        return None
    lists, notes = ([against], []) if against is not None else find_file_lists(source, folders)
    if not lists:
        return VerifyReport({}, 0, (), notes=tuple(notes)) if notes else None
    report = check_files(source, lists, num_workers=num_workers, on_progress=on_progress)
    return replace(report, notes=report.notes + tuple(notes))

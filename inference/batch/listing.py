"""Files named by ``--input``: one file, a pattern, or a folder; local or in a store.

Only names are held, and one digest of all sizes and times, so that a later run recognises the same input.
"""

# Names are text from end to end: a ``Path`` for each of a million files would be most of the memory.
# ruff: noqa: PTH112, PTH116, PTH118, PTH207

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3

from ckpt_tools.errors import SourceNotFoundError, StoreError, UsageError

from ..common.urls import find_file_system, translate_store_errors

IMAGE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp"})
TABLE_KINDS = {".parquet": "Parquet", ".jsonl": "JSON Lines", ".ndjson": "JSON Lines", ".csv": "CSV", ".txt": "text"}

FileEntry = tuple[str, str]  # a name below the base, and its size and time as text


@dataclass(frozen=True, slots=True)
class FileListing:
    """Files below ``base``, sorted by name, all of one kind: "image", or a value of ``TABLE_KINDS``."""

    base: str
    names: list[str]
    kind: str
    digest: str

    def make_url(self, name: str) -> str:
        return f"{self.base}/{name}"


def list_files(url: str) -> FileListing:
    """List ``url``. Raises SourceNotFoundError if nothing fits. UsageError for files of several kinds. StoreError if
    the store cannot be read."""
    base, entries = _list_remote(url) if "://" in url else _list_local(url)
    kept, kind = _choose_kind(url, entries)
    return FileListing(base, sorted(name for name, _ in kept), kind, _digest_entries(kept))


def _digest_entries(entries: Iterable[FileEntry]) -> str:
    """Order-independent digest: the sum of the digests of all entries."""
    digests = (blake3(repr(entry).encode("utf-8", "surrogateescape")).digest() for entry in entries)
    return f"blake3:{sum(map(int.from_bytes, digests)) % 2**256:064x}"


def _choose_kind(url: str, entries: Iterable[FileEntry]) -> tuple[list[FileEntry], str]:
    """Keep the files of one kind. If there are images, other files are ignored."""
    by_kind: dict[str, list[FileEntry]] = {}
    for entry in entries:
        suffix = Path(entry[0]).suffix.lower()
        kind = "image" if suffix in IMAGE_SUFFIXES else TABLE_KINDS.get(suffix)
        if kind is not None:
            by_kind.setdefault(kind, []).append(entry)
    if "image" in by_kind:
        return by_kind["image"], "image"
    if len(by_kind) > 1:
        raise UsageError(f"{url} holds files of several kinds ({', '.join(sorted(by_kind))}); choose by a pattern")
    if not by_kind:
        known = ", ".join(sorted(IMAGE_SUFFIXES | TABLE_KINDS.keys()))
        raise SourceNotFoundError(f"{url} has no file that can be predicted; their names end in {known}")
    [(kind, kept)] = by_kind.items()
    return kept, kind


def _list_local(url: str) -> tuple[str, Iterator[FileEntry]]:
    if os.path.isdir(url):
        return url.rstrip("/") or "/", _stat_entries(url.rstrip("/") or "/", _walk_files(url, ()))
    if os.path.lexists(url):
        folder, name = os.path.split(url)
        return folder or ".", _stat_entries(folder or ".", [os.path.join(folder or ".", name)])
    if not glob.has_magic(url):
        raise SourceNotFoundError(f"there is no file or folder {url}")
    base = _find_fixed_folder(url)
    return base, _stat_entries(base, (path for path in glob.iglob(url, recursive=True) if not os.path.isdir(path)))


def _find_fixed_folder(pattern: str) -> str:
    """The folder before the first part with a wildcard."""
    parts = pattern.split("/")
    first = next(number for number, part in enumerate(parts) if glob.has_magic(part))
    return "/".join(parts[:first]) or ("/" if pattern.startswith("/") else ".")


def _walk_files(folder: str, above: tuple[tuple[int, int], ...]) -> Iterator[str]:
    """Files at any depth, following links to folders but not into a folder that contains the link."""
    status = os.stat(folder)
    folder_id = (status.st_dev, status.st_ino)
    if folder_id in above:
        return
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir():
                yield from _walk_files(entry.path, (*above, folder_id))
            else:
                yield entry.path


def _stat_entries(base: str, paths: Iterable[str]) -> Iterator[FileEntry]:
    for path in paths:
        try:
            status = os.stat(path)
            stamp = f"{status.st_size} {status.st_mtime_ns}"
        except OSError:
            # A link to nowhere: it becomes a row with its error.
            stamp = "none"
        yield os.path.relpath(path, base) if not path.startswith(f"{base}/") else path[len(base) + 1 :], stamp


def _list_remote(url: str) -> tuple[str, Iterator[FileEntry]]:
    fs, path = find_file_system(url)
    scheme = url.partition("://")[0]
    try:
        with translate_store_errors(url):
            base, infos = _find_remote(fs, path)
    except OSError as error:
        raise StoreError(f"{url} cannot be listed ({error})") from error
    if not infos:
        raise SourceNotFoundError(f"there is nothing at {url}")
    changes = ("ETag", "etag", "mtime", "LastModified", "created")
    stamps = {
        name.removeprefix(f"{base}/"): f"{info.get('size')} {next((info[key] for key in changes if key in info), '')}"
        for name, info in infos.items()
    }
    return f"{scheme}://{base}", iter(stamps.items())


def _find_remote(fs: Any, path: str) -> tuple[str, dict[str, Any]]:
    if glob.has_magic(path):
        infos = fs.glob(path, detail=True)
        return _find_fixed_folder(path), {name: info for name, info in infos.items() if info["type"] == "file"}
    if fs.isfile(path):
        return path.rpartition("/")[0], {path: fs.info(path)}
    return path, fs.find(path, detail=True)

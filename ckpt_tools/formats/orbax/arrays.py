"""Arrays that tensorstore decodes, as files of a store: each has the elements of one array, row-major.

A plan uses ranges of files. The arrays of Orbax lie in compressed chunks, in a database of its own, so that no range of
a stored file is a tensor. ``ArrayStore`` stands in front of the store and has one more file for each array; a read of
it decodes the chunks that hold those elements. Decoded chunks stay in a cache of a fixed size.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any
from urllib.parse import unquote

import numpy as np

from ckpt_tools.core.boxes import Shape, interval_to_boxes
from ckpt_tools.core.dtypes import DType, from_torch
from ckpt_tools.core.values import are_naturals
from ckpt_tools.errors import IncompleteError, MalformedError, UnsupportedError, UsageError
from ckpt_tools.formats.orbax.metadata import Tree
from ckpt_tools.formats.orbax.names import MANIFEST
from ckpt_tools.stores.source import Store
from ckpt_tools.stores.wrappers import GeneratedFilesStore

FILE_PREFIX = "array:"
"""Prefix of the names of these files, which no store has."""

MIN_CACHE_BYTES = 64 << 20
"""Size of the cache of decoded chunks. A larger chunk is kept too, so that not each task of a tensor decodes it."""

CHUNKS_AT_ONCE = 2
"""Chunks in work beside the cache, each as it is stored and as it is decoded."""

LIBRARY_BYTES = 64 << 20
"""What loading tensorstore takes."""


@dataclass(frozen=True, slots=True)
class Array:
    """One array with its specification for tensorstore. ``chunk_bytes`` is the size of the largest decoded chunk."""

    spec: Mapping[str, Any] = field(repr=False)
    shape: Shape
    dtype: DType
    chunk_bytes: int

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.item_bytes


@dataclass(frozen=True, slots=True)
class Drivers:
    """Opens the arrays of one tree in the local folder ``root``; what ``context`` holds open is shared by all."""

    root: str
    tree: Tree
    context: Any = field(default_factory=lambda: tensorstore().Context(), repr=False)

    def spec(self, name: str) -> dict[str, Any]:
        """The specification of the array ``name`` for tensorstore. Only names in it are from the checkpoint."""
        folder, path = f"{self.root}/{self.tree.prefix}", f"{name}/"
        inside: dict[str, Any] = {"driver": "file", "path": folder + path}
        if self.tree.uses_ocdbt:
            inside = {"driver": "ocdbt", "base": {"driver": "file", "path": folder}, "path": path}
        return {"driver": "zarr3" if self.tree.uses_zarr3 else "zarr", "kvstore": inside}

    def array(self, name: str) -> Array:
        """The array ``name``, all of whose chunks are there. Raises FormatError."""
        library = tensorstore()
        spec = self.spec(name)
        with _refusing(self._file, name):
            opened = library.open(spec, open=True, read=True, context=self.context).result()
            keys = set(library.KvStore.open(spec["kvstore"], context=self.context).result().list().result())
            chunk, kind = tuple(opened.chunk_layout.write_chunk.shape or ()), opened.dtype.name
            fields = opened.spec().to_json().get("metadata", {})
        shape, dtype = tuple(opened.shape), from_torch(kind)
        if dtype is None:
            raise UnsupportedError(f"arrays of {kind} are not supported", path=self._file, key=name)
        if not are_naturals(list(shape)) or 0 in chunk:
            raise MalformedError(f"its shape {list(shape)} is not that of a tensor", path=self._file, key=name)
        missing = next((key for key in self._chunk_keys(shape, chunk, fields) if key not in keys), None)
        # A database loses no entry: where older versions left chunks of zeros out, it has none for them.
        has_all = self.tree.has_all_chunks
        if missing is not None and (has_all or not self.tree.uses_ocdbt):
            why = "" if has_all else "; it may be lost, or left out by an old version because it is all 0"
            raise IncompleteError(f"its chunk {missing.decode()} is missing{why}", path=self._file, key=name)
        return Array(spec, shape, dtype, prod(chunk) * dtype.item_bytes)

    def check_database(self, files: Mapping[str, int]) -> None:
        """Raises FormatError where a file of ``files`` that the database refers to is missing or too short."""
        library = tensorstore()
        with _refusing(self._file, ""):
            base = library.KvStore.open({"driver": "file", "path": f"{self.root}/{self.tree.prefix}"}).result()
            newest = library.ocdbt.dump(base, context=self.context).result()["versions"][-1:]
            todo = [each["root"]["location"] for each in newest if "location" in each.get("root", {})]
            seen = set(todo)
            while todo:
                node = todo.pop()
                self._check_part(node, files)
                for entry in library.ocdbt.dump(base, node, context=self.context).result()["entries"]:
                    if "indirect_value" in entry:
                        self._check_part(entry["indirect_value"], files)
                    elif "location" in entry and entry["location"] not in seen:
                        seen.add(entry["location"])
                        todo.append(entry["location"])

    def _check_part(self, part: str, files: Mapping[str, int]) -> None:
        """A part of a data file, as ``KIND:FOLDER:PATH:OFFSET:LENGTH``."""
        _, folder, path, offset, length = part.split(":")
        file, stop = self.tree.prefix + unquote(folder) + unquote(path), int(offset) + int(length)
        if file not in files:
            raise IncompleteError("this data file of the database is missing", path=file)
        if files[file] < stop:
            raise IncompleteError(f"it ends at byte {files[file]:,}, before byte {stop:,}", path=file)

    @property
    def _file(self) -> str | None:
        return self.tree.prefix + MANIFEST if self.tree.uses_ocdbt else self.tree.folder or None

    def _chunk_keys(self, shape: Shape, chunk: Shape, fields: Mapping[str, Any]) -> Iterator[bytes]:
        """The name of each chunk. Zarr takes a missing one for zeros."""
        separator, prefix = str(fields.get("dimension_separator", ".")), []
        if self.tree.uses_zarr3:
            encoding = fields.get("chunk_key_encoding") or {}
            separator, prefix = str((encoding.get("configuration") or {}).get("separator", "/")), ["c"]
        grid = tuple(-(-extent // step) for extent, step in zip(shape, chunk, strict=True))
        for index in np.ndindex(*grid):
            yield (separator.join([*prefix, *map(str, index)]) or "0").encode()


def tensorstore() -> Any:
    """The library. Raises UsageError if it is not installed."""
    try:
        import tensorstore as library
    except ImportError as error:
        raise UsageError(
            f"Orbax checkpoints need tensorstore; install it with: pip install 'ckpt-tools[orbax]' ({error})"
        ) from error
    return library


@contextmanager
def _refusing(path: str | None, key: str) -> Iterator[None]:
    """Turn errors of tensorstore, which are ValueErrors that begin with a code, into errors of ckpt-tools."""
    try:
        yield
    except (ValueError, OverflowError, TypeError, OSError) as error:
        reason = str(error).partition(" [tensorstore_spec=")[0].partition(" [source locations=")[0]
        form = IncompleteError if reason.startswith("NOT_FOUND") else MalformedError
        what = "array" if key else "database"
        raise form(f"tensorstore cannot read the {what}: {reason[:300]}", path=path, key=key) from error


def cache_bytes(arrays: Mapping[str, Array]) -> int:
    """The size of the cache for ``arrays``."""
    largest = max((each.chunk_bytes for each in arrays.values()), default=0)
    return max(MIN_CACHE_BYTES, 2 * largest)


def decoding_bytes(arrays: Mapping[str, Array]) -> int:
    """The most memory that reading ``arrays`` takes: the cache, chunks in work, and the library."""
    largest = max((each.chunk_bytes for each in arrays.values()), default=0)
    return cache_bytes(arrays) + 2 * CHUNKS_AT_ONCE * largest + LIBRARY_BYTES


@dataclass(slots=True)
class ArrayStore(GeneratedFilesStore):
    """``store`` with a file for each of ``arrays``, which are by the names of those files. Safe to share between
    threads. ``version_file`` is written again whenever an array is."""

    store: Store
    arrays: Mapping[str, Array] = field(repr=False)
    version_file: str
    _opened: dict[str, Any] = field(default_factory=dict, init=False, repr=False)
    _context: Any = field(default=None, init=False, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)

    @property
    def generated_files(self) -> Mapping[str, Array]:
        return self.arrays

    def _generate_elements(self, path: str, first: int, last: int, buffer: memoryview) -> None:
        array, done = self.arrays[path], 0
        with _refusing(path, path.removeprefix(FILE_PREFIX)):
            opened = self._open(path, array)
            for box in interval_to_boxes(first, last, array.shape):
                part = opened[tuple(map(slice, box.start, box.stop))].read(order="C").result()
                data: Any = np.ascontiguousarray(part).reshape(-1).view(np.uint8)
                buffer[done : done + len(data)] = memoryview(data)
                done += len(data)

    def _open(self, path: str, array: Array) -> Any:
        with self._lock:
            if path not in self._opened:
                library = tensorstore()
                if self._context is None:
                    limit = {"total_bytes_limit": cache_bytes(self.arrays)}
                    copies = {"limit": CHUNKS_AT_ONCE}
                    self._context = library.Context({"cache_pool": limit, "data_copy_concurrency": copies})
                future = library.open(
                    array.spec,
                    open=True,
                    read=True,
                    recheck_cached_data=False,
                    recheck_cached_metadata=False,
                    context=self._context,
                )
                self._opened[path] = future.result()
            return self._opened[path]

    def version(self, path: str) -> str:
        return self.store.version(self.version_file if path in self.arrays else path)

    def __reduce__(self) -> tuple[object, ...]:
        return ArrayStore, (self.store, self.arrays, self.version_file)

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
from ckpt_tools.formats.orbax.metadata import OrbaxTree
from ckpt_tools.formats.orbax.names import OCDBT_MANIFEST
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
class OrbaxArray:
    """One array with its specification for tensorstore. ``chunk_bytes`` is the size of the largest decoded chunk."""

    spec: Mapping[str, Any] = field(repr=False)
    shape: Shape
    dtype: DType
    chunk_bytes: int

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.item_bytes


@dataclass(frozen=True, slots=True)
class ArrayOpener:
    """Opens the arrays of one tree in the local folder ``root``; what ``context`` holds open is shared by all."""

    root: str
    tree: OrbaxTree
    context: Any = field(default_factory=lambda: import_tensorstore().Context(), repr=False)

    def build_spec(self, name: str) -> dict[str, Any]:
        """The specification of the array ``name`` for tensorstore. Only names in it are from the checkpoint."""
        folder, path = f"{self.root}/{self.tree.prefix}", f"{name}/"
        kvstore: dict[str, Any] = {"driver": "file", "path": folder + path}
        if self.tree.uses_ocdbt:
            kvstore = {"driver": "ocdbt", "base": {"driver": "file", "path": folder}, "path": path}
        return {"driver": "zarr3" if self.tree.uses_zarr3 else "zarr", "kvstore": kvstore}

    def open_array(self, name: str) -> OrbaxArray:
        """The array ``name``. Raises FormatError if it lacks a chunk, or cannot be read."""
        library = import_tensorstore()
        spec = self.build_spec(name)
        with _translate_errors(self._metadata_file, name):
            opened = library.open(spec, open=True, read=True, context=self.context).result()
            stored_keys = set(library.KvStore.open(spec["kvstore"], context=self.context).result().list().result())
            chunk_shape, dtype_name = tuple(opened.chunk_layout.write_chunk.shape or ()), opened.dtype.name
            zarr_metadata = opened.spec().to_json().get("metadata", {})
        shape, dtype = tuple(opened.shape), from_torch(dtype_name)
        if dtype is None:
            raise UnsupportedError(f"arrays of {dtype_name} are not supported", path=self._metadata_file, key=name)
        if not are_naturals(list(shape)) or 0 in chunk_shape:
            raise MalformedError(f"its shape {list(shape)} is not that of a tensor", path=self._metadata_file, key=name)
        missing_key = next(
            (key for key in self._iter_chunk_keys(shape, chunk_shape, zarr_metadata) if key not in stored_keys), None
        )
        # A database loses no entry: where older versions left chunks of zeros out, it has none for them.
        has_all = self.tree.has_all_chunks
        if missing_key is not None and (has_all or not self.tree.uses_ocdbt):
            why = "" if has_all else "; it may be lost, or left out by an old version because it is all 0"
            raise IncompleteError(
                f"its chunk {missing_key.decode()} is missing{why}", path=self._metadata_file, key=name
            )
        return OrbaxArray(spec, shape, dtype, prod(chunk_shape) * dtype.item_bytes)

    def check_database(self, files: Mapping[str, int]) -> None:
        """Raises FormatError where a file of ``files`` that the database refers to is missing or too short."""
        # OCDBT is a B+tree in data files: newest version -> root node -> nodes -> values. All nodes are walked, because
        # a lost file would otherwise be found only when a chunk in it is read.
        library = import_tensorstore()
        with _translate_errors(self._metadata_file, ""):
            base_store = library.KvStore.open({"driver": "file", "path": f"{self.root}/{self.tree.prefix}"}).result()
            newest_versions = library.ocdbt.dump(base_store, context=self.context).result()["versions"][-1:]
            pending_nodes = [each["root"]["location"] for each in newest_versions if "location" in each.get("root", {})]
            seen_nodes = set(pending_nodes)
            while pending_nodes:
                node = pending_nodes.pop()
                self._check_data_file(node, files)
                for entry in library.ocdbt.dump(base_store, node, context=self.context).result()["entries"]:
                    if "indirect_value" in entry:
                        self._check_data_file(entry["indirect_value"], files)
                    elif "location" in entry and entry["location"] not in seen_nodes:
                        seen_nodes.add(entry["location"])
                        pending_nodes.append(entry["location"])

    def _check_data_file(self, location: str, files: Mapping[str, int]) -> None:
        """A part of a data file, as ``KIND:FOLDER:PATH:OFFSET:LENGTH``."""
        _, folder, path, offset, length = location.split(":")
        file, stop = self.tree.prefix + unquote(folder) + unquote(path), int(offset) + int(length)
        if file not in files:
            raise IncompleteError("this data file of the database is missing", path=file)
        if files[file] < stop:
            raise IncompleteError(f"it ends at byte {files[file]:,}, before byte {stop:,}", path=file)

    @property
    def _metadata_file(self) -> str | None:
        return self.tree.prefix + OCDBT_MANIFEST if self.tree.uses_ocdbt else self.tree.folder or None

    def _iter_chunk_keys(self, shape: Shape, chunk_shape: Shape, zarr_metadata: Mapping[str, Any]) -> Iterator[bytes]:
        """The name of each chunk. Zarr takes a missing one for zeros."""
        separator, prefix = str(zarr_metadata.get("dimension_separator", ".")), []
        if self.tree.uses_zarr3:
            encoding = zarr_metadata.get("chunk_key_encoding") or {}
            separator, prefix = str((encoding.get("configuration") or {}).get("separator", "/")), ["c"]
        grid = tuple(-(-extent // step) for extent, step in zip(shape, chunk_shape, strict=True))
        for index in np.ndindex(*grid):
            yield (separator.join([*prefix, *map(str, index)]) or "0").encode()


def import_tensorstore() -> Any:
    """The library. Raises UsageError if it is not installed."""
    try:
        import tensorstore as library
    except ImportError as error:
        raise UsageError(
            f"Orbax checkpoints need tensorstore; install it with: pip install 'ckpt-tools[orbax]' ({error})"
        ) from error
    return library


@contextmanager
def _translate_errors(path: str | None, key: str) -> Iterator[None]:
    """Turn errors of tensorstore, which are ValueErrors that begin with a code, into errors of ckpt-tools."""
    try:
        yield
    except (ValueError, OverflowError, TypeError, OSError) as error:
        reason = str(error).partition(" [tensorstore_spec=")[0].partition(" [source locations=")[0]
        error_class = IncompleteError if reason.startswith("NOT_FOUND") else MalformedError
        unread_object = "array" if key else "database"
        raise error_class(f"tensorstore cannot read the {unread_object}: {reason[:300]}", path=path, key=key) from error


def choose_cache_bytes(arrays: Mapping[str, OrbaxArray]) -> int:
    """The size of the cache for ``arrays``."""
    largest_chunk = max((each.chunk_bytes for each in arrays.values()), default=0)
    return max(MIN_CACHE_BYTES, 2 * largest_chunk)


def estimate_decoding_bytes(arrays: Mapping[str, OrbaxArray]) -> int:
    """The most memory that reading ``arrays`` takes: the cache, chunks in work, and the library."""
    largest_chunk = max((each.chunk_bytes for each in arrays.values()), default=0)
    return choose_cache_bytes(arrays) + 2 * CHUNKS_AT_ONCE * largest_chunk + LIBRARY_BYTES


@dataclass(slots=True)
class ArrayStore(GeneratedFilesStore):
    """``store`` with a file for each of ``arrays``, which are by the names of those files. Safe to share between
    threads. ``version_file`` is written again whenever an array is."""

    store: Store
    arrays: Mapping[str, OrbaxArray] = field(repr=False)
    version_file: str
    _array_cache: dict[str, Any] = field(default_factory=dict, init=False, repr=False)
    _context: Any = field(default=None, init=False, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)

    @property
    def generated_files(self) -> Mapping[str, OrbaxArray]:
        return self.arrays

    def _generate_elements(self, path: str, first: int, last: int, buffer: memoryview) -> None:
        array, done = self.arrays[path], 0
        with _translate_errors(path, path.removeprefix(FILE_PREFIX)):
            opened = self._open_array(path, array)
            for box in interval_to_boxes(first, last, array.shape):
                part = opened[tuple(map(slice, box.start, box.stop))].read(order="C").result()
                data: Any = np.ascontiguousarray(part).reshape(-1).view(np.uint8)
                buffer[done : done + len(data)] = memoryview(data)
                done += len(data)

    def _open_array(self, path: str, array: OrbaxArray) -> Any:
        with self._lock:
            if path not in self._array_cache:
                library = import_tensorstore()
                if self._context is None:
                    cache_limit = {"total_bytes_limit": choose_cache_bytes(self.arrays)}
                    copy_limit = {"limit": CHUNKS_AT_ONCE}
                    self._context = library.Context({"cache_pool": cache_limit, "data_copy_concurrency": copy_limit})
                future = library.open(
                    array.spec,
                    open=True,
                    read=True,
                    recheck_cached_data=False,
                    recheck_cached_metadata=False,
                    context=self._context,
                )
                self._array_cache[path] = future.result()
            return self._array_cache[path]

    def version(self, path: str) -> str:
        return self.store.version(self.version_file if path in self.arrays else path)

    def __reduce__(self) -> tuple[object, ...]:
        return ArrayStore, (self.store, self.arrays, self.version_file)

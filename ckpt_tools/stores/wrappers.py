"""Stores in front of others: with files of other stores, with literals, with files made as they are read, or a folder
of a store by itself."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from ckpt_tools.core.dtypes import DType
from ckpt_tools.stores.memory import MemoryStore
from ckpt_tools.stores.source import Source, Store, StoreWrapper, check_file_name, check_range


@dataclass(frozen=True, slots=True)
class RedirectingStore(StoreWrapper):
    """``store`` with a few files of other stores: ``redirected_files`` maps a name to the store and the file's name in
    it."""

    store: Store
    redirected_files: Mapping[str, tuple[Store, str]]

    def list(self) -> Mapping[str, int]:
        sizes = {name: store.size(path) for name, (store, path) in self.redirected_files.items()}
        return {**self.store.list(), **sizes}

    def bypass_page_cache(self) -> None:
        for store in (self.store, *(store for store, _ in self.redirected_files.values())):
            store.bypass_page_cache()

    def _resolve_file(self, path: str) -> tuple[Store, str]:
        return self.redirected_files.get(path, (self.store, path))


def overlay_literals(store: Store, literals: Mapping[str, bytes]) -> RedirectingStore:
    """``store`` with a file for each of ``literals``: values that a checkpoint keeps as plain numbers, as bytes."""
    memory = MemoryStore({name: bytearray(data) for name, data in literals.items()})
    return RedirectingStore(store, {name: (memory, name) for name in literals})


class GeneratedFile(Protocol):
    """The elements of a tensor, row-major, as a file that is made as it is read."""

    @property
    def dtype(self) -> DType: ...

    @property
    def num_bytes(self) -> int: ...


class GeneratedFilesStore(StoreWrapper):
    """``store`` with one more file for each of ``generated_files``, whose elements are decoded or computed as they are
    read."""

    __slots__ = ()

    @property
    @abstractmethod
    def generated_files(self) -> Mapping[str, GeneratedFile]:
        """The files by name."""

    @abstractmethod
    def _generate_elements(self, path: str, first: int, last: int, buffer: memoryview) -> None:
        """Elements ``[first, last)`` of a file of ``generated_files`` into ``buffer``, which has exactly their room."""

    @property
    def generated_sizes(self) -> Mapping[str, int]:
        return {name: each.num_bytes for name, each in self.generated_files.items()}

    def list(self) -> Mapping[str, int]:
        return {**self.store.list(), **self.generated_sizes}

    def read_into(self, path: str, start: int, buffer: memoryview) -> None:
        generated_file = self.generated_files.get(path)
        if generated_file is None:
            self.store.read_into(path, start, buffer)
            return
        stop, item = start + len(buffer), generated_file.dtype.item_bytes
        check_range(path, stop, generated_file.num_bytes)
        first, last = start // item, -(-stop // item)
        if start == first * item and stop == last * item:
            self._generate_elements(path, first, last, buffer)
        else:
            whole_elements = bytearray((last - first) * item)
            self._generate_elements(path, first, last, memoryview(whole_elements))
            buffer[:] = memoryview(whole_elements)[start - first * item :][: len(buffer)]

    def _resolve_file(self, path: str) -> tuple[Store, str]:
        """A file of ``generated_files`` has no version, no time and no service, and is not read ahead."""
        return MemoryStore() if path in self.generated_files else self.store, path


@dataclass(frozen=True, slots=True)
class SubfolderStore(StoreWrapper):
    """Files below ``folder`` of ``store``, which is not listed again."""

    store: Store
    folder: str

    @property
    def url(self) -> str:
        return f"{self.store.url}/{self.folder}"

    def _resolve_file(self, path: str) -> tuple[Store, str]:
        return self.store, f"{self.folder}/{check_file_name(path)}"

    def list(self) -> Mapping[str, int]:
        return self._strip_folder(self.store.list())

    def list_hidden(self) -> Mapping[str, int]:
        return self._strip_folder(self.store.list_hidden())

    def _strip_folder(self, files: Mapping[str, int]) -> Mapping[str, int]:
        folder_prefix = f"{self.folder}/"
        return {
            path.removeprefix(folder_prefix): size for path, size in files.items() if path.startswith(folder_prefix)
        }


def open_subfolder(source: Source, folder: str, files: Mapping[str, int]) -> Source:
    """``files``, named relative to ``folder`` of ``source``, as a source; an empty ``folder`` is all of ``source``."""
    return Source(SubfolderStore(source.store, folder) if folder else source.store, files)

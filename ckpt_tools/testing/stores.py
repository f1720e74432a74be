"""Conformance tests of stores, as classes to inherit.

A store's own tests say how one is made and how its bytes are reached by another road, so that a mistake of writing
cannot be undone by the same mistake of reading.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

import pytest

from ckpt_tools.errors import IncompleteError, UnsafeError
from ckpt_tools.stores.source import FillableStore, Source, Store

UNSAFE_NAMES = (
    "",
    ".",
    "..",
    "../x",
    "a/../x",
    "a/../../x",
    "a/..",
    "/etc/passwd",
    "//host/share",
    "s3://bucket/key",
    "file:///etc/passwd",
    "C:x",
    "..\\x",
    "a\\b",
    "a\0b",
    "\ud800",
)
"""Names that a checkpoint must not be able to make a store open."""

CONTENT = bytes(range(256)) * 5


class StoreTests(ABC):
    """Tests of a store that is read from. A subclass defines ``make``."""

    @abstractmethod
    def make(self, files: Mapping[str, bytes]) -> Store:
        """A store that holds ``files``, put there by another road than its own writers."""

    def test_it_lists_every_file_below_it_with_its_size(self) -> None:
        files = {"a": b"12", "deep/er/b.bin": b"123", ".metadata": b"1", "empty": b"", "deep/a": b"1234"}
        expected = {name: len(data) for name, data in files.items()}
        assert dict(self.make(files).list()) == expected
        source = Source.open(self.make(files))
        assert list(source.files) == sorted(files)

    @pytest.mark.parametrize(
        ("start", "stop"), [(0, 1280), (0, 0), (0, 1), (5, 700), (1279, 1280), (1280, 1280), (256, 512)]
    )
    def test_it_reads_exactly_the_range(self, start: int, stop: int) -> None:
        store = self.make({"d/f": CONTENT, "other": b"x" * 2000})
        buffer = bytearray(b"\xaa" * (stop - start + 4))
        store.read_into("d/f", start, memoryview(buffer)[2:-2])
        assert buffer == b"\xaa\xaa" + CONTENT[start:stop] + b"\xaa\xaa"

    @pytest.mark.parametrize(("start", "size"), [(1279, 2), (1280, 1), (5000, 10), (0, 1281)])
    def test_a_file_that_ends_early_is_incomplete(self, start: int, size: int) -> None:
        with pytest.raises(IncompleteError, match="ends") as caught:
            self.make({"short": CONTENT}).read_into("short", start, memoryview(bytearray(size)))
        assert caught.value.path is not None and caught.value.path.endswith("short")

    @pytest.mark.parametrize("path", ["missing", "d/missing", "d"])
    def test_what_is_no_file_is_missing(self, path: str) -> None:
        with pytest.raises(IncompleteError, match="missing") as caught:
            self.make({"d/f": CONTENT}).read_into(path, 0, memoryview(bytearray(1)))
        assert caught.value.path is not None and caught.value.path.endswith(path)

    @pytest.mark.parametrize("path", UNSAFE_NAMES)
    def test_a_name_that_leaves_it_is_refused(self, path: str) -> None:
        store = self.make({"a/b": CONTENT})
        with pytest.raises(UnsafeError):
            store.read_into(path, 0, memoryview(bytearray(1)))

    def test_threads_read_many_files_together(self) -> None:
        files = {f"{number}": bytes([number]) * 3 for number in range(200)}
        store = self.make(files)

        def read(number: int) -> None:
            buffer = bytearray(3)
            store.read_into(str(number % 200), 0, memoryview(buffer))
            assert buffer == files[str(number % 200)]

        in_threads(read, range(1000))


class FillableStoreTests(StoreTests):
    """Tests of a store whose files take bytes at any position. A subclass defines ``get``, too."""

    @abstractmethod
    def make(self, files: Mapping[str, bytes]) -> FillableStore:
        """A store that holds ``files``, put there by another road than its own writers."""

    @abstractmethod
    def get(self, store: FillableStore, path: str) -> bytes:
        """A file's bytes by another road than its own reader."""

    @pytest.mark.parametrize("path", UNSAFE_NAMES)
    def test_a_name_that_leaves_it_is_not_written(self, path: str) -> None:
        store = self.make({"a/b": CONTENT})
        with pytest.raises(UnsafeError):
            store.create(path, 1)
        assert list(store.list()) == ["a/b"]

    def test_a_new_file_is_filled_in_any_order(self) -> None:
        store = self.make({})
        writer = store.create("new/file.bin", len(CONTENT))
        for start, stop in [(1000, 1280), (0, 10), (10, 1000), (50, 50)]:
            writer.write_at(start, memoryview(CONTENT)[start:stop])
        writer.close()
        assert self.get(store, "new/file.bin") == CONTENT
        assert dict(store.list()) == {"new/file.bin": len(CONTENT)}

    @pytest.mark.parametrize("data", [b"ab", bytearray(b"ab"), memoryview(b"xaby")[1:3]])
    def test_any_buffer_is_written(self, data: bytes | bytearray | memoryview) -> None:
        store = self.make({})
        writer = store.create("f", 2)
        writer.write_at(0, data)
        writer.close()
        assert self.get(store, "f") == b"ab"

    def test_an_empty_file_is_a_file(self) -> None:
        store = self.make({})
        store.create("empty", 0).close()
        assert self.get(store, "empty") == b""
        assert dict(store.list()) == {"empty": 0}

    def test_threads_write_one_file_together(self) -> None:
        store, step = self.make({}), 40
        writer = store.create("shared", len(CONTENT))
        in_threads(
            lambda start: writer.write_at(start, CONTENT[start : start + step]),
            reversed(range(0, len(CONTENT), step)),
        )
        writer.close()
        assert self.get(store, "shared") == CONTENT


def in_threads(work: object, items: Iterable[int]) -> None:
    """``work(item)`` for every item, on four threads that start together; raises what one raised."""
    assert callable(work)
    barrier = threading.Barrier(4)
    with ThreadPoolExecutor(4, initializer=barrier.wait) as pool:
        list(pool.map(work, items))

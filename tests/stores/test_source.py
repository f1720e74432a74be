"""A source: what a reader sees of a store; the store in memory, and one with literals in front."""

from collections.abc import Mapping

import pytest

from ckpt_tools.errors import IncompleteError, MalformedError, UnsafeError
from ckpt_tools.stores.local.store import LocalStore
from ckpt_tools.stores.memory import MemoryStore
from ckpt_tools.stores.source import FillableStore, Source, Store
from ckpt_tools.stores.wrappers import overlay_literals
from ckpt_tools.testing.stores import FillableStoreTests, StoreTests
from tests.support.refusals import refusal_test

pytestmark = pytest.mark.quick


class TestMemoryStore(FillableStoreTests):
    def make(self, files: Mapping[str, bytes]) -> FillableStore:
        return MemoryStore({name: bytearray(data) for name, data in files.items()})

    def get(self, store: FillableStore, path: str) -> bytes:
        assert isinstance(store, MemoryStore)
        return bytes(store.files[path])


class TestOverlay(StoreTests):
    """Every second file is a literal."""

    def make(self, files: Mapping[str, bytes]) -> Store:
        behind = {name: bytearray(data) for name, data in list(files.items())[::2]}
        return overlay_literals(MemoryStore(behind), dict(list(files.items())[1::2]))


def source() -> Source:
    return Source.open(MemoryStore({"b": bytearray(b"01234"), "a": bytearray(b"")}))


def test_a_source_knows_names_and_sizes_and_reads_ranges():
    found = source()
    assert (list(found.files.items()), found.size("b")) == ([("a", 0), ("b", 5)], 5)
    assert (found.read("b", 1, 3), found.read("b", 5, 5), found.read("a", 0, 0)) == (b"12", b"", b"")
    assert found.read_all("b", limit_bytes=5) == b"01234"


def test_a_literal_hides_a_file_of_its_name():
    store = overlay_literals(MemoryStore({"a": bytearray(b"behind")}), {"a": b"front"})
    buffer = bytearray(3)
    store.read_into("a", 2, memoryview(buffer))
    assert (buffer, dict(store.list())) == (b"ont", {"a": 5})


def test_a_file_has_the_version_that_the_store_below_gives_it(tmp_path):
    (tmp_path / "file").write_bytes(b"12")
    overlay = overlay_literals(LocalStore(tmp_path), {"literal": b"1"})
    assert overlay.version("file") == LocalStore(tmp_path).version("file")
    assert overlay.version("literal") == overlay_literals(MemoryStore(), {}).version("any") == ""


ENDS = "it ends at byte 5"
test_a_refusal = refusal_test(
    ("a range beyond the file", lambda _: source().read("b", 0, 6), IncompleteError, ENDS),
    ("one before it", lambda _: source().read("b", -1, 2), IncompleteError, ENDS),
    ("one that runs backwards", lambda _: source().read("b", 3, 2), IncompleteError, ENDS),
    ("an empty one behind it", lambda _: source().read("b", 6, 6), IncompleteError, ENDS),
    ("a missing file", lambda _: source().size("c"), IncompleteError, "missing"),
    ("a file outside", lambda _: source().size("../b"), UnsafeError, "."),
    ("a long header", lambda _: source().read_all("b", limit_bytes=4), MalformedError, "at most 4"),
    (
        "a range beyond a literal",
        lambda _: overlay_literals(MemoryStore(), {"a": b"abc"}).read_into("a", 2, memoryview(bytearray(2))),
        IncompleteError,
        "it ends at byte 3",
    ),
    (
        "the version of no file",
        lambda at: overlay_literals(LocalStore(at), {}).version("other"),
        IncompleteError,
        "missing",
    ),
)

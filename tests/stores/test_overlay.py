"""Literals in front of a store."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from ckpt_tools.errors import IncompleteError
from ckpt_tools.stores.local.store import LocalStore
from ckpt_tools.stores.memory import MemoryStore
from ckpt_tools.stores.source import Store
from ckpt_tools.stores.wrappers import Overlay
from ckpt_tools.testing.stores import StoreTests

pytestmark = pytest.mark.quick


class TestOverlay(StoreTests):
    """Every second file is a literal."""

    def make(self, files: Mapping[str, bytes]) -> Store:
        behind = {name: bytearray(data) for name, data in list(files.items())[::2]}
        return Overlay(MemoryStore(behind), dict(list(files.items())[1::2]))


def test_a_literal_hides_a_file_of_its_name():
    store = Overlay(MemoryStore({"a": bytearray(b"behind")}), {"a": b"front"})
    buffer = bytearray(3)
    store.read_into("a", 2, memoryview(buffer))
    assert (buffer, dict(store.list())) == (b"ont", {"a": 5})


def test_a_literal_ends_where_it_ends():
    with pytest.raises(IncompleteError, match="it ends at byte 3"):
        Overlay(MemoryStore(), {"a": b"abc"}).read_into("a", 2, memoryview(bytearray(2)))


def test_a_file_has_the_version_that_the_store_below_gives_it(tmp_path):
    (tmp_path / "file").write_bytes(b"12")
    overlay = Overlay(LocalStore(tmp_path), {"literal": b"1"})
    assert overlay.version("file") == LocalStore(tmp_path).version("file")
    assert overlay.version("literal") == Overlay(MemoryStore(), {}).version("any") == ""
    with pytest.raises(IncompleteError, match="missing"):
        overlay.version("other")

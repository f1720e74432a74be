"""The store in memory."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from ckpt_tools.stores.memory import MemoryStore
from ckpt_tools.stores.source import FillableStore
from ckpt_tools.testing.stores import FillableStoreTests

pytestmark = pytest.mark.quick


class TestMemoryStore(FillableStoreTests):
    def make(self, files: Mapping[str, bytes]) -> FillableStore:
        return MemoryStore({name: bytearray(data) for name, data in files.items()})

    def get(self, store: FillableStore, path: str) -> bytes:
        assert isinstance(store, MemoryStore)
        return bytes(store.files[path])

"""What a store, a destination and a claim can do beyond the least: asked of any of them, without asking its kind."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import pytest

from ckpt_tools.stores.memory import MemoryStore
from ckpt_tools.stores.read_ahead import BlockCache
from ckpt_tools.stores.source import CopySource, Store, StoreWrapper
from ckpt_tools.stores.wrappers import overlay_literals
from ckpt_tools.testing.stores import StoreTests

DATA = bytes(range(200))


@dataclass(frozen=True, slots=True)
class Plain(Store):
    """A store that can do no more than it must."""

    inner: MemoryStore
    url: str = "plain://"

    def list(self) -> Mapping[str, int]:
        return self.inner.list()

    def read_into(self, path: str, start: int, buffer: memoryview) -> None:
        self.inner.read_into(path, start, buffer)


@dataclass(frozen=True, slots=True)
class Able(StoreWrapper):
    """A store that can do everything, and remembers what it was asked."""

    store: Store
    asked: list[str] = field(default_factory=list)

    def version(self, path: str) -> str:
        return f"version of {path}"

    def find_copy_source(self, path: str) -> CopySource:
        return CopySource("service", path, self.version(path))

    def prefetch(self, path: str, start: int, stop: int) -> None:
        self.asked.append(path)


@dataclass(frozen=True, slots=True)
class Forwarding(StoreWrapper):
    store: Store


def store(files: Mapping[str, bytes] = MappingProxyType({"f": DATA})) -> MemoryStore:
    return MemoryStore({name: bytearray(data) for name, data in files.items()})


class TestPlain(StoreTests):
    def make(self, files: Mapping[str, bytes]) -> Store:
        return Plain(store(files))


class TestForwarding(StoreTests):
    def make(self, files: Mapping[str, bytes]) -> Store:
        return Forwarding(store(files))


def test_a_store_need_not_do_more_than_list_and_read():
    plain = Plain(store())
    plain.prefetch("f", 0, 3)
    assert (plain.version("f"), plain.find_copy_source("f")) == ("", None)


def test_a_wrapper_forwards_all_that_a_store_can_do():
    """Or a capability that is added later would be lost in every wrapper."""
    public = {name for name in vars(Store) if not name.startswith("_")}
    assert public <= vars(StoreWrapper).keys()


@pytest.mark.parametrize(
    ("wrap", "path", "asked"),
    [
        (Forwarding, "f", ["f"]),
        (lambda able: overlay_literals(able, {"mine": b"1"}), "f", ["f"]),
        (lambda able: overlay_literals(able, {"mine": b"1"}), "mine", None),
        (lambda able: BlockCache(able, able.list()), "f", []),
    ],
    ids=["wrapper", "overlay", "literal of an overlay", "cache, which reads ahead itself"],
)
def test_what_the_store_below_can_do_a_wrapper_can(wrap, path, asked):
    able = Able(store())
    wrapper = wrap(able)
    wrapper.prefetch(path, 0, 1)
    expected = ("", None, []) if asked is None else (able.version(path), able.find_copy_source(path), asked)
    assert (wrapper.version(path), wrapper.find_copy_source(path), able.asked) == expected

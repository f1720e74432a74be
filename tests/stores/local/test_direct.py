"""Direct I/O: the same bytes as through the page cache, at every alignment, and a fallback where it is refused."""

import errno
import os
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tools.stores.local import direct
from ckpt_tools.stores.local.store import LocalStore
from ckpt_tools.transfer.buffers import allocate_page_aligned

BLOCK, SMALL, SMALL_WRITE = direct.BLOCK_BYTES, direct.MIN_READ_BYTES, direct.MIN_WRITE_BYTES
NEAR = [0, 1, 511, 512, 513, BLOCK - 1, BLOCK, BLOCK + 1]
SIZES = [*NEAR, *(SMALL_WRITE + near for near in NEAR), 2 * SMALL + 77, direct.REQUEST_BYTES + 2 * BLOCK + 1]


@pytest.fixture
def opened(monkeypatch):
    """The flags with which files were opened for direct I/O."""
    real_open, flags_seen = os.open, []

    def spy(path, flags, *rest, **named):
        if flags & os.O_DIRECT:
            flags_seen.append(flags)
        return real_open(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", spy)
    return flags_seen


def bytes_of(size: int) -> bytes:
    return os.urandom(size)


def evict(path):
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def write_parts(store: LocalStore, name: str, data: bytes, cuts: list[int]) -> None:
    """Write ``data`` in the parts between ``cuts``, the last first, each in memory as aligned as in the file."""
    writer = store.create(name, len(data))
    ends = [0, *cuts, len(data)]
    for start, stop in reversed(list(pairwise(ends))):
        memory = allocate_page_aligned(stop - start + BLOCK)[start % BLOCK :][: stop - start]
        memory[:] = list(data[start:stop]) if stop - start < 64 else memoryview(data[start:stop])
        writer.write_at(start, memory.data)
    writer.close()


@pytest.mark.parametrize("size", SIZES)
def test_a_file_of_any_size_holds_the_bytes(tmp_path, size, opened):
    data = bytes_of(size)
    write_parts(LocalStore(tmp_path, is_direct=True), "file", data, [])
    assert (tmp_path / "file").read_bytes() == data
    assert bool(opened) == (size >= SMALL_WRITE)


@given(st.lists(st.integers(0, 3 * SMALL), max_size=4), st.integers(0, BLOCK))
def test_parts_cut_anywhere_hold_the_bytes(tmp_path_factory, cuts, more):
    folder, data = tmp_path_factory.mktemp("cut"), bytes_of(3 * SMALL + more)
    write_parts(LocalStore(folder, is_direct=True), "file", data, sorted(cuts))
    assert (folder / "file").read_bytes() == data


@pytest.mark.parametrize("start", [0, 1, 511, 4096, 4097, 70_001])
@pytest.mark.parametrize("size", [1, SMALL - 1, SMALL, SMALL + 1, direct.REQUEST_BYTES + 4095])
@pytest.mark.parametrize("is_cached", [True, False])
def test_a_range_is_read_as_it_is_stored(tmp_path, start, size, is_cached, opened):
    data = bytes_of(direct.REQUEST_BYTES + 80_000)
    (tmp_path / "file").write_bytes(data)
    if not is_cached:
        evict(tmp_path / "file")
    buffer = bytearray(size)
    LocalStore(tmp_path, is_direct=True).read_into("file", start, memoryview(buffer))
    assert bytes(buffer) == data[start : start + size]
    if size < SMALL or is_cached:
        assert not opened


def test_a_file_that_ends_early_is_named(tmp_path):
    (tmp_path / "file").write_bytes(bytes(SMALL))
    evict(tmp_path / "file")
    with pytest.raises(Exception, match="the file ends at byte 131,072"):
        LocalStore(tmp_path, is_direct=True).read_into("file", 1, memoryview(bytearray(SMALL)))


@pytest.mark.parametrize("step", ["open", "pwrite", "preadv"])
def test_a_file_system_that_refuses_is_used_through_the_cache(tmp_path, monkeypatch, step):
    real = getattr(os, step)

    def refuse(first, flags_or_data, *rest, **named):
        if (step == "open" and flags_or_data & os.O_DIRECT) or (step != "open" and is_direct(first)):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(first, flags_or_data, *rest, **named)

    monkeypatch.setattr(os, step, refuse)
    data, store = bytes_of(2 * SMALL + 5), LocalStore(tmp_path, is_direct=True)
    write_parts(store, "file", data, [SMALL])
    evict(tmp_path / "file")
    buffer = bytearray(len(data))
    store.read_into("file", 0, memoryview(buffer))
    assert bytes(buffer) == data == (tmp_path / "file").read_bytes()


def is_direct(descriptor: int) -> bool:
    import fcntl

    return bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)


def test_a_full_disk_is_an_error_of_direct_writes_too(tmp_path, monkeypatch):
    def fail(descriptor, *rest):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    writer = LocalStore(tmp_path, is_direct=True).create("file", SMALL)
    monkeypatch.setattr(os, "pwrite", fail)
    with pytest.raises(Exception, match="No space left"):
        writer.write_at(0, allocate_page_aligned(SMALL).data)


def test_a_larger_source_than_memory_is_read_past_the_cache(tmp_path, monkeypatch):
    store = LocalStore(tmp_path)
    direct.bypass_cache_if_large(store, 1 << 10)
    assert not store.is_direct
    direct.bypass_cache_if_large(store, 1 << 60)
    assert store.is_direct

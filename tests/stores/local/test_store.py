"""The local store: what it opens, what it refuses, and what it says when the disk does not help."""

import gc
import os
import resource
import shutil
import stat
import subprocess
import sys
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from ckpt_tools.errors import IncompleteError, SourceNotFoundError, StoreError, UnsafeError
from ckpt_tools.stores.local.store import MAX_OPEN_FILES, LocalFileWriter, LocalStore
from ckpt_tools.stores.source import FillableStore
from ckpt_tools.testing.stores import FillableStoreTests
from tests.support.refusals import refusal_test


def read(store: FillableStore, path: str, size: int, start: int = 0) -> bytes:
    buffer = bytearray(size)
    store.read_into(path, start, memoryview(buffer))
    return bytes(buffer)


class TestLocalStore(FillableStoreTests):
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path):
        self.folder = tmp_path

    def make(self, files: Mapping[str, bytes]) -> FillableStore:
        root = self.folder / f"store-{len(list(self.folder.iterdir()))}"
        root.mkdir()
        for name, data in files.items():
            root.joinpath(name).parent.mkdir(parents=True, exist_ok=True)
            root.joinpath(name).write_bytes(data)
        return LocalStore(root)

    def get(self, store: FillableStore, path: str) -> bytes:
        assert isinstance(store, LocalStore)
        return store.root.joinpath(path).read_bytes()


def with_links(folder: Path, **links: str) -> Path:
    """A store beside a secret and another store whose name begins alike, with these links in it."""
    (folder / "secret").write_bytes(b"secret")
    for name in ("store/sub", "store2"):
        (folder / name).mkdir(parents=True)
    (folder / "store/inside").write_bytes(b"inside")
    (folder / "store2/f").write_bytes(b"1")
    for name, target in links.items():
        (folder / "store" / name).symlink_to(target.format(folder))
    return folder / "store"


def read_link(target: str, path: str = "link") -> Callable[[Path], object]:
    return lambda folder: read(LocalStore(with_links(folder, link=target)), path, 1)


def with_file(folder: Path) -> LocalStore:
    (folder / "f").write_bytes(b"old")
    return LocalStore(folder)


OUTSIDE = "link to a file outside"
test_a_refusal = refusal_test(
    ("no folder", lambda at: LocalStore(at / "nowhere").list(), SourceNotFoundError, "there is no folder"),
    ("no file", lambda at: LocalStore(at, only_file="c").list(), SourceNotFoundError, "there is no file"),
    ("link that leads out", read_link("../secret"), UnsafeError, OUTSIDE),
    ("link that turns back", read_link("sub/../../secret"), UnsafeError, OUTSIDE),
    ("absolute link", read_link("{}/secret"), UnsafeError, OUTSIDE),
    ("link to a folder", read_link("..", "link/secret"), UnsafeError, OUTSIDE),
    ("link to a name that begins alike", read_link("../store2/f"), UnsafeError, OUTSIDE),
    ("link to itself", read_link("link"), StoreError, "opening failed: Too many levels of symbolic links"),
    ("a file in the way", lambda at: with_file(at).create("f", 3), StoreError, "creating failed: File exists"),
    ("no folder can be made", lambda at: with_file(at).create("f/g", 1), StoreError, "creating failed: (Not a|File)"),
    # /proc/self/mem has no bytes at address 0, and says so as a failing disk does.
    (
        "failing disk",
        lambda at: read(LocalStore(Path("/proc/self"), only_file="mem"), "mem", 8),
        StoreError,
        "reading failed: Input/output error",
    ),
)


class TestListing:
    def test_hidden_folders_and_what_is_no_file_are_not_listed(self, tmp_path):
        (tmp_path / ".cache").mkdir()
        (tmp_path / ".cache/f").write_bytes(b"1")
        (tmp_path / "broken").symlink_to("nowhere")
        (tmp_path / "circle").symlink_to("circle")
        os.mkfifo(tmp_path / "pipe")
        (tmp_path / "f").write_bytes(b"12")
        assert dict(LocalStore(tmp_path).list()) == {"f": 2}

    def test_a_single_file_is_all_there_is(self, tmp_path):
        (tmp_path / "a").write_bytes(b"12")
        (tmp_path / "b").write_bytes(b"1")
        store = LocalStore(tmp_path, only_file="a")
        assert (dict(store.list()), store.url) == ({"a": 2}, f"{tmp_path}/a")

    def test_a_folder_that_may_not_be_read_is_a_store_error(self, tmp_path):
        """As another user, where this runs as root, whom no mode stops."""
        (tmp_path / "closed").mkdir()
        tmp_path.joinpath("closed/f").write_bytes(b"1")
        tmp_path.joinpath("closed").chmod(0o444)
        tmp_path.chmod(0o755)
        outcome = in_child(
            f"""
            os.chdir({str(tmp_path)!r})
            if os.geteuid() == 0:
                os.seteuid(65534)
            LocalStore(Path("closed")).list()
            """
        )
        tmp_path.joinpath("closed").chmod(0o755)
        assert outcome == "StoreError: closed/f: listing failed: Permission denied"


class TestLinks:
    def test_one_that_stays_inside_is_followed_and_a_store_may_be_reached_through_one(self, tmp_path):
        root = with_links(tmp_path, link="inside")
        tmp_path.joinpath("alias").symlink_to("store")
        assert read(LocalStore(root), "link", 6) == read(LocalStore(tmp_path / "alias"), "inside", 6) == b"inside"

    def test_the_file_that_the_user_named_may_be_a_link(self, tmp_path):
        root = with_links(tmp_path, named="../secret", other="../secret")
        assert read(LocalStore(root, only_file="named"), "named", 6) == b"secret"
        with pytest.raises(UnsafeError):
            read(LocalStore(root, only_file="named"), "other", 1)

    def test_a_snapshot_of_the_hub_cache_may_link_to_its_blobs_and_no_further(self, tmp_path):
        model = tmp_path / "models--x"
        (model / "blobs").mkdir(parents=True)
        (model / "blobs/abc").write_bytes(b"blob")
        (model / "snapshots/main").mkdir(parents=True)
        (model / "snapshots/main/f").symlink_to("../../blobs/abc")
        (tmp_path / "secret").write_bytes(b"secret")
        (model / "snapshots/main/g").symlink_to("../../../secret")
        store = LocalStore(model / "snapshots/main")
        assert read(store, "f", 4) == b"blob"
        with pytest.raises(UnsafeError):
            read(store, "g", 1)


class TestReading:
    @pytest.mark.timeout(20)
    def test_a_pipe_is_no_file_and_does_not_make_it_wait(self, tmp_path):
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(IncompleteError, match="missing"):
            read(LocalStore(tmp_path), "pipe", 1)

    def test_no_more_descriptors_stay_open_than_said(self, tmp_path):
        for number in range(MAX_OPEN_FILES + 40):
            (tmp_path / f"{number}").write_bytes(b"%d" % number)
        store, before = LocalStore(tmp_path), num_descriptors()
        for number in range(MAX_OPEN_FILES + 40):
            assert read(store, f"{number}", 1) == str(number).encode()[:1]
        assert num_descriptors() - before == MAX_OPEN_FILES
        assert read(store, "0", 1) == b"0"
        del store
        assert num_descriptors() == before

    def test_a_file_too_long_for_one_system_call_is_read_whole(self, tmp_path):
        size = (1 << 31) + 4096
        with (tmp_path / "sparse").open("wb") as file:
            file.truncate(size)
            file.seek(size - 3)
            file.write(b"end")
        assert read(LocalStore(tmp_path), "sparse", 4099, size - 4099)[-3:] == b"end"


def num_descriptors() -> int:
    gc.collect()  # what errors of earlier tests keep
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


class TestWriting:
    def test_it_has_its_size_and_its_room_from_the_start(self, tmp_path):
        writer = LocalStore(tmp_path).create("f", 1 << 20)
        found = (tmp_path / "f").stat()
        writer.close()
        assert (found.st_size, found.st_blocks * 512) == (1 << 20, 1 << 20)

    @pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o002, 0o664), (0o077, 0o600), (0, 0o666)])
    def test_its_mode_follows_the_umask(self, tmp_path, umask, mode):
        before = os.umask(umask)
        try:
            LocalStore(tmp_path).create("folder/f", 0).close()
        finally:
            os.umask(before)
        assert stat.S_IMODE((tmp_path / "folder/f").stat().st_mode) == mode
        assert stat.S_IMODE((tmp_path / "folder").stat().st_mode) == 0o777 & ~umask

    def test_files_larger_than_the_disk_are_refused_before_they_take_any_of_it(self, tmp_path):
        disk, store = shutil.disk_usage(tmp_path), LocalStore(tmp_path)
        with pytest.raises(StoreError, match=r"no room for [\d,]+ bytes: No space left on device") as caught:
            store.create("f", disk.total + 1)
        assert caught.value.path == str(tmp_path / "f")
        assert (tmp_path / "f").stat().st_blocks == 0
        store.check_free_space(disk.free // 2)
        with pytest.raises(StoreError, match=rf"it needs {disk.total + 1:,} bytes, and [\d,]+ are free; free some"):
            store.check_free_space(disk.total + 1)

    def test_a_disk_that_fills_up_is_a_store_error(self):
        """/dev/full takes no byte, as a disk on which somebody else took the room."""
        writer = LocalFileWriter(Path("/dev/full"), os.open("/dev/full", os.O_WRONLY))
        with pytest.raises(StoreError, match="writing failed: No space left on device") as caught:
            writer.write_at(0, b"1")
        writer.close()
        assert (caught.value.path, caught.value.exit_code) == ("/dev/full", 5)

    def test_a_write_that_the_kernel_cuts_short_is_continued_until_it_is_refused(self, tmp_path):
        """At the limit on file sizes a write first takes less than was given, and then fails."""
        outcome = in_child(
            f"""
            path = {str(tmp_path / "f")!r}
            writer = LocalFileWriter(Path(path), os.open(path, os.O_WRONLY | os.O_CREAT))
            writer.write_at(0, b"x" * 1000)
            """,
            file_size_limit=600,
        )
        assert outcome == f"StoreError: {tmp_path}/f: writing failed: File too large"
        assert (tmp_path / "f").read_bytes() == b"x" * 600

    def test_closing_what_the_disk_refused_is_a_store_error(self):
        reader, writer = os.pipe()
        os.close(reader)
        with pytest.raises(StoreError, match="writing failed: Invalid argument"):
            LocalFileWriter(Path("pipe"), writer, fsync=True).close()
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(writer)

    def test_what_is_abandoned_waits_for_no_disk(self):
        """A pipe cannot be synced, which would say so."""
        reader, writer = os.pipe()
        os.close(reader)
        LocalFileWriter(Path("pipe"), writer, fsync=True).abandon()
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(writer)


def in_child(code: str, *, file_size_limit: int | None = None) -> str:
    """Run ``code`` in a process of its own; the CkptError that it ends with, as text."""
    program = """
import os
from pathlib import Path
from ckpt_tools.errors import CkptError
from ckpt_tools.stores.local.store import LocalFileWriter, LocalStore
try:
    {}
except CkptError as error:
    print(f"{{type(error).__name__}}: {{error}}")
""".format(textwrap.indent(textwrap.dedent(code), "    ").strip())

    def limit() -> None:
        if file_size_limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (file_size_limit, file_size_limit))

    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, preexec_fn=limit, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()

"""A destination is absent, old or complete, whatever happens and whoever else is there."""

import errno
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from ckpt_tools.errors import DestinationExistsError, StoreError, UsageError
from ckpt_tools.stores.local import staging_folder
from ckpt_tools.stores.local.location import LocalOutputLocation
from ckpt_tools.stores.local.staging_folder import OwnedNames
from ckpt_tools.stores.output_names import OutputForm
from ckpt_tools.stores.publishing import NO_FILES, Claim

BOTH = pytest.mark.parametrize("is_file", [True, False], ids=["file", "folder"])


def output_names(claim: Claim) -> list[str]:
    """Two files that have to agree; a single one where the output is a file."""
    file_name = claim.location.form.file_name
    return ["a", "deep/b"] if file_name is None else [file_name]


def fill(claim: Claim, text: str) -> None:
    for name in output_names(claim):
        write(claim, name, text)


def write(claim: Claim, name: str, text: str) -> None:
    handle = claim.destination.begin_file(name, len(text))
    claim.destination.write_part(name, handle, 0, 0, text.encode())
    claim.destination.finish_file(name, handle, [""])


def publish(claim: Claim, replaced: Mapping[str, int] = NO_FILES) -> None:
    claim.publish_files(output_names(claim), replaced)


def put(target: Path, text: str, *, is_file: bool) -> None:
    if is_file:
        target.write_text(text)
    else:
        (target / "deep").mkdir(parents=True)
        (target / "a").write_text(text)
        (target / "deep/b").write_text(text)


def location_of(target: Path, *, is_file: bool) -> LocalOutputLocation:
    return LocalOutputLocation(target, form=OutputForm(target.name if is_file else None))


def text_of(target: Path) -> str:
    if target.is_file():
        return target.read_text()
    assert (target / "a").read_text() == (target / "deep/b").read_text()
    assert sorted(path.name for path in target.iterdir()) == ["a", "deep"]
    return (target / "a").read_text()


def convert(target: Path, text: str, *, is_file: bool, overwrite: bool = False, fsync: bool = False) -> None:
    with location_of(target, is_file=is_file).claim(overwrite=overwrite, resume=False, fsync=fsync) as claim:
        fill(claim, text)
        publish(claim, there(target, is_file=is_file))


def there(target: Path, *, is_file: bool) -> Mapping[str, int]:
    """The names and sizes of what is at the target now."""
    present = location_of(target, is_file=is_file).list_contents()
    return {} if present is None else present.files


def note(target: Path, *names: str) -> None:
    """What a run writes down before it makes files of these names, or replaces them."""
    folder = target.with_name(f".{target.name}.ckpt-tools-partial")
    folder.mkdir(exist_ok=True)
    with (folder / "names").open("a") as file:
        file.writelines(f"{json.dumps(name)}\n" for name in names)


def test_a_name_after_one_that_a_full_disk_cut_off(tmp_path):
    tmp_path.joinpath("names").write_bytes(b'"a.pt"\n"b.p')
    owned_names = OwnedNames(tmp_path / "names")
    owned_names.add_names(["c.pt"])
    assert owned_names.read_names() == {"a.pt", "c.pt"}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def assert_alone(target: Path, text: str) -> None:
    """There is the output with this text, and nothing beside it."""
    assert (names(target.parent), text_of(target)) == ([target.name], text)


@BOTH
@pytest.mark.parametrize("fsync", [False, True])
def test_it_is_absent_and_then_complete(tmp_path, is_file, fsync):
    target = tmp_path / "new/out"
    with location_of(target, is_file=is_file).claim(overwrite=False, resume=False, fsync=fsync) as claim:
        fill(claim, "new")
        assert not target.exists()
        publish(claim)
        assert text_of(target) == "new"
    assert names(tmp_path / "new") == ["out"]


@BOTH
@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("error", [StoreError("disk"), KeyboardInterrupt(), None])
def test_it_is_absent_or_stays_old_where_the_work_ends_early(tmp_path, is_file, old, error):
    if old:
        put(tmp_path / "out", "old", is_file=is_file)
    with suppress(StoreError, KeyboardInterrupt):
        with location_of(tmp_path / "out", is_file=is_file).claim(overwrite=old, resume=False) as claim:
            fill(claim, "new")
            if error is not None:
                raise error
    assert names(tmp_path) == ["out"] * old
    assert not old or text_of(tmp_path / "out") == "old"


@BOTH
@pytest.mark.parametrize("fsync", [False, True])
def test_it_is_replaced_where_asked(tmp_path, is_file, fsync):
    put(tmp_path / "out", "old", is_file=is_file)
    convert(tmp_path / "out", "new", is_file=is_file, overwrite=True, fsync=fsync)
    assert_alone(tmp_path / "out", "new")
    (tmp_path / "empty").mkdir()
    convert(tmp_path / "empty", "as where there is none", is_file=False)


def test_readers_never_miss_a_folder_that_is_being_replaced(tmp_path):
    put(tmp_path / "out", "0", is_file=False)
    missed: list[OSError] = []
    done = threading.Event()

    def look() -> None:
        while not done.is_set():
            try:
                (tmp_path / "out/a").read_text()
            except OSError as error:
                missed.append(error)

    reader = threading.Thread(target=look)
    reader.start()
    for number in range(30):
        convert(tmp_path / "out", str(number), is_file=False, overwrite=True)
    done.set()
    reader.join()
    assert missed == []


class TestWithoutExchange:
    """File systems that cannot swap two names: NFS, Lustre."""

    @pytest.fixture(autouse=True)
    def _no_exchange(self, monkeypatch):
        monkeypatch.setattr(staging_folder, "exchange_paths", lambda a, b: False)

    def test_a_full_folder_is_replaced_in_two_steps(self, tmp_path):
        put(tmp_path / "out", "old", is_file=False)
        convert(tmp_path / "out", "new", is_file=False, overwrite=True)
        assert_alone(tmp_path / "out", "new")

    @pytest.mark.parametrize("noted", [[], ["a"], ["a", "deep/b", "other"]])
    def test_what_nobody_wrote_down_was_not_moved_by_us(self, tmp_path, noted):
        put(tmp_path / ".out.ckpt-tools-replaced", "old", is_file=False)
        (tmp_path / ".out.ckpt-tools-replaced/mine").write_text("mine")
        note(tmp_path / "out", *noted)
        put(tmp_path / "out", "new", is_file=False)
        with pytest.raises(DestinationExistsError, match=r"ckpt-tools-replaced .* mine; move it away"):
            convert(tmp_path / "out", "newer", is_file=False, overwrite=True)
        assert text_of(tmp_path / "out") == "new"
        assert names(tmp_path / ".out.ckpt-tools-replaced") == ["a", "deep", "mine"]


@pytest.mark.parametrize("exchange", [True, False])
def test_what_comes_while_the_old_is_replaced_is_kept(tmp_path, monkeypatch, exchange):
    """Between the last look and the swap, and so with both ways to swap."""
    put(tmp_path / "out", "old", is_file=False)
    real, came = staging_folder.exchange_paths, []

    def late(a: Path, b: Path) -> bool:
        if not came:
            (tmp_path / "out/late").write_text("mine")
        came.append(b)
        return real(a, b) if exchange else False

    monkeypatch.setattr(staging_folder, "exchange_paths", late)
    with pytest.raises(DestinationExistsError, match=r"unchanged, because files were added to it meanwhile: late"):
        convert(tmp_path / "out", "new", is_file=False, overwrite=True)
    assert names(tmp_path) == ["out"]
    assert names(tmp_path / "out") == ["a", "deep", "late"]
    assert ((tmp_path / "out/a").read_text(), (tmp_path / "out/late").read_text()) == ("old", "mine")


def test_what_comes_under_the_name_of_a_removed_file_is_kept(tmp_path, monkeypatch):
    put(tmp_path / "out", "old", is_file=False)
    real = staging_folder.remove_files_by_name

    def put_again(folder: Path, names: Collection[str]) -> None:
        real(folder, names)
        if (tmp_path / "out/a").read_text() == "new" and not (folder / "a").exists():
            (folder / "a").write_text("mine")

    with monkeypatch.context() as patch:
        patch.setattr(staging_folder, "remove_files_by_name", put_again)
        with pytest.raises(DestinationExistsError, match=r"are kept in (.*); move them away") as caught:
            convert(tmp_path / "out", "new", is_file=False, overwrite=True)
    kept = Path(re.findall(r"kept in (.*); move", str(caught.value))[0])
    assert (kept / "a").read_text() == "mine" and text_of(tmp_path / "out") == "new"


@pytest.mark.parametrize("exchange", [True, False])
def test_what_comes_into_the_old_after_the_swap_is_kept_and_named(tmp_path, monkeypatch, exchange):
    """By a process that has the old folder open, under the name of a file of the new one."""
    put(tmp_path / "out", "old", is_file=False)
    real = staging_folder.remove_files_by_name

    def late(folder: Path, names: Collection[str]) -> None:
        if "gone" in names:
            (folder / "a").write_text("mine")
        real(folder, names)

    monkeypatch.setattr(staging_folder, "remove_files_by_name", late)
    if not exchange:
        monkeypatch.setattr(staging_folder, "exchange_paths", lambda a, b: False)
    (tmp_path / "out/a").rename(tmp_path / "out/gone")
    with pytest.raises(DestinationExistsError, match=r"out is written; .* are kept in (.*); move them away") as caught:
        convert(tmp_path / "out", "new", is_file=False, overwrite=True)
    assert text_of(tmp_path / "out") == "new"
    kept = Path(re.findall(r"kept in (.*); move", str(caught.value))[0])
    assert [(path.name, path.read_text()) for path in kept.iterdir()] == [("a", "mine")]
    with pytest.raises(DestinationExistsError, match=r": a; move"):
        convert(tmp_path / "out", "newer", is_file=False, overwrite=True)
    assert (kept / "a").read_text() == "mine"


def test_a_folder_of_the_old_that_is_not_removed_is_not_taken_for_an_added_file(tmp_path, monkeypatch):
    put(tmp_path / "out", "old", is_file=False)
    failures, real = [OSError(errno.EIO, "injected")], Path.rmdir

    def fail_once(folder: Path) -> None:
        if folder.name == "deep" and failures:
            raise failures.pop()
        real(folder)

    monkeypatch.setattr(Path, "rmdir", fail_once)
    convert(tmp_path / "out", "new", is_file=False, overwrite=True)
    assert not failures and text_of(tmp_path / "out") == "new"
    assert names(tmp_path) == ["out"]


@BOTH
def test_nothing_but_what_is_named_is_replaced(tmp_path, is_file):
    put(tmp_path / "out", "old", is_file=is_file)
    known = there(tmp_path / "out", is_file=is_file)
    for wrong in (
        {},
        dict.fromkeys(known, 4),
        {name: size for name, size in known.items() if name not in ("a", "out")},
    ):
        with location_of(tmp_path / "out", is_file=is_file).claim(overwrite=True, resume=False) as claim:
            fill(claim, "new")
            with pytest.raises(DestinationExistsError, match="were not there at the start"):
                publish(claim, wrong)
    assert_alone(tmp_path / "out", "old")


CHILD = """
import sys, time
from pathlib import Path
from ckpt_tools.stores.local.location import LocalOutputLocation
from ckpt_tools.stores.output_names import OutputForm
form = OutputForm("out" if sys.argv[2] == "True" else None)
with LocalOutputLocation(Path(sys.argv[1]), form=form).claim(overwrite=sys.argv[3] == "True", resume=False) as claim:
    handle = claim.destination.begin_file("half/written", 1 << 20)
    claim.destination.write_part("half/written", handle, 0, 0, b"half")
    claim.log.append(b"log")
    print("writing", flush=True)
    time.sleep(60)
"""


@contextmanager
def another_writer(target: Path, *, is_file: bool, overwrite: bool = False) -> Iterator[subprocess.Popen[str]]:
    """A process that has begun to write ``target`` and takes its time."""
    command = [sys.executable, "-c", CHILD, str(target), str(is_file), str(overwrite)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None and child.stdout.readline() == "writing\n"
        try:
            yield child
        finally:
            child.kill()


@BOTH
def test_a_second_writer_is_told(tmp_path, is_file):
    with another_writer(tmp_path / "out", is_file=is_file):
        with pytest.raises(DestinationExistsError, match="another process is writing") as caught:
            convert(tmp_path / "out", "new", is_file=is_file)
        assert caught.value.exit_code == 8
        assert (tmp_path / ".out.ckpt-tools-partial/output/half/written").read_bytes()[:4] == b"half"
    with LocalOutputLocation(tmp_path / "own").claim(overwrite=False, resume=False) as first:
        with pytest.raises(DestinationExistsError, match="another process is writing"):
            convert(tmp_path / "own", "second, of this process", is_file=False)
        fill(first, "first")
        publish(first)
    assert text_of(tmp_path / "own") == "first"


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize(
    "name", ["notes.txt", "output/notes.txt", "output/a/b", "link", "output/link", "1.log/x", "empty/"]
)
def test_what_is_not_ours_is_never_cleaned_away(tmp_path, name, resume):
    put(tmp_path / "mine", "precious", is_file=False)
    stranger = tmp_path / ".out.ckpt-tools-partial" / name
    stranger.parent.mkdir(parents=True)
    if name.endswith("link"):
        stranger.symlink_to(tmp_path / "mine")
    elif name.endswith("/"):
        stranger.mkdir()
    else:
        stranger.write_text("mine")
    note(tmp_path / "out", "a", "deep/b")
    before = sorted(tmp_path.rglob("*"))
    for _ in range(2):
        with pytest.raises(DestinationExistsError, match=r"did not write.*; move them away"):
            LocalOutputLocation(tmp_path / "out").claim(overwrite=False, resume=resume).__enter__()
    assert sorted(tmp_path.rglob("*")) == before
    assert all(left.kind == "unfinished output" for left in LocalOutputLocation(tmp_path / "out").clean())
    assert os.path.lexists(stranger)
    assert text_of(tmp_path / "mine") == "precious"


def test_a_link_in_the_place_of_the_staging_folder_is_refused(tmp_path):
    put(tmp_path / "mine", "precious", is_file=False)
    (tmp_path / ".out.ckpt-tools-partial").symlink_to("mine")
    with pytest.raises(StoreError, match="cannot write there"):
        convert(tmp_path / "out", "new", is_file=False)
    assert text_of(tmp_path / "mine") == "precious"


@BOTH
def test_what_somebody_else_put_there_meanwhile_is_kept(tmp_path, is_file):
    with location_of(tmp_path / "out", is_file=is_file).claim(overwrite=False, resume=False) as claim:
        fill(claim, "new")
        put(tmp_path / "out", "theirs", is_file=is_file)
        with pytest.raises(DestinationExistsError):
            publish(claim)
    assert_alone(tmp_path / "out", "theirs")


RACE = """
import sys
from pathlib import Path
from ckpt_tools.errors import DestinationExistsError
from ckpt_tools.stores.local.location import LocalOutputLocation
published = 0
while published < 30:
    text = f"{sys.argv[2]} {published}".encode()
    try:
        with LocalOutputLocation(Path(sys.argv[1])).claim(overwrite=True, resume=False) as claim:
            for name in ("a", "deep/b"):
                handle = claim.destination.begin_file(name, len(text))
                claim.destination.write_part(name, handle, 0, 0, text)
                claim.destination.finish_file(name, handle, [""])
            there = LocalOutputLocation(Path(sys.argv[1])).list_contents()
            claim.publish_files(["a", "deep/b"], {} if there is None else there.files)
        published += 1
    except DestinationExistsError:
        pass
"""


def test_writers_that_race_publish_whole_outputs_or_are_told(tmp_path):
    command = [sys.executable, "-c", RACE, str(tmp_path / "out")]
    children = [subprocess.Popen([*command, name], stderr=subprocess.PIPE, text=True) for name in "xyz"]
    complaints = [child.communicate(timeout=60)[1] for child in children]
    assert complaints == ["", "", ""]
    assert names(tmp_path) == ["out"]
    assert text_of(tmp_path / "out") in ("x 29", "y 29", "z 29")


class TestPlaces:
    @pytest.mark.parametrize("is_there", [True, False])
    def test_a_link_to_a_folder_stands_for_the_folder(self, tmp_path, is_there):
        if is_there:
            put(tmp_path / "disk/real", "old", is_file=False)
        (tmp_path / "out").symlink_to("disk/real")
        convert(tmp_path / "out", "new", is_file=False, overwrite=True)
        assert (tmp_path / "out").is_symlink()
        assert_alone(tmp_path / "disk/real", "new")

    def test_a_link_to_a_file_is_replaced_and_the_file_kept(self, tmp_path):
        (tmp_path / "blob").write_text("blob")
        (tmp_path / "out").symlink_to("blob")
        with pytest.raises(DestinationExistsError):
            convert(tmp_path / "out", "new", is_file=True)
        convert(tmp_path / "out", "new", is_file=True, overwrite=True)
        assert ((tmp_path / "blob").read_text(), (tmp_path / "out").read_text()) == ("blob", "new")
        assert not (tmp_path / "out").is_symlink()

    def test_the_working_folder_is_a_place(self, tmp_path, monkeypatch):
        (tmp_path / "here").mkdir()
        monkeypatch.chdir(tmp_path / "here")
        convert(Path(), "new", is_file=False)
        assert text_of(tmp_path / "here") == "new"

    @pytest.mark.parametrize("place", ["/proc", "/"])
    def test_a_mount_point_is_refused(self, place):
        with pytest.raises(UsageError, match="is a mount point"):
            LocalOutputLocation(Path(place)).claim(overwrite=True, resume=False).__enter__()

    @pytest.mark.parametrize(
        ("place", "said"),
        [("/proc/nowhere/out", "cannot write"), ("file/out", "cannot write"), ("x" * 250, "looking failed: File name")],
    )
    def test_where_no_folder_can_be_made_is_a_store_error(self, tmp_path, place, said, monkeypatch):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "file").write_text("")
        with pytest.raises(StoreError, match=said):
            convert(Path(place), "new", is_file=False)


def test_what_a_killed_run_left_beside_the_output_is_not_published(tmp_path):
    with LocalOutputLocation(tmp_path / "out").claim(overwrite=False, resume=True) as claim:
        fill(claim, "new")
        write(claim, "deep/ckpt-tools.digests.json", "{}")
        publish(claim)
    assert text_of(tmp_path / "out") == "new"
    assert names(tmp_path / "out/deep") == ["b"]

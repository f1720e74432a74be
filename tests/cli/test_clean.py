"""``ckpt-tools clean``: what killed runs left, all of it and nothing else, and never what a live one is writing."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import ckpt_tools
from ckpt_tools.errors import DestinationExistsError
from ckpt_tools.stores.local.place import staged
from ckpt_tools.stores.output_form import Folder

WRITER = """
import sys, time
from pathlib import Path
from ckpt_tools.stores.local.place import staged
from ckpt_tools.stores.output_form import Folder, SingleFile
form = SingleFile("out") if sys.argv[2] == "True" else Folder()
with staged(Path(sys.argv[1]), form, overwrite=True) as staging:
    staging.store.create("half", 1000)
    staging.log.append(b"log")
    print("writing", flush=True)
    time.sleep(60)
"""

BOTH = pytest.mark.parametrize("is_file", [True, False], ids=["file", "folder"])


@contextmanager
def writing(target: Path, *, is_file: bool) -> Iterator[subprocess.Popen[str]]:
    """A process that writes to ``target``, and is killed in the end."""
    command = [sys.executable, "-c", WRITER, str(target), str(is_file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None and child.stdout.readline() == "writing\n"
        try:
            yield child
        finally:
            child.kill()


def killed(target: Path, *, is_file: bool) -> None:
    with writing(target, is_file=is_file):
        pass


def run(*words: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ckpt_tools", "clean", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@BOTH
def test_what_a_killed_run_left_is_listed_and_removed(tmp_path, is_file):
    killed(tmp_path / "out", is_file=is_file)
    (tmp_path / ".others.ckpt-tools-partial").mkdir()
    (tmp_path / ".out.ckpt-tools-partial-not").mkdir()
    before = names(tmp_path)
    listed = ckpt_tools.clean(tmp_path / "out", dry_run=True)
    assert ([(left.kind, left.num_bytes) for left in listed.leftovers], listed.is_removed) == (
        [("unfinished output", 1003)],
        False,
    )
    assert names(tmp_path) == before
    removed = ckpt_tools.clean(tmp_path / "out")
    assert (removed.leftovers, removed.is_removed) == (listed.leftovers, True)
    assert names(tmp_path) == [".others.ckpt-tools-partial", ".out.ckpt-tools-partial-not"]
    assert ckpt_tools.clean(tmp_path / "out").leftovers == ()


@BOTH
def test_the_destination_itself_is_kept(tmp_path, is_file):
    if is_file:
        (tmp_path / "out").write_text("mine")
    else:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "model").write_text("mine")
    killed(tmp_path / "out", is_file=is_file)
    assert len(ckpt_tools.clean(tmp_path / "out").leftovers) == 1
    assert names(tmp_path) == ["out"]
    assert (tmp_path / "out" if is_file else tmp_path / "out" / "model").read_text() == "mine"


@pytest.mark.parametrize("dry_run", [False, True])
def test_a_run_under_way_is_left_alone(tmp_path, dry_run):
    with writing(tmp_path / "out", is_file=False):
        with pytest.raises(DestinationExistsError, match="another process is writing"):
            ckpt_tools.clean(tmp_path / "out", dry_run=dry_run)
        assert (tmp_path / ".out.ckpt-tools-partial/output/half").stat().st_size == 1000


def test_looking_does_not_disturb_who_writes_afterwards(tmp_path):
    killed(tmp_path / "out", is_file=False)
    ckpt_tools.clean(tmp_path / "out", dry_run=True)
    with staged(tmp_path / "out", Folder(), overwrite=False):
        pass


def test_what_was_moved_aside_is_put_back(tmp_path):
    """Where two folders cannot be swapped, a kill can leave the old one under another name alone."""
    aside = tmp_path / ".out.ckpt-tools-replaced"
    aside.mkdir()
    (aside / "model").write_text("mine")
    found = ckpt_tools.clean(tmp_path / "out").leftovers
    assert [left.kind for left in found] == ["output moved aside, to be put back"]
    assert (names(tmp_path), (tmp_path / "out/model").read_text()) == (["out"], "mine")


def test_what_was_moved_aside_and_replaced_is_removed(tmp_path):
    """As far as it was written down before it was moved: no more can be known to be ours."""
    for name, text in (("out", "new"), (".out.ckpt-tools-replaced", "old")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model").write_text(text)
    assert ckpt_tools.clean(tmp_path / "out").leftovers == ()
    assert (tmp_path / ".out.ckpt-tools-replaced/model").read_text() == "old"
    (tmp_path / ".out.ckpt-tools-partial").mkdir()
    (tmp_path / ".out.ckpt-tools-partial/names").write_text('"model"\n')
    kinds = ["unfinished output", "replaced output"]
    assert [left.kind for left in ckpt_tools.clean(tmp_path / "out").leftovers] == kinds
    assert (names(tmp_path), (tmp_path / "out/model").read_text()) == (["out"], "new")


def test_a_link_of_our_name_is_not_ours(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis").write_text("mine")
    for name in (".out.ckpt-tools-partial", ".out.ckpt-tools-replaced"):
        (tmp_path / name).symlink_to("mine")
    assert ckpt_tools.clean(tmp_path / "out").leftovers == ()
    assert (tmp_path / "mine/thesis").read_text() == "mine"


def test_a_link_to_a_folder_stands_for_the_folder(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to("disk/real")
    killed(tmp_path / "disk/real", is_file=False)
    assert len(ckpt_tools.clean(tmp_path / "out").leftovers) == 1
    assert names(tmp_path / "disk") == []


def test_where_nothing_is_nothing_is_made(tmp_path):
    assert ckpt_tools.clean(tmp_path / "no/such/out").leftovers == ()
    assert names(tmp_path) == []


def test_the_command(tmp_path):
    killed(tmp_path / "out", is_file=False)
    listed = run(tmp_path / "out", "--dry-run")
    assert (listed.returncode, "unfinished output, 1.00 kB" in listed.stdout) == (0, True), listed.stderr
    removed = run(tmp_path / "out", "--json")
    report = json.loads(removed.stdout)
    assert (report["is_removed"], report["num_bytes"], len(report["leftovers"])) == (True, 1003, 1)
    assert "no leftovers" in run(tmp_path / "out").stdout


def test_the_command_on_a_run_under_way(tmp_path):
    with writing(tmp_path / "out", is_file=False):
        refused = run(tmp_path / "out")
    assert (refused.returncode, refused.stderr.count("\n")) == (8, 1)
    assert "another process is writing" in refused.stderr

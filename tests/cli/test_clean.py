"""``ckpt-tools clean``: what killed runs left, all of it and nothing else, and never what a live one is writing."""

import json
from pathlib import Path

import pytest

import ckpt_tools
from ckpt_tools.errors import DestinationExistsError
from tests.stores.local.test_location import BOTH, another_writer, names, put
from tests.support.commands import printed, run_command

HALF_BYTES = 1 << 20
"""Of the file that ``another_writer`` has begun."""


def killed(target: Path, *, is_file: bool = False) -> None:
    with another_writer(target, is_file=is_file, overwrite=True):
        pass


@BOTH
@pytest.mark.parametrize("there", [False, True])
def test_what_a_killed_run_left_is_listed_and_removed_and_nothing_else(tmp_path, is_file, there):
    if there:
        put(tmp_path / "out", "mine", is_file=is_file)
    killed(tmp_path / "out", is_file=is_file)
    (tmp_path / ".others.ckpt-tools-partial").mkdir()
    (tmp_path / ".out.ckpt-tools-partial-not").mkdir()
    before = names(tmp_path)
    listed = ckpt_tools.clean(tmp_path / "out", dry_run=True)
    assert [(left.kind, left.num_bytes) for left in listed.leftovers] == [("unfinished output", HALF_BYTES + 3)]
    assert (listed.is_removed, names(tmp_path)) == (False, before)
    removed = ckpt_tools.clean(tmp_path / "out")
    assert (removed.leftovers, removed.is_removed) == (listed.leftovers, True)
    assert names(tmp_path) == [name for name in before if name != ".out.ckpt-tools-partial"]
    assert not there or (tmp_path / ("out" if is_file else "out/a")).read_text() == "mine"
    assert ckpt_tools.clean(tmp_path / "out").leftovers == ()


def test_a_run_under_way_is_left_alone(tmp_path):
    with another_writer(tmp_path / "out", is_file=False):
        for dry_run in (False, True):
            with pytest.raises(DestinationExistsError, match="another process is writing"):
                ckpt_tools.clean(tmp_path / "out", dry_run=dry_run)
        refused = run_command("clean", tmp_path / "out")
        assert (refused.code, refused.err.count("\n"), "another process is writing" in refused.err) == (8, 1, True)
        assert (tmp_path / ".out.ckpt-tools-partial/output/half/written").stat().st_size == HALF_BYTES


def test_what_was_moved_aside_is_put_back(tmp_path):
    """Where two folders cannot be swapped, a kill can leave the old one under another name alone."""
    put(tmp_path / ".out.ckpt-tools-replaced", "mine", is_file=False)
    found = ckpt_tools.clean(tmp_path / "out").leftovers
    assert [left.kind for left in found] == ["output moved aside, to be put back"]
    assert (names(tmp_path), (tmp_path / "out/a").read_text()) == (["out"], "mine")


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


def test_links(tmp_path):
    """One of our name is not ours; one to a folder stands for the folder."""
    put(tmp_path / "mine", "mine", is_file=False)
    for name in (".out.ckpt-tools-partial", ".out.ckpt-tools-replaced"):
        (tmp_path / name).symlink_to("mine")
    assert ckpt_tools.clean(tmp_path / "out").leftovers == ()
    assert (tmp_path / "mine/a").read_text() == "mine"
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to("disk/real")
    killed(tmp_path / "disk/real")
    assert len(ckpt_tools.clean(tmp_path / "link").leftovers) == 1
    assert names(tmp_path / "disk") == []


def test_the_command(tmp_path):
    assert "no leftovers" in printed("clean", tmp_path / "no/such/out") and names(tmp_path) == []
    killed(tmp_path / "out")
    assert "unfinished output, 1.05 MB" in printed("clean", tmp_path / "out", "--dry-run")
    report = json.loads(printed("clean", tmp_path / "out", "--json"))
    assert (report["is_removed"], report["num_bytes"], len(report["leftovers"])) == (True, HALF_BYTES + 3, 1)

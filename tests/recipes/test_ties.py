"""Tied tensors of the source: a recipe gives both new names, or is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ckpt_tools
from ckpt_tools.errors import UnsupportedError

pytestmark = pytest.mark.quick

HEAD = 'about = "a"\nleft = "a"\nright = "b"\n'


def line(left: str, right: str, more: str = "") -> str:
    return f"[[map]]\nleft = {left}\nright = {right}\n{more}\n"


def convert(folder: Path, recipe: str) -> None:
    """``a`` and ``b`` of a torch file, which share a storage, in the names of a recipe."""
    tied = torch.arange(6.0).reshape(3, 2)
    torch.save({"a": tied, "b": tied}, folder / "tied.pt")
    (folder / "mine.toml").write_text(HEAD + recipe)
    ckpt_tools.convert(folder / "tied.pt", folder / "out.pt", recipe=folder / "mine.toml")


def test_both_get_new_names(tmp_path):
    convert(tmp_path, line('"a"', '"x"') + line('"b"', '"y"'))
    found = torch.load(tmp_path / "out.pt")
    assert found.keys() == {"x", "y"}
    assert found["x"].data_ptr() == found["y"].data_ptr()
    assert torch.equal(found["y"], torch.arange(6.0).reshape(3, 2))


def test_a_number_is_added_to_both(tmp_path):
    convert(tmp_path, line('"a"', '"x"', "add = 1") + line('"b"', '"y"', "add = 1"))
    found = torch.load(tmp_path / "out.pt")
    assert torch.equal(found["x"], torch.arange(1.0, 7.0).reshape(3, 2))
    assert torch.equal(found["y"], found["x"])


def test_a_tied_name_that_is_dropped_is_gone(tmp_path):
    convert(tmp_path, 'drop = { left = ["b"] }\n' + line('"a"', '"x"'))
    assert torch.load(tmp_path / "out.pt").keys() == {"x"}


BROKEN = {
    "a new shape of the owner": line('{ a = "V H" }', '{ x = "H V" }') + line('"b"', '"y"'),
    "a new shape of the tied name": line('"a"', '"x"') + line('{ b = "V H" }', '{ y = "H V" }'),
    "both in one": line('{ a = "a:V H", b = "b:V H" }', '{ x = "(a:V b:V) H" }'),
    "a number added to the owner": line('"a"', '"x"', "add = 1") + line('"b"', '"y"'),
    "a number added to the tied name": line('"a"', '"x"') + line('"b"', '"y"', "add = 1"),
    "a number added to the owner, and the other kept": 'others = "same"\n' + line('"a"', '"x"', "add = 1"),
    "a dtype of the owner": line('"a"', '"x"', 'dtype = { right = "bfloat16" }') + line('"b"', '"y"'),
    "a dtype of the tied name": line('"a"', '"x"') + line('"b"', '"y"', 'dtype = { right = "bfloat16" }'),
    "the owner dropped": 'drop = { left = ["a"] }\n' + line('"b"', '"y"'),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_tie_that_would_break_is_refused(case, tmp_path):
    with pytest.raises(UnsupportedError, match="b is tied to"):
        convert(tmp_path, BROKEN[case])
    assert not (tmp_path / "out.pt").exists()

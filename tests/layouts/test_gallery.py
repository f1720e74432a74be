"""docs/layouts.md is what the corpus says."""

from __future__ import annotations

from pathlib import Path

import pytest

from fixtures.corpus import layouts
from tests.layouts.gallery import PAGE, page, pattern, tree

LINKED = [PAGE.parent / "index.md", PAGE.parent.parent / "README.md"]


@pytest.mark.timeout(3600)
def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "write it anew with python -m tests.layouts"


@pytest.mark.parametrize("name", layouts())
def test_every_layout_is_on_the_page(name: str) -> None:
    assert f"\n### {name}\n" in PAGE.read_text()


@pytest.mark.parametrize("path", LINKED, ids=lambda path: path.name)
def test_people_find_the_page(path: Path) -> None:
    assert "layouts.md" in path.read_text()


def test_files_that_differ_in_numbers_are_one_line() -> None:
    files = [".metadata", "__0_0.distcp", "__1_0.distcp", "a/x.pt", "b/x.pt", "c/x.pt", "d/y.pt", "rank_0_of_2.bin"]
    assert tree(files) == [
        "a/    and 2 more folders with the same files",
        "    x.pt",
        "d/",
        "    y.pt",
        ".metadata",
        "__N_0.distcp    (2 files)",
        "rank_0_of_2.bin",
    ]


def test_names_of_chance_are_not_on_the_page() -> None:
    assert pattern("d/0123456789abcdef0123456789abcdef") == "d/HASH"
    assert tree(["d/0123456789abcdef0123456789abcdef"]) == ["d/", "    HASH    (one file or more)"]

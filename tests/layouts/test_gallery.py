"""docs/layouts.md and docs/layouts/ are what the generator makes of the corpus."""

from __future__ import annotations

import pytest

from fixtures.corpus import layouts
from tests.layouts.gallery import DOCS, FAMILIES, FOLDER, INDEX, index, page_of, pages, pattern, tree

pytestmark = pytest.mark.extended

LINKED = [DOCS / "index.md", DOCS.parent / "README.md"]


def written() -> dict[str, str]:
    """The pages as they are in docs/, by path."""
    found = [DOCS / INDEX, *(DOCS / FOLDER).iterdir()]
    return {path.relative_to(DOCS).as_posix(): path.read_text() for path in found}


@pytest.mark.timeout(3600)
def test_the_pages_are_up_to_date():
    assert written() == pages(), "write them again with python -m tests.layouts"


def test_every_family_has_a_page_and_a_link():
    assert {*written()} == {INDEX, *map(page_of, FAMILIES)}
    text = written()[INDEX]
    assert text == index(text[text.index("- `adapter_config.json`") :])


@pytest.mark.parametrize("name", layouts())
def test_every_layout_is_on_a_page(name):
    assert sum(f"\n- **{name}**: " in text for text in written().values()) == 1


@pytest.mark.parametrize("path", LINKED, ids=lambda path: path.name)
def test_people_find_the_page(path):
    assert "layouts.md" in path.read_text()


def test_files_that_differ_in_numbers_are_one_line():
    files = [".metadata", "__0_0.distcp", "__1_0.distcp", "a/x.pt", "b/x.pt", "c/x.pt", "d/y.pt", "rank_0_of_2.bin"]
    assert tree(files) == [
        "a/    and 2 more folders with the same files",
        "    x.pt",
        "d/",
        "    y.pt",
        ".metadata",
        "__N_0.distcp",
        "rank_0_of_2.bin",
    ]


def test_names_of_chance_are_not_on_the_page():
    assert pattern("d/0123456789abcdef0123456789abcdef") == "d/HASH"
    assert tree(["d/0123456789abcdef0123456789abcdef"]) == ["d/", "    HASH"]

"""Follows docs/start.md and docs/tasks/ as they are printed: files, commands and Python, and compares what is printed.

All pages are followed in one folder, where the first two make the samples that the others name. With
``pytest --write-pages``, the pages get the outputs that there were.
"""

import os
import re
from pathlib import Path

import pytest

from tests.docs.test_words import inline_commands, runnable
from tests.support.pages import ROOT, WRITE_PAGES, Reader

pytestmark = pytest.mark.extended

DOCS = ROOT / "docs"
TASKS = DOCS / "tasks"
SAMPLES = (DOCS / "start.md", TASKS / "samples.md")
PAGES = sorted(set(TASKS.glob("*.md")) - {TASKS / "index.md", TASKS / "samples.md"})
"""`another-world-size.md` and so on; each of them needs the samples alone."""

LONG = ("from-trainers", "zero-to-fsdp2")
"""Pages that train again, as the samples do, or start many processes: for the soak."""


@pytest.fixture(scope="module")
def reader(tmp_path_factory, s3_server):
    with Reader(tmp_path_factory.mktemp("reader"), s3_server.environment) as reader:
        for page in SAMPLES:
            check(page, reader)
        yield reader


def check(page: Path, reader: Reader) -> None:
    followed = reader.follow(page)
    if WRITE_PAGES in os.environ:
        page.write_text(followed)
    assert followed == page.read_text()
    for name, words in inline_commands(page):
        line = runnable(reader.folder, name, words)
        if line is not None:
            reader.run_commands(f"$ {line}\n")


@pytest.mark.timeout(1800)  # the first makes the samples of all
@pytest.mark.parametrize(
    "page",
    [pytest.param(page, id=page.stem, marks=pytest.mark.soak if page.stem in LONG else ()) for page in PAGES],
)
def test_the_page_runs_as_printed(page, reader):
    check(page, reader)


def test_at_least_thirty_recipes_are_listed():
    """The table links each heading of the pages that hold several recipes."""
    linked = set(re.findall(r"\]\(([\w-]+\.md)(?:#[\w-]+)?\)", (TASKS / "index.md").read_text()))
    assert {page.name for page in PAGES} <= linked
    assert len(re.findall(r"^\| .*\.md[#)]", (TASKS / "index.md").read_text(), re.MULTILINE)) > 50

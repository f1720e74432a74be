"""Follows docs/start.md and docs/tasks/ as they are printed: files, commands and Python, and compares what is printed.

All pages are followed in one folder, where the first two make the samples that the others name. With
``pytest --write-pages``, the pages get the outputs that there were.
"""

import os
import re
from pathlib import Path

import pytest

from tests.docs.test_words import inline_commands, runnable
from tests.support.pages import ROOT, WRITE_PAGES, Reader, blocks, commands, printed

pytestmark = pytest.mark.extended

DOCS = ROOT / "docs"
TASKS = DOCS / "tasks"
SAMPLES = (DOCS / "start.md", TASKS / "samples.md")
PAGES = sorted(set(TASKS.glob("*.md")) - {TASKS / "index.md", TASKS / "samples.md"})
"""`another-world-size.md` and so on; each of them needs the samples alone."""

LONG = ("from-trainers", "zero-to-fsdp2", "in-ci")
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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_names_only_samples_that_are_made(page):
    """Each `runs/...` in a page is one of the samples, or is written by an earlier command of the page."""
    samples = (TASKS / "samples.md").read_text()
    text = page.read_text()
    lines = [command.text for block in blocks(page, "console") for command in commands(block)]
    for name in re.findall(r"\bruns/[\w.-]+\w", text):
        written = any(re.search(rf"^\S+ \S+ \S+ {re.escape(name)}\b", line) for line in lines)
        assert name in samples or written, name


@pytest.mark.parametrize(
    ("output", "page", "expected"),
    [
        ("a: 3 in 0.02 s (1.5 MB/s)\n", "a: 3 in 1.20 s\n    (9.1 kB/s)\n", True),
        ("a: 3 in 0.02 s (1.5 MB/s)\n", "a: 4 in 0.02 s (1.5 MB/s)\n", False),
        ("first\nsecond\nthird\n", "first\n...\n", True),
        ("first\nsecond\nthird\n", "...\nthird\n", True),
        ("first\nsecond\nthird\n", "second\n...\n", False),
        ("first\nsecond\n", "first\n", False),
    ],
)
def test_an_output_is_compared(output, page, expected):
    assert (printed(output, page) == page) is expected


FOLLOWED = {
    "```console\n$ echo one\ntwo\n```\n": "```console\n$ echo one\none\n```\n",
    (
        "```console\n$ echo one \\\n  two\nthree\n$ echo 4\n```\n"
    ): "```console\n$ echo one \\\n  two\none two\n$ echo 4\n```\n",
    "```python\nprint(1)\n```\n\n```\n2\n```\n": "```python\nprint(1)\n```\n\n```\n1\n```\n",
    "```python\nn = 1\n```\n\n```\n2\n```\n": "```python\nn = 1\n```\n\n```\n```\n",
}


@pytest.mark.parametrize("text", FOLLOWED)
def test_a_page_gets_the_outputs_that_there_were(text, tmp_path):
    (tmp_path / "page.md").write_text(text)
    with Reader(tmp_path) as reader:
        assert reader.follow(tmp_path / "page.md") == FOLLOWED[text]


@pytest.mark.parametrize(
    "text",
    [
        "```console\n$ false\n```\n",
        "```console\n$ echo one\nError: two\n```\n",
        "```console\n$ echo one\none\n$ exit 3\n$ echo two\n```\n",
        "```bash\nfalse\n```\n",
        "```python\nraise SystemExit(0)\n```\n",
    ],
)
def test_what_fails_on_a_page_is_found(text, tmp_path):
    (tmp_path / "page.md").write_text(text)
    with Reader(tmp_path) as reader, pytest.raises(AssertionError):
        reader.follow(tmp_path / "page.md")

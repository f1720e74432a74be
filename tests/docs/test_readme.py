"""README and the front page of the site: what their commands print on the samples is what they show."""

import os
import re

import pytest

from tests.support.pages import ROOT, WRITE_PAGES, Reader, blocks, commands

README = ROOT / "README.md"
FRONT_PAGE = ROOT / "docs/index.md"
MAX_LINES = 160


@pytest.mark.quick
@pytest.mark.parametrize("page", [README, FRONT_PAGE], ids=lambda page: page.name)
def test_the_commands_print_what_the_page_shows(page, tmp_path):
    """In order and in one folder; without blocks that show no output, unless they write the samples."""
    with Reader(tmp_path) as reader:
        for block in blocks(page, "console"):
            if any(each.output or " samples " in each.text for each in commands(block)):
                found = reader.run_commands(block)
                if WRITE_PAGES in os.environ:
                    page.write_text(page.read_text().replace(block, found))
                else:
                    assert found == block


@pytest.mark.quick
def test_readme_is_short_and_the_figures_of_the_front_page_are_those_of_readme():
    text = README.read_text()
    assert len(text.splitlines()) <= MAX_LINES
    speed = text.partition("<!-- speed:start -->")[2].partition("<!-- speed:end -->")[0]
    figures = re.findall(r"[\d.,]+ (?:s|GB|MB)\b", FRONT_PAGE.read_text().partition("<!-- figures -->")[2])
    assert figures
    assert all(figure in speed for figure in figures), figures

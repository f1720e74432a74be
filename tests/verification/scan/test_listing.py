"""The list of ``docs/scanning_list.md`` is that of the code."""

from __future__ import annotations

from pathlib import Path

from ckpt_tools.serialization.pickle.allowed_calls import ARGUMENTS, CALLS
from tests.verification.scan.listing import lines

PAGE = Path(__file__).parents[3] / "docs" / "scanning_list.md"


def test_the_page_shows_the_list():
    text = PAGE.read_text()
    assert "\n".join(lines()) == text.partition("-->")[2].strip()


def test_every_interpreted_call_is_described():
    assert ARGUMENTS.keys() == CALLS.keys()

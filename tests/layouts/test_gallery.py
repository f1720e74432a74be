"""docs/layouts.md and the layouts in docs/formats/ are what the generator makes of the corpus."""

import pytest

from fixtures.corpus import layouts, make
from tests.layouts import gallery
from tests.layouts.gallery import DOCS, INDEX, PAGES
from tests.layouts.sample import KINDS, REFUSED, TEST
from tests.support.sweep import tiered

pytestmark = pytest.mark.extended


def written() -> dict[str, str]:
    return {path: (DOCS / path).read_text() for path in (INDEX, *PAGES.values())}


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_the_pages_are_up_to_date():
    """Makes every layout."""
    assert written() == gallery.pages(), "write them again with python -m tests.layouts"


def flat(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize("name", tiered(layouts(), test=(), extended={*TEST, *KINDS, *REFUSED[::4]}))
def test_the_files_of_a_layout_and_what_is_said_of_it_are_on_its_page(name):
    made = make(name)
    page = written()[PAGES[gallery._page(made)]]
    assert gallery.without_numbers(gallery.shown_files(made)) in gallery.without_numbers(page)
    text = flat(page)
    assert flat(gallery.about(made)) in text
    assert made.layout.refusal is None or flat(gallery.message(made)) in text
    # What several layouts share is below them.
    assert all(flat(each) in text or flat(gallery.of_all_in(each)) in text for each in gallery.facts(made))


def test_every_family_and_layout_has_its_place_and_people_find_it():
    pages = written()
    text = pages[INDEX]
    assert text == gallery.index(text[text.index("- `adapter_config.json`") :])
    for name in layouts():
        assert sum(f"\n- **{name}**: " in each for each in pages.values()) == 1, name
    assert all("layouts.md" in page.read_text() for page in (DOCS / "index.md", DOCS.parent / "README.md"))

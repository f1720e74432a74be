"""The documentation as a site: built with warnings as errors, complete, offline, and readable on a telephone."""

import re
import subprocess
import sys
from collections import Counter
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import click
import pytest
from markdown_it import MarkdownIt

import ckpt_tools
from inference.batch.__main__ import main as predict
from inference.serving.__main__ import main as serve
from tests.inference.serving.http.browser import chromium
from tests.support.commands import all_commands
from training.__main__ import main as train

pytestmark = pytest.mark.extended

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
COMMANDS = {**all_commands(), "train": train, "predict": predict, "serve": serve}
SAMPLE = ("index", "cli/convert", "api/classes", "benchmarks")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def browser(site, tmp_path_factory):
    """A browser, and the address at which the site is served to it."""
    quiet = type("Quiet", (SimpleHTTPRequestHandler,), {"log_message": lambda *_: None})
    handler = partial(quiet, directory=str(site))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        with chromium(tmp_path_factory.mktemp("chromium")) as browser:
            address = f"http://127.0.0.1:{server.server_port}"
            browser.open(address)
            yield browser, address
        server.shutdown()


def test_every_page_is_in_the_navigation(site):
    """Pages that the navigation leaves out are warnings too; here each page is reached by links from the first."""
    reached, new = set(), {site / "index.html"}
    while new:
        page = new.pop()
        reached.add(page)
        links = re.findall(r'href="([^"#:?]+\.html)', page.read_text())
        new |= {(page.parent / link).resolve() for link in links} - reached
    assert {path for path in site.rglob("*.html") if path.name != "404.html"} <= reached
    assert all(path.is_file() for path in reached)
    pages = {path.relative_to(DOCS).with_suffix("") for path in DOCS.rglob("*.md")} - {Path("index_links")}
    assert pages <= {path.relative_to(site).with_suffix("") for path in site.rglob("*.html")}


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda page: page.relative_to(DOCS).as_posix())
def test_lists_and_tables_are_those_that_github_shows(site, page):
    """Python-Markdown takes a list without a blank line before it for text."""
    if page.name == "index_links.md":
        return
    shown = (site / page.relative_to(DOCS).with_suffix(".html")).read_text()
    article = shown.partition("<article")[2].partition("</article>")[0]
    assert blocks(article) == blocks(MarkdownIt().enable("table").render(page.read_text()))


def blocks(html: str) -> Counter[str]:
    return Counter(re.findall(r"<(li|ol|ul|tr|table|pre|blockquote|h[1-4])[\s>]", html))


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_option_is_on_the_page_of_its_command(site, name):
    text = (site / "cli" / f"{name.replace(' ', '-')}.html").read_text()
    assert COMMANDS[name].params
    for option in COMMANDS[name].params:
        if isinstance(option, click.Option) and not option.hidden:
            assert f'id="{max(option.opts, key=len)}"' in text, option.name


def test_nothing_is_loaded_from_elsewhere_and_every_public_name_is_in_the_reference(site):
    loads = r"<(?:script|link|img|iframe)\b[^>]*(?:src|href)=[\"']?(?:https?:)?//[^\s>]*"
    assert {load for page in site.rglob("*.html") for load in re.findall(loads, page.read_text())} == set()
    text = "".join(path.read_text() for path in (site / "api").rglob("*.html"))
    names = set(ckpt_tools.__all__) - {"__version__"}
    assert {name for name in names if f'id="ckpt_tools.{name}"' not in text} == set()


@pytest.mark.parametrize("width", [400, 1400])
@pytest.mark.parametrize("page", SAMPLE)
def test_no_page_is_wider_than_the_window(browser, page, width):
    tab, address = browser
    tab.resize(width, 1000, "light")
    tab.send("Page.navigate", url=f"{address}/{page}.html")
    tab.wait_for(f"document.readyState === 'complete' && location.pathname === '/{page}.html'")
    assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert tab.evaluate("document.querySelector('h1').getBoundingClientRect().right <= innerWidth")
    beside = "[...document.querySelectorAll('.md-typeset > :is(p, ul, ol, dl, pre, h2, h3)')]"
    assert tab.evaluate(f"{beside}.every((each) => each.getBoundingClientRect().right <= innerWidth)")

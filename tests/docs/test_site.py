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
from inference.forward.__main__ import main as verify_forward
from inference.serving.__main__ import main as serve
from tests.inference.serving.http.browser import chromium
from tests.support.commands import all_commands
from tests.support.pages import blocks as fenced_blocks
from tests.support.pages import commands
from training.__main__ import main as train

pytestmark = pytest.mark.extended

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
COMMANDS = {**all_commands(), "train": train, "predict": predict, "serve": serve, "verify-forward": verify_forward}
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


def open_page(browser, page: str):
    tab, address = browser
    tab.send("Page.navigate", url=f"{address}/{page}.html")
    tab.wait_for(f"document.readyState === 'complete' && location.pathname === '/{page}.html'")
    return tab


@pytest.mark.parametrize("page", ["index", "tasks/verify", "training"])
def test_the_copy_button_of_a_console_block_copies_its_commands_alone(browser, page):
    tab = open_page(browser, page)
    # The page selects what it copies in a text area of its own.
    area = "[...document.querySelectorAll('textarea')].at(-1).value"
    tab.evaluate(f"document.execCommand = () => {{ window.copied = {area}; return true }}")
    buttons = "document.querySelectorAll('.language-console [data-clipboard-target]')"
    shown = fenced_blocks(DOCS / f"{page}.md", "console")
    tab.wait_for(f"{buttons}.length === {len(shown)}", 20)
    for number, block in enumerate(shown):
        tab.evaluate(f"window.copied = ''; {buttons}[{number}].click()")
        wanted = "\n".join(command.text.strip() for command in commands(block))
        assert tab.wait_for("window.copied", 20).strip() == wanted


def test_the_navigation_has_seven_tabs(browser):
    tab = open_page(browser, "tasks/verify")
    tabs = tab.evaluate("[...document.querySelectorAll('.md-tabs__link')].map((each) => each.textContent.trim())")
    assert tabs == ["Start", "Tasks", "Formats", "Reference", "Training", "Inference", "Inside"]


def test_the_list_for_language_models_has_every_page_once(site):
    text = (site / "llms.txt").read_text()
    assert re.match(r"# ckpt-tools\n\n> .+\n\n## Start\n\n- \[Install\]\(install\.html\): .+\n", text)
    listed = re.findall(r"^- \[[^]]+\]\(([^)]+)\)", text, re.MULTILINE)
    pages = {path.relative_to(site).as_posix() for path in site.rglob("*.html")} - {"404.html", "index.html"}
    assert sorted(listed) == sorted(pages)
    assert all(line.count("[") == 1 for line in text.splitlines() if line.startswith("- ["))


@pytest.mark.parametrize("width", [400, 1400])
@pytest.mark.parametrize("page", SAMPLE)
def test_no_page_is_wider_than_the_window(browser, page, width):
    browser[0].resize(width, 1000, "light")
    tab = open_page(browser, page)
    assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert tab.evaluate("document.querySelector('h1').getBoundingClientRect().right <= innerWidth")
    beside = "[...document.querySelectorAll('.md-typeset > :is(p, ul, ol, dl, pre, h2, h3)')]"
    assert tab.evaluate(f"{beside}.every((each) => each.getBoundingClientRect().right <= innerWidth)")

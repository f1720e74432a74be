"""Every command and option has help, and what the documents name is there. ``tests/docs`` has the site and errors."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

import click
import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token

import ckpt_tools
from tests.support.commands import WITHOUT_FUNCTION, all_commands, function_of

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
ARCHITECTURE = (DOCS / "architecture.md").read_text()
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])
NOT_A_PAGE = {"index.md", "pages.md", "index_links.md"}
"""The front page, the list of pages itself, and definitions of links that precede README on a package index."""

NOT_A_NAME = {"ckpt_tools.state", "ckpt_tools.commands"}
"""A key in a file's header, and a group of entry points."""

COMMON = {"core", "planning", "stores", "serialization", "formats", "transfer", "verification", "cli", "testing"}
"""Packages that documents name without ``ckpt_tools``. The name ``torch`` alone means the framework."""

TREE = {"ckpt_tools", "tests", "docs", "benchmarks", "fixtures", "training", "inference"}
"""Folders at the root with which a path in a document begins."""

MAX_LINE = 120
MAX_LINES = 300
NOT_WRAPPED = re.compile(r"<!-- (\w+):start -->.*?<!-- \1:end -->", re.MULTILINE | re.DOTALL)
"""Parts that the benchmarks and the gallery of layouts write."""

NOT_WRAPPABLE = re.compile(
    r"^(left|right) = |^checkpoint-1500 |^ckpt_tools\.errors\.|^ +(in each:|result\.json|config\.json)"
)
"""Lines of code that are one line wherever they are: of a recipe in TOML, and rows of tables that commands print."""

COMMANDS = all_commands()


def test_every_command_is_a_function_and_every_option_has_help():
    for name, command in COMMANDS.items():
        assert name in WITHOUT_FUNCTION or callable(getattr(ckpt_tools, function_of(name)))
        for option in command.params:
            assert not isinstance(option, click.Option) or option.help, (name, option.name)


def test_every_room_has_its_place_in_the_house():
    rooms = {path.stem for path in Path(ckpt_tools.__file__).parent.iterdir() if not path.name.startswith(("_", "py."))}
    assert [room for room in sorted(rooms) if not re.search(rf"\b{room}\b", ARCHITECTURE)] == []


@cache
def tokens(page: Path) -> list[Token]:
    """Links, pictures and code in the text of a page."""
    blocks = MarkdownIt().enable("table").parse(page.read_text())
    return [token for block in blocks for token in block.children or ()]


def codes(page: Path) -> Iterator[str]:
    yield from (token.content for token in tokens(page) if token.type == "code_inline")


@cache
def anchors(page: Path) -> set[str]:
    """Where a link into the page can lead: its headings, as GitHub names them."""
    blocks = MarkdownIt().parse(page.read_text())
    headings = [after.content for block, after in pairwise(blocks) if block.type == "heading_open"]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def named(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def test_every_page_is_in_the_list_of_pages():
    """``pages.md`` links every page; ``layouts.md`` links those of formats, ``tasks/index.md`` those of its folder."""
    linked = {
        (page.parent / str(token.attrs["href"]).partition("#")[0]).resolve()
        for page in (DOCS / "pages.md", DOCS / "layouts.md", DOCS / "tasks" / "index.md")
        for token in tokens(page)
        if token.type == "link_open"
    }
    pages = {page for page in DOCS.rglob("*.md") if page.relative_to(DOCS).as_posix() not in NOT_A_PAGE}
    assert sorted(pages - linked) == []


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_a_page_is_short_and_what_it_links_and_names_is_there(page):
    text = page.read_text()
    lines = NOT_WRAPPED.sub("", text).splitlines()
    assert [line for line in lines if len(line) > MAX_LINE and not NOT_WRAPPABLE.match(line)] == []
    assert len(lines) <= MAX_LINES or not page.is_relative_to(DOCS)
    for token in tokens(page):
        link = str(token.attrs.get("href") or token.attrs.get("src") or "")
        if link and "://" not in link:
            path, _, anchor = link.partition("#")
            target = page.parent / path if path else page
            assert target.is_file(), link
            assert not anchor or anchor in anchors(target), link
    for code in codes(page):
        if code not in NOT_A_NAME and (parts := parts_of(code)) is not None:
            assert is_defined(parts), code
        for path in paths_of(code):
            assert (ROOT / path).exists() or (ROOT / "ckpt_tools" / path).exists(), code


def parts_of(code: str) -> list[str] | None:
    """Of a dotted name of ours, without ``ckpt_tools``."""
    found = re.fullmatch(r"(ckpt_tools\.)?((?:\w+\.)*\w+)(\(.*\))?", code)
    if found is None or found[2].split(".")[-1] in {"py", "md", "json", "digests"}:
        return None
    parts = found[2].split(".")
    return parts if found[1] or (len(parts) > 1 and parts[0] in COMMON) else None


def is_defined(parts: list[str]) -> bool:
    """Whether a path of modules leads to a module, or to a name that it defines."""
    path = ROOT / "ckpt_tools"
    while parts and ((path / parts[0]).is_dir() or (path / f"{parts[0]}.py").is_file()):
        path, parts = path / parts[0], parts[1:]
    module = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if parts and path == ROOT / "ckpt_tools":
        return parts[0] in ckpt_tools.__all__
    return not parts or parts[0] in names_in(ast.parse(module.read_text()).body)


def names_in(body: list[ast.stmt]) -> set[str]:
    defined = {node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    assigned = [node.targets for node in body if isinstance(node, ast.Assign)]
    annotated = [node.target for node in body if isinstance(node, ast.AnnAssign)]
    targets = [*(target for targets in assigned for target in targets), *annotated]
    return defined | {target.id for target in targets if isinstance(target, ast.Name)}


def paths_of(code: str) -> Iterator[str]:
    """Files and folders of ours that ``code`` names, also as modules that it runs. Names in capitals are to be filled
    in."""
    if module := re.search(r"python -m ([\w.]+)", code):
        path = module[1].replace(".", "/")
        if path.split("/")[0] in TREE:
            yield path if (ROOT / path).is_dir() else f"{path}.py"
        return
    is_path = re.fullmatch(r"[\w./-]+", code) and "/" in code and not re.search(r"\b[A-Z]+\b", code)
    if is_path and (code.split("/")[0] in {*TREE, *COMMON} or code.endswith(".py")):
        yield code

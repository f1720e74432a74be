"""The pages of the site that are generated when it is built: a page a command, and the Python reference; and what the
build adds to all pages: the commands that the copy button of a ``console`` block copies, and a list in ``llms.txt``.

MkDocs calls the functions ``on_...`` (``hooks`` in ``mkdocs.yml``); all others are pure. A page of a command is made of
what its ``--help`` writes, so that groups of options and examples are those of the terminal.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from html import escape, unescape
from inspect import getdoc, isclass, isfunction, signature
from itertools import pairwise
from pathlib import Path, PurePosixPath
from textwrap import dedent
from typing import Any

import click
from markdown_it import MarkdownIt
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import ckpt_tools
from ckpt_tools.cli.main import group
from inference.batch.__main__ import main as predict
from inference.forward.__main__ import main as verify_forward
from inference.serving.__main__ import main as serve
from tests.support.commands import WITHOUT_FUNCTION, all_commands, function_of
from training.__main__ import main as train

BESIDE = {"train": train, "predict": predict, "serve": serve, "verify-forward": verify_forward}
"""The commands that ``ckpt-tools`` itself looks up in the installed packages."""

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PICTURES = {path.relative_to(ROOT) for path in ROOT.glob("benchmarks/results/*.svg")}
FRONT_PAGE = "index.md"
REPOSITORY = "https://github.com/ckpt-tools/ckpt-tools"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages, and write out the folders of the navigation."""
    for path, text in {**command_pages(), **python_pages()}.items():
        files.append(File.generated(config, path, content=text))
    for picture in PICTURES:
        files.append(File.generated(config, picture.as_posix(), abs_src_path=str(ROOT / picture)))
    config.nav = written_out(config.nav, {each.src_uri for each in files.documentation_pages()} - paths(config.nav))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    if page.file.src_uri == FRONT_PAGE:
        page.meta["hide"] = ["navigation", "toc"]
    return indented(with_addresses(markdown, PurePosixPath("docs", page.file.src_uri).parent))


def on_page_content(html: str, **_: Any) -> str:
    return with_copied_commands(html)


def on_env(env: Any, config: MkDocsConfig, files: Files) -> None:
    """Write the list of pages, when all of them have been read."""
    front = files.get_file_from_path(FRONT_PAGE)
    files.append(File.generated(config, "llms.txt", content=llms_list(config.site_name, front.page)))


def written_out(entry: Any, pages: Iterable[str]) -> Any:
    """A part of the navigation with its pages in place of each path that ends in a slash, an index page first."""
    match entry:
        case dict():
            return {title: written_out(below, pages) for title, below in entry.items()}
        case list():
            parts = (written_out(each, pages) for each in entry)
            return [each for part in parts for each in (part if isinstance(part, list) else [part])]
        case str() if entry.endswith("/"):
            below = (page for page in pages if page.startswith(entry))
            return sorted(below, key=lambda page: (not page.endswith("/index.md"), page.removesuffix(".md")))
    return entry


def paths(entry: Any) -> set[str]:
    """The pages and folders in a part of the navigation."""
    if isinstance(entry, str):
        return {entry}
    return {path for below in (entry.values() if isinstance(entry, dict) else entry) for path in paths(below)}


def with_addresses(markdown: str, folder: PurePosixPath) -> str:
    """The links to files outside of ``docs``, from a page in ``folder``: pictures are copied into the site, and all
    other files are in the repository."""

    def address(link: re.Match[str]) -> str:
        target = (ROOT / folder / link[1]).resolve()
        if target.is_relative_to(DOCS):
            return link[0]
        path = target.relative_to(ROOT)
        if path in PICTURES:
            return f"]({os.path.relpath(path, folder.relative_to('docs'))})"
        return f"]({REPOSITORY}/{'tree' if target.is_dir() else 'blob'}/main/{path}{link[2] or ''})"

    return re.sub(r"\]\((\.\./[^)#\s]*)(#[^)\s]*)?\)", address, markdown)


def indented(markdown: str) -> str:
    """Content of list items with four spaces for each item around it, as Python-Markdown wants it. On GitHub the
    width of the marker is enough."""
    lines = markdown.splitlines()
    depths, widths = [0] * len(lines), [0] * len(lines)
    for token in MarkdownIt().parse(markdown):
        if token.type == "list_item_open" and token.map:
            first, end = token.map
            for number in range(first + 1, end):
                depths[number] += 1
                widths[number] = len(re.match(r"\s*\S+\s+", lines[first])[0])
    rows = zip(lines, depths, widths, strict=True)
    return "\n".join(line if line[:width].strip() else "    " * depth + line[width:] for line, depth, width in rows)


_CONSOLE = re.compile(r'<div class="language-console highlight">(<pre>.*?</pre>)', re.DOTALL)
_COMMAND = re.compile(r"^\$ ((?:.*\\\n)*.*)$", re.MULTILINE)


def with_copied_commands(html: str) -> str:
    """``console`` blocks with what their button copies in ``data-copy``: the commands, without ``$`` and outputs."""

    def with_commands(block: re.Match[str]) -> str:
        text = unescape(re.sub(r"<[^>]*>", "", block[1]))
        copied = escape("\n".join(_COMMAND.findall(text))).replace("\n", "&#10;")
        return f'<div class="language-console highlight" data-copy="{copied}">{block[1]}'

    return _CONSOLE.sub(with_commands, html)


def llms_list(name: str, front: Page) -> str:
    """The pages with a line each, as https://llmstxt.org has it: the heading, and the first sentence below it."""
    sections: dict[str, list[str]] = {}
    page = front
    while page := page.next_page:
        about = first_sentence(page.markdown)
        line = f"- [{page.title}]({page.url}): {about}".removesuffix(": ")
        sections.setdefault(page.ancestors[-1].title, []).append(line)
    texts = (f"## {title}\n\n" + "\n".join(lines) for title, lines in sections.items())
    return "\n\n".join([f"# {name}", f"> {first_sentence(front.markdown)}", *texts]) + "\n"


def first_sentence(markdown: str) -> str:
    """The first sentence of the first paragraph of a page, as plain text; empty if it has none."""
    tokens = pairwise(MarkdownIt().enable("table").parse(markdown))
    texts = (text for start, text in tokens if start.type == "paragraph_open" and start.level == 0)
    children = next((text.children for text in texts), None) or ()
    words = "".join(" " if each.type == "softbreak" else each.content for each in children)
    return re.split(r"(?<=\.)\s", words, maxsplit=1)[0].removesuffix(":")


# The command line


COMMANDS = {**all_commands(), **BESIDE}


class Recorder(click.HelpFormatter):
    """Writes the parts of a command's help as Markdown."""

    def write_usage(self, prog: str, args: str = "", prefix: str | None = None) -> None:
        self.write(f"```\n{prog} {args}\n```\n\n")

    def write_heading(self, heading: str) -> None:
        self.write(f"## {heading}\n\n")

    def write_paragraph(self) -> None:
        self.write("\n")

    def write_text(self, text: str) -> None:
        for paragraph in text.split("\n\n"):
            lines = paragraph.removeprefix("\b\n").strip("\n").splitlines()
            is_code = paragraph.startswith("\b") or any(line.lstrip().startswith("$ ") for line in lines)
            shown = "\n".join(lines) if is_code else escaped(" ".join(" ".join(lines).split()))
            self.write(f"```console\n{shown}\n```\n\n" if is_code else f"{shown}\n\n")

    def write_dl(self, rows: Iterable[tuple[str, str]], col_max: int = 0, col_spacing: int = 0) -> None:
        for term, text in rows:
            anchors = "".join(f'<a id="{name}"></a>' for name in re.findall(r"(?<![\w-])--[\w-]+", term))
            shown = f"[`{term}`]({page_of(term)})" if term in COMMANDS else f"`{term}`"
            self.write(f"{anchors}{shown}\n:   {escaped(' '.join(text.split()))}\n\n")


def escaped(text: str) -> str:
    """Plain text as Markdown that shows it. Words that are options, and names with an underscore, are code."""
    text = re.sub(r"[\\`*\[\]]", r"\\\g<0>", escape(text, quote=False))
    return re.sub(r"(?<![\w/`-])((?:--?[a-z][\w-]*|\w+_\w+)(?:=[\w:/.]*\w)?)(?![\w/`])", r"`\1`", text)


def page_of(name: str) -> str:
    return f"{name.replace(' ', '-')}.md"


def command_pages() -> dict[str, str]:
    """A page for each command, and one for ``ckpt-tools --help``."""
    top = click.Context(group, info_name="ckpt-tools", **group.context_settings)
    pages = {"cli/index.md": f"# All commands\n\n{help_in(top)}"}
    for name, command in COMMANDS.items():
        text = f"# {name}\n\n{help_in(click.Context(command, top, info_name=name))}"
        function = function_of(name)
        in_python = f"In Python: [`ckpt_tools.{function}`](../api/{function}.md).\n"
        pages[f"cli/{page_of(name)}"] = text if name in WITHOUT_FUNCTION else text + in_python
    return pages


def help_in(context: click.Context) -> str:
    recorder = Recorder()
    context.command.format_help(context, recorder)
    return recorder.getvalue()


# Python

TESTING = ("formats", "stores", "runners", "manifests", "stored", "strategies")
FOR_FORMATS = [
    "ckpt_tools.formats.base.Format",
    *(f"ckpt_tools.core.manifest.{name}" for name in ("Manifest", "StateKey", "TensorEntry", "Kind", "ParamGroup")),
    *(f"ckpt_tools.core.shards.{name}" for name in ("ShardTable", "Shard", "ByteRange")),
    *(f"ckpt_tools.core.layout.{name}" for name in ("Layout", "FileLayout", "Literal", "Padding", "Payload")),
    "ckpt_tools.core.boxes.Box",
    "ckpt_tools.core.dtypes.DType",
    "ckpt_tools.stores.source.Source",
]
"""What the format of a package of your own is made of."""

PUBLIC = {name: getattr(ckpt_tools, name) for name in ckpt_tools.__all__ if name != "__version__"}
FUNCTIONS = [name for name, value in PUBLIC.items() if isfunction(value)]
ERRORS = [name for name, value in PUBLIC.items() if isclass(value) and issubclass(value, ckpt_tools.CkptError)]
OTHERS = [name for name in PUBLIC if name not in {*FUNCTIONS, *ERRORS}]


def python_pages() -> dict[str, str]:
    """A page for each function of ``ckpt_tools``, one for all errors, one for all other classes and types, and two
    for plug-ins. mkdocstrings writes classes, from the source. It cannot write the functions, whose
    keywords and docstrings are put together when they are imported."""
    return {
        **{f"api/{name}.md": function_page(name, PUBLIC[name]) for name in FUNCTIONS},
        "api/index.md": index_page(),
        "api/errors.md": classes_page("Errors", [f"ckpt_tools.{name}" for name in ERRORS]),
        "api/classes.md": classes_page("Results and types", [f"ckpt_tools.{name}" for name in OTHERS]),
        "api/formats.md": classes_page("Classes for formats", FOR_FORMATS),
        "api/testing.md": classes_page("Test suites for plug-ins", [f"ckpt_tools.testing.{name}" for name in TESTING]),
    }


def classes_page(title: str, names: list[str]) -> str:
    return f"# {title}\n\n" + "\n\n".join(f"::: {name}" for name in names) + "\n"


def index_page() -> str:
    rows = [f"- [`{name}`]({name}.md): {linked(_paragraph(getdoc(PUBLIC[name]) or ''))}" for name in FUNCTIONS]
    return (
        "# Reference\n\nEvery public name of `ckpt_tools`. [Python](../python.md) shows how they are used.\n\n"
        + "\n".join(rows)
        + "\n\n[Results and types](classes.md), [errors](errors.md); for plug-ins [classes for formats](formats.md) "
        + "and [test suites](testing.md).\n"
    )


def function_page(name: str, function: Callable[..., object]) -> str:
    """Its signature, and the sections of its docstring: entries as a list, an example as code."""
    parts = re.split(r"^(\w[\w ]*):\n(?= )", getdoc(function) or "", flags=re.MULTILINE)
    sections = [
        f"## {title}\n\n{section(title, dedent(text))}" for title, text in zip(parts[1::2], parts[2::2], strict=True)
    ]
    before = linked(parts[0].strip())
    code = f"```python\n{signature_of(name, function)}\n```"
    return "\n\n".join([f"# {name} {{#ckpt_tools.{name}}}", before, code, *sections]) + "\n"


def signature_of(name: str, function: Callable[..., object]) -> str:
    """One parameter on each line."""
    found = signature(function)
    lines = []
    for each in found.parameters.values():
        if each.kind is each.KEYWORD_ONLY and "*" not in lines:
            lines.append("*")
        default = "" if each.default is each.empty else f" = {each.default!r}"
        lines.append(f"{each.name}: {each.annotation}{default}")
    return f"ckpt_tools.{name}(\n" + "".join(f"    {line},\n" for line in lines) + f") -> {found.return_annotation}"


def section(title: str, text: str) -> str:
    if title == "Example":
        return f"```pycon\n{text.strip()}\n```"
    entries = re.split(r"\n(?=\S)", text.strip())
    if title == "Returns":
        return linked(_paragraph(text.strip()))
    names = [entry.partition(":") for entry in entries]
    return "\n".join(f"- {_names(term)}: {linked(_paragraph(rest.strip()))}" for term, _, rest in names)


def _names(term: str) -> str:
    """``src, dst`` are two names. A term with other words stays text."""
    names = term.split(", ")
    return ", ".join(linked(f"``{name}``") for name in names) if all(each.isidentifier() for each in names) else term


def _paragraph(text: str) -> str:
    return " ".join(text.partition("\n\n")[0].split())


def linked(text: str) -> str:
    """Public names in code lead to their pages."""
    return re.sub(r"``(\w+)``", lambda code: _link(code[1]), text)


def _link(name: str) -> str:
    if name not in PUBLIC:
        return f"`{name}`"
    page = name if name in FUNCTIONS else "errors" if name in ERRORS else "classes"
    return f"[`{name}`]({page}.md#ckpt_tools.{name})"

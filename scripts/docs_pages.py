"""The pages of the site that are generated when it is built: a page a command, and the Python reference.

MkDocs calls the functions ``on_...`` (``hooks`` in ``mkdocs.yml``); all others are pure. A page of a command is made of
what its ``--help`` writes, so that groups of options and examples are those of the terminal.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from html import escape
from inspect import isclass, isfunction
from pathlib import Path, PurePosixPath
from typing import Any

import click
import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import ckpt_tools
from inference.batch.__main__ import main as predict
from inference.serving.__main__ import main as serve
from tests.support.commands import all_commands, function_of
from training.__main__ import main as train

BESIDE = {"train": train, "predict": predict, "serve": serve}
"""The commands that ``ckpt-tools`` itself looks up in the installed packages."""

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PICTURES = {path.relative_to(ROOT) for path in ROOT.glob("benchmarks/results/*.png")}
REPOSITORY = "https://github.com/ckpt-tools/ckpt-tools"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages, and write out the folders of the navigation."""
    for path, text in {**command_pages(), **python_pages()}.items():
        files.append(File.generated(config, path, content=text))
    for picture in PICTURES:
        files.append(File.generated(config, picture.as_posix(), abs_src_path=str(ROOT / picture)))
    pages = sorted(each.src_uri for each in files.documentation_pages())
    config.nav = list(written_out(config.nav or [], pages))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    return with_addresses(markdown, PurePosixPath("docs", page.file.src_uri).parent)


def written_out(nav: Iterable[Any], pages: list[str]) -> Iterator[Any]:
    """The navigation with the pages of a folder in place of each path that ends in a slash; index pages are first."""
    for entry in nav:
        match entry:
            case str() if entry.endswith("/"):
                yield from sorted((each for each in pages if each.startswith(entry)), key=_index_first)
            case str():
                yield entry
            case dict():
                yield {title: _below(below, pages) for title, below in entry.items()}


def _below(below: Any, pages: list[str]) -> Any:
    """What is under a title: one page, or a list."""
    if isinstance(below, str) and not below.endswith("/"):
        return below
    return list(written_out([below] if isinstance(below, str) else below, pages))


def _index_first(path: str) -> tuple[str, bool, str]:
    folder, _, name = path.rpartition("/")
    return folder, name != "index.md", name


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


class Examples(griffe.Extension):
    """The heading of an example in the docstrings is in the singular."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = re.sub(r"^( *)Example:$", r"\1Examples:", obj.docstring.value, flags=re.MULTILINE)


# The command line


class Recorder(click.HelpFormatter):
    """What a command's help is made of, as Markdown."""

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
            self.write(f"{anchors}`{term}`\n:   {escaped(' '.join(text.split()))}\n\n")


def escaped(text: str) -> str:
    """Plain text as Markdown that shows it. Words that are options, and names with an underscore, are code."""
    text = re.sub(r"[\\`*\[\]]", r"\\\g<0>", escape(text, quote=False))
    return re.sub(r"(?<![\w/`-])(--?[a-z][\w-]*|\w+_\w+)(?![\w/`])", r"`\1`", text)


def help_of(name: str, command: click.Command) -> str:
    """The page of one command."""
    recorder = Recorder()
    command.format_help(click.Context(command, info_name=f"ckpt-tools {name}"), recorder)
    seen = f"In Python: [`ckpt_tools.{function_of(name)}`](../api/{function_of(name)}.md).\n\n"
    return f"# {name}\n\n{recorder.getvalue()}{'' if name in BESIDE else seen}"


def command_pages() -> dict[str, str]:
    commands = {**all_commands(), **BESIDE}
    return {f"cli/{name.replace(' ', '-')}.md": help_of(name, command) for name, command in commands.items()}


# Python

TESTING = ("formats", "stores", "runners", "manifests", "stored", "strategies")


def python_pages() -> dict[str, str]:
    """A page for each function of ``ckpt_tools``, one for all errors, one for all other classes and types, and one for
    the test suites of plug-ins."""
    public = {name: getattr(ckpt_tools, name) for name in ckpt_tools.__all__ if name != "__version__"}
    functions = [name for name, value in public.items() if isfunction(value)]
    errors = [name for name, value in public.items() if isclass(value) and issubclass(value, ckpt_tools.CkptError)]
    others = [name for name in public if name not in {*functions, *errors}]
    return {
        **{f"api/{name}.md": reference(name, [f"ckpt_tools.{name}"]) for name in functions},
        "api/index.md": index(public, functions),
        "api/errors.md": reference("Errors", [f"ckpt_tools.{name}" for name in errors]),
        "api/classes.md": reference("Results and types", [f"ckpt_tools.{name}" for name in others]),
        "api/testing.md": reference("Test suites for plug-ins", [f"ckpt_tools.testing.{name}" for name in TESTING]),
    }


def reference(title: str, names: list[str]) -> str:
    return f"# {title}\n\n" + "\n\n".join(f"::: {name}" for name in names) + "\n"


def index(public: Mapping[str, object], functions: list[str]) -> str:
    rows = [f"- [`{name}`]({name}.md): {summary(public[name])}" for name in functions]
    return (
        "# Reference\n\nEvery public name of `ckpt_tools`. [Python](../python.md) shows how they are used.\n\n"
        + "\n".join(rows)
        + "\n\n[Results and types](classes.md), [errors](errors.md), [test suites for plug-ins](testing.md).\n"
    )


def summary(value: object) -> str:
    return " ".join((value.__doc__ or "").partition("\n\n")[0].split())

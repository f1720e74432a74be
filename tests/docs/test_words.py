"""The classes and sentences of errors that docs has are those of the code, and every command in the prose of a page is
one of the command line, with options and values that it takes."""

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from ckpt_tools import errors
from tests.support.commands import all_commands
from tests.support.pages import ROOT

pytestmark = pytest.mark.quick

PAGE = (ROOT / "docs/errors.md").read_text()
SENTENCES = re.findall(r"^- `([^`]+)`", PAGE, re.MULTILINE)
CLASSES = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.CkptError)]
MIN_PIECE = 6
"""Characters of a piece between two names that is looked for: shorter ones are everywhere."""


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_every_class_has_its_exit_code_and_what_to_do(kind):
    base = errors.FormatError if issubclass(kind, errors.FormatError) else kind
    assert re.search(rf"^\| {kind.exit_code} \|.*`{base.__name__}`", PAGE, re.MULTILINE)
    assert kind is errors.CkptError or re.search(rf"^###? {kind.__name__}$", PAGE, re.MULTILINE)


def template(node: ast.expr) -> str | None:
    """The text of a string of the code, with a NUL where a value is put in and options as users write them."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            return "".join(template(value) or "\0" for value in values)
        case ast.FormattedValue(
            value=ast.Call(func=ast.Name("format_option"), args=[ast.Constant(value=str(name)), *_])
        ):
            return f"--{name.replace('_', '-')}"
    return None


def templates() -> Iterator[str]:
    for path in (ROOT / "ckpt_tools").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant | ast.JoinedStr) and (text := template(node)):
                yield text


TEMPLATES = list(templates())


def in_order(pieces: list[str], text: str) -> bool:
    return re.search(".*".join(map(re.escape, pieces)), text, re.DOTALL) is not None


def pieces_of(sentence: str) -> list[str]:
    """The pieces of a documented sentence between its names in capitals."""
    pieces = re.split(r"\b[A-Z]+\b", sentence)
    return [piece.strip() for piece in pieces if len(piece.strip()) >= MIN_PIECE]


@pytest.mark.parametrize("sentence", SENTENCES)
def test_the_sentence_is_one_of_the_code(sentence):
    pieces = pieces_of(sentence)
    assert pieces
    assert any(in_order(pieces, text) for text in TEMPLATES), pieces


_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"(?<!`)`([^`]+)`(?!`)")
COMMANDS = {
    name: command
    for name, command in all_commands().items()
    if name not in ("train", "predict", "serve", "verify-forward")
}

READING = {"inspect", "verify", "diff", "ls", "plan"}
WRITING = {"convert", "merge-lora", "consolidate", "reshard"}


def inline_commands(page: Path) -> list[tuple[str, list[str]]]:
    """Each command with its words; those that only describe a command (``...``, ``A|B``) are none."""
    found = []
    for code in _CODE.findall(_FENCE.sub("", page.read_text())):
        text = " ".join(code.split())
        name, _, rest = text.removeprefix("ckpt-tools ").partition(" ")
        two, _, more = rest.partition(" ")
        if f"{name} {two}" in COMMANDS:
            name, rest = f"{name} {two}", more
        if name in COMMANDS and rest and not re.search(r"\.\.\.|[|<>&;$]|\\", rest):
            found.append((name, shlex.split(rest)))
    return found


def runnable(folder: Path, name: str, words: list[str]) -> str | None:
    """The line to run in ``folder``, which has all that the command reads; it writes to a new place. None for any
    other."""
    places = [word for word in words if not word.startswith("-")]
    is_written = name in WRITING
    inputs = places[: len(COMMANDS[name].params)] if not is_written else places[: 2 if name == "merge-lora" else 1]
    if name not in READING | WRITING or (is_written and len(places) <= len(inputs)):
        return None
    if not inputs or not all((folder / place.partition("@")[0]).exists() for place in inputs):
        return None
    target = places[len(inputs)] if is_written else ""
    new = [f"inline-{word}" if word == target and target else word for word in words]
    return f"ckpt-tools {name} {shlex.join(new)} > /dev/null"


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def wrong(name: str, words: list[str]) -> str | None:
    """What click says of the words; a command without its places is one that the page shortens."""
    command = COMMANDS[name]
    context = click.Context(command)
    places = [parameter for parameter in command.params if isinstance(parameter, click.Argument)]
    try:
        given, left, _ = command.make_parser(context).parse_args(list(words))
        for parameter in command.params:
            value = given.get(parameter.name or "")
            if isinstance(parameter, click.Option) and value is not None and not str(value).isupper():
                parameter.type_cast_value(context, value)
    except click.UsageError as error:
        is_cut = isinstance(error, click.BadOptionUsage) and words[-1] == error.option_name
        return None if is_cut or isinstance(error, click.MissingParameter) else error.format_message()
    return f"more than {len(places)} places: {left}" if left else None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_command_line_takes_it(page):
    found = [(name, words, wrong(name, words)) for name, words in inline_commands(page)]
    assert [each for each in found if each[2] is not None] == []

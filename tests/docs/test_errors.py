"""docs/errors.md has every class of errors with its exit code, and its sentences are those of the code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt_tools import errors

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[2]
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
        case ast.FormattedValue(value=ast.Call(func=ast.Name("option"), args=[ast.Constant(value=str(name)), *_])):
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


def test_a_sentence_that_is_not_in_the_code_is_found():
    assert not any(in_order(pieces_of("there is no teapot in FOLDER"), text) for text in TEMPLATES)

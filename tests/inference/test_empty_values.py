"""No option of a command of inference and no argument of its functions may be empty."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import inference
from ckpt_tools.errors import UsageError
from inference import demo
from inference.batch import __main__ as batch
from inference.serving import __main__ as serve
from tests.support.empty_values import check_refused, lines_with_one_empty_value

COMMANDS = {"batch/__main__.py": batch.main, "demo.py": demo.main, "serving/__main__.py": serve.main}
LINES = [
    pytest.param(command, label, words, id=f"{name}{label}")
    for name, command in COMMANDS.items()
    for label, words in lines_with_one_empty_value(command)
]
FUNCTIONS = [getattr(inference, name) for name in inference.__all__]
ARGUMENTS = [
    pytest.param(function, each.name, id=f"{function.__name__}-{each.name}")
    for function in FUNCTIONS
    for each in inspect.signature(function).parameters.values()
    if "str" in str(each.annotation)
]


def test_every_command_is_here():
    folder = Path(sys.modules["inference"].__path__[0])
    found = {
        path.relative_to(folder).as_posix() for path in folder.rglob("*.py") if "@click.command(" in path.read_text()
    }
    assert found == COMMANDS.keys()


@pytest.mark.parametrize(("command", "label", "words"), LINES)
def test_an_empty_value_is_refused(command, label, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check_refused(command, label, words)


@pytest.mark.parametrize(("function", "name"), ARGUMENTS)
def test_a_function_refuses_an_empty_argument(function, name):
    first = next(iter(inspect.signature(function).parameters))
    value: Any = {"": "x"} if name == "storage_options" else ""
    with pytest.raises(UsageError, match=rf"^{name}=? (is empty|contains an empty text)"):
        function(**{first: "x", name: value})


@pytest.mark.parametrize(("text", "what"), [("vit=", "URL"), ("=run", "NAME"), ("=", "NAME")])
def test_half_of_a_named_model_is_refused(text, what):
    ended = CliRunner().invoke(serve.main, ["--model", text])
    assert (ended.exit_code, ended.output) == (2, f"Error: --model {text} has an empty {what}; it is NAME=URL\n")

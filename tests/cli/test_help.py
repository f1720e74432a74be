"""The help of every command: options under headings, and examples that the command takes."""

from __future__ import annotations

import re
import shlex

import click
import pytest

from ckpt_tools.cli.beside import BesideCommand
from ckpt_tools.cli.main import SECTIONS, group
from ckpt_tools.help_text import Formatter, Grouped
from inference.batch.__main__ import main as predict
from inference.serving.__main__ import main as serve
from tests.cli.terminals import shown
from tests.support.commands import all_commands
from training.__main__ import main as train

pytestmark = pytest.mark.quick

BESIDE = {"train": train, "predict": predict, "serve": serve}
COMMANDS: dict[str, click.Command] = {"": group, **all_commands(), **BESIDE}

ONE_LINE = 72
"""Longest example that is one line on a terminal of 80 columns, so that it can be copied."""


def examples(name: str) -> list[str]:
    command = COMMANDS[name]
    assert isinstance(command, Grouped)
    return list(command.examples)


def parsed(words: list[str]) -> click.Context:
    """The context of the command, which does not run."""
    command: click.Command = COMMANDS[words[0]]
    name, *rest = words
    while isinstance(command, click.Group) and rest and rest[0] in command.commands:
        command = command.commands[rest[0]]
        name, *rest = rest
    return command.make_context(name, rest)


def test_the_help_lists_every_command_in_a_section():
    code, text = shown("--help", columns=80)
    assert code == 0
    for title, homes in SECTIONS.items():
        section = text.partition(f"\n{title}:\n")[2].partition("\n\n")[0]
        assert re.findall(r"^  (\S+)", section, re.MULTILINE) == list(homes)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_one_to_three_examples_that_it_takes(name):
    found = examples(name)
    assert 1 <= len(found) <= 3
    for text in found:
        assert len(text) <= ONE_LINE
        words = shlex.split(re.search(r"ckpt-tools ([^|)]*)", text)[1])  # type: ignore[index]
        assert name == "" or words[: len(name.split())] == name.split()
        parsed(words)


def test_an_example_that_a_command_does_not_take_is_found():
    with pytest.raises(click.NoSuchOption):
        parsed(["convert", "a", "b", "--too", "dcp"])


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_ends_with_the_examples(name):
    command = COMMANDS[name]
    context = click.Context(command, info_name=name, terminal_width=80)
    context.formatter_class = Formatter
    assert command.get_help(context).partition("\nExample:\n")[2].split("\n") == [
        f"  {each}" for each in examples(name)
    ]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_stands_under_a_heading(name):
    command = COMMANDS[name]
    assert isinstance(command, Grouped)
    headed = {each for names in command.headings.values() for each in names}
    assert {each.name for each in command.params if isinstance(each, click.Option)} <= headed
    assert "Options:" not in command.get_help(click.Context(command, info_name=name))


@pytest.mark.parametrize("name", BESIDE)
def test_headings_of_the_packages_beside_name_options(name):
    command = BESIDE[name]
    headed = [each for names in command.headings.values() for each in names]
    known = {str(each.name) for each in command.params} | {"help"}
    assert len(headed) == len(set(headed))
    assert set(headed) - known <= {"model", "models", "models_file"}
    assert isinstance(group.commands[name], BesideCommand)

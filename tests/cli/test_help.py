"""The help of every command: options under headings, and examples that the command takes."""

import re
import shlex

import click
import pytest

from ckpt_tools.cli.beside import ExternalCommand
from ckpt_tools.cli.main import SECTIONS, group
from ckpt_tools.messages.help_text import GroupedCommand, WordWrapFormatter
from inference.batch.__main__ import main as predict
from inference.forward.__main__ import main as verify_forward
from inference.serving.__main__ import main as serve
from tests.support.commands import all_commands, printed
from training.__main__ import main as train

pytestmark = pytest.mark.quick

BESIDE = {"train": train, "predict": predict, "serve": serve, "verify-forward": verify_forward}
COMMANDS: dict[str, click.Command] = {"": group, **all_commands(), **BESIDE}

ONE_LINE = 72
"""Longest example that is one line on a terminal of 80 columns, so that it can be copied."""


def parsed(words: list[str]) -> click.Context:
    """The context of the command, which does not run."""
    command: click.Command = COMMANDS[words[0]]
    name, *rest = words
    while isinstance(command, click.Group) and rest and rest[0] in command.commands:
        command = command.commands[rest[0]]
        name, *rest = rest
    return command.make_context(name, rest)


def test_the_help_lists_every_command_in_a_section():
    text = printed("--help")
    for title, homes in SECTIONS.items():
        section = text.partition(f"\n{title}:\n")[2].partition("\n\n")[0]
        assert re.findall(r"^  (\S+)", section, re.MULTILINE) == list(homes)


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_ends_with_one_to_three_examples_that_the_command_takes(name):
    command = COMMANDS[name]
    assert isinstance(command, GroupedCommand)
    assert 1 <= len(command.examples) <= 3
    for text in command.examples:
        assert len(text) <= ONE_LINE
        words = shlex.split(re.search(r"ckpt-tools ([^|)]*)", text)[1])  # type: ignore[index]
        assert name == "" or words[: len(name.split())] == name.split()
        parsed(words)
    context = click.Context(command, info_name=name, terminal_width=80)
    context.formatter_class = WordWrapFormatter
    assert command.get_help(context).partition("\nExample:\n")[2].split("\n") == [
        f"  {each}" for each in command.examples
    ]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_stands_under_a_heading(name):
    command = COMMANDS[name]
    assert isinstance(command, GroupedCommand)
    headed = [each for names in command.headings.values() for each in names]
    assert {each.name for each in command.params if isinstance(each, click.Option)} <= {*headed}
    assert "Options:" not in command.get_help(click.Context(command, info_name=name))
    if name in BESIDE:
        known = {str(each.name) for each in command.params} | {"help"}
        assert len(headed) == len(set(headed))
        assert set(headed) - known <= {"model", "models", "models_file"}
        assert isinstance(group.commands[name], ExternalCommand)


@pytest.mark.parametrize("command", ["", *sorted(all_commands())])
def test_help_wraps_at_words_and_says_everything(command):
    """Every word of the help at 110 columns is in that of any width, and no summary is cut."""
    found, texts = COMMANDS[command] if command not in BESIDE else all_commands()[command], {}
    for width in (110, 60, 80, 120, 200):
        context = found.make_context("ckpt-tools", [], resilient_parsing=True, max_content_width=width)
        context.terminal_width = width - 2
        texts[width] = found.get_help(context)
        lines = texts[width].split("\n")
        assert not [line for line in lines if len(line) > width and len(line.split()) > 1]
        assert texts[width].split() == texts[110].split()
        assert not any(line.endswith("...") for line in lines[1:]), texts[width]

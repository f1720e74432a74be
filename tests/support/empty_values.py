"""Command lines with one empty value, made from a click command itself: a new option is among them."""

from collections.abc import Iterator
from pathlib import Path

import click
from click.testing import CliRunner

from ckpt_tools.core.option_names import format_flag, is_location


def lines_with_one_empty_value(command: click.Command) -> Iterator[tuple[str, list[str]]]:
    """Each parameter that takes a value, as it is typed, and a command line in which it alone is empty."""
    for wanted in command.params:
        if isinstance(wanted, click.Option) and wanted.is_flag:
            continue
        values = {each: "" if each is wanted else _some(each) for each in command.params}
        given = [each for each in command.params if each is wanted or each.required]
        yield _typed(wanted), [word for each in given for word in _words(each, values[each])]


def check_refused(command: click.Command, label: str, words: list[str]) -> None:
    """The command names the empty parameter, and writes nothing to the current folder."""
    ended = CliRunner().invoke(command, words)
    assert (ended.exit_code, label in ended.output) == (2, True), ended.output
    assert not list(Path.cwd().iterdir())


def _typed(parameter: click.Parameter) -> str:
    is_argument = isinstance(parameter, click.Argument)
    name = str(parameter.name)
    label = format_flag(name) if is_location(name) else name.upper()
    return label if is_argument else max(parameter.opts, key=len)


def _some(parameter: click.Parameter) -> str:
    return "1" if isinstance(parameter.type, click.types.IntParamType | click.types.FloatParamType) else "x"


def _words(parameter: click.Parameter, value: str) -> list[str]:
    return [value] if isinstance(parameter, click.Argument) else [max(parameter.opts, key=len), value]

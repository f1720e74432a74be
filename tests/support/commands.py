"""Every command of the command line, those of groups by two words, and the function of each; and how one is run."""

import io
import os
from contextlib import redirect_stderr, redirect_stdout
from typing import NamedTuple
from unittest.mock import patch

import click

from ckpt_tools.cli import reporting
from ckpt_tools.cli.main import group, main

FUNCTIONS = {
    "formats": "list_formats",
    "recipes": "list_recipes",
    "recipes show": "show_recipe",
    "recipes check": "check_recipe",
}
"""Of commands that have another name than their function."""


WITHOUT_FUNCTION = {"samples", "completion", "train", "predict", "serve", "verify-forward"}
"""Commands for beginners, of the shell and of the packages beside the converter."""


def function_of(command: str) -> str:
    """``make-loadable`` is ``make_loadable``."""
    return FUNCTIONS.get(command) or command.replace("-", "_")


def all_commands() -> dict[str, click.Command]:
    """The commands by the words that are typed."""
    found: dict[str, click.Command] = {}
    for name, command in group.commands.items():
        found[name] = command
        if isinstance(command, click.Group):
            found |= {f"{name} {inner}": each for inner, each in command.commands.items()}
    return found


class Done(NamedTuple):
    """How a command ended: its exit code, and what it printed to stdout and to stderr."""

    code: int
    out: str
    err: str


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def run_command(*words: object, columns: int | None = None) -> Done:
    """The command line in this process, which costs no start of another; with ``columns``, as on a terminal of that
    width. ``tests.cli.terminals`` has real ones."""
    out, err = (io.StringIO(), io.StringIO()) if columns is None else (_Terminal(), _Terminal())
    code, width = "", {} if columns is None else {"COLUMNS": str(columns)}
    with redirect_stdout(out), redirect_stderr(err), patch.dict(os.environ, width):
        try:
            main([str(word) for word in words])
        except SystemExit as ended:
            code = str(ended.code or 0)
        finally:
            reporting.read_log_options([])
    return Done(int(code), out.getvalue(), err.getvalue())


def printed(*words: object) -> str:
    """What a command that ends with 0 prints."""
    done = run_command(*words)
    assert done.code == 0, done
    return done.out

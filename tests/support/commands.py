"""Every command of the command line, those of groups by two words, and the function of each; and how one is run."""

from __future__ import annotations

import io
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass

import click

from ckpt_tools.cli.main import group, main

FUNCTIONS = {
    "formats": "list_formats",
    "recipes": "list_recipes",
    "recipes show": "show_recipe",
    "recipes check": "check_recipe",
}
"""Of commands that have another name than their function."""


WITHOUT_FUNCTION = {"completion", "train", "predict", "serve"}
"""Commands of the shell and of the packages beside the converter."""


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


@dataclass(frozen=True, slots=True)
class Done:
    """How a command ended: its exit code, and what it printed to stdout and to stderr."""

    code: int
    out: str
    err: str


def run_command(*words: object) -> Done:
    """The command line in this process, which costs no start of another."""
    out, err, code = io.StringIO(), io.StringIO(), ""
    with redirect_stdout(out), redirect_stderr(err):
        try:
            main([str(word) for word in words])
        except SystemExit as ended:
            code = str(ended.code or 0)
    return Done(int(code), out.getvalue(), err.getvalue())


def printed(*words: object) -> str:
    """What a command that ends with 0 prints."""
    done = run_command(*words)
    assert done.code == 0, done
    return done.out

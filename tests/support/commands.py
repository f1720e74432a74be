"""Every command of the command line, those of groups by two words, and the function of each."""

from __future__ import annotations

import click

from ckpt_tools.cli.main import group

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

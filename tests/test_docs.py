"""Every command, option, exit code and public name is documented."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

import ckpt_tools
from ckpt_tools import errors
from ckpt_tools.cli.beside import BesideCommand
from ckpt_tools.cli.main import group
from ckpt_tools.formats.registry import readers, writers

DOCS = Path(__file__).parent.parent / "docs"
CLI = (DOCS / "cli.md").read_text()
ARCHITECTURE = (DOCS / "architecture.md").read_text()
OPTIONS = sorted(
    {name for command in group.commands.values() for option in command.params for name in option.opts if "--" in name}
)


@pytest.mark.parametrize("command", sorted(group.commands))
def test_every_command_is_documented_and_a_function(command: str) -> None:
    assert f"| `{command}" in CLI
    assert isinstance(group.commands[command], BesideCommand) or callable(getattr(ckpt_tools, command))


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_is_documented(option: str) -> None:
    assert re.search(rf"`[^`]*{option}\b", CLI), option


def test_every_option_has_help() -> None:
    for command in group.commands.values():
        for option in command.params:
            assert not isinstance(option, click.Option) or option.help, (command.name, option.name)


def test_every_exit_code_is_documented() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.CkptError)]
    assert all(f"| {kind.exit_code} |" in CLI for kind in kinds)


@pytest.mark.parametrize("name", sorted({*writers(), *readers()} - {"deepspeed"}))
def test_every_format_is_listed(name: str) -> None:
    assert name in {row.name for row in ckpt_tools.formats()}


def test_every_room_has_its_place_in_the_house() -> None:
    rooms = {path.stem for path in Path(ckpt_tools.__file__).parent.iterdir() if not path.name.startswith(("_", "py."))}
    assert [room for room in sorted(rooms) if not re.search(rf"\b{room}\b", ARCHITECTURE)] == []

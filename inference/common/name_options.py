"""The options that say how a checkpoint's tensors are named in the model, for all commands that load one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Reading:
    """As for :func:`inference.load_model`. It crosses processes."""

    model_key: str | None = None
    include: Sequence[str] = ()
    exclude: Sequence[str] = ()
    rename: Sequence[str] = ()
    key_map: str | Path | None = None

    def given(self) -> dict[str, Any]:
        """Those that are not left out, as arguments."""
        return {name: value for name in self.__dataclass_fields__ if (value := getattr(self, name))}

    @classmethod
    def taken_from(cls, options: dict[str, Any]) -> Reading:
        """Those of a command's options, which are left without them."""
        return cls(**{name: options.pop(name) for name in cls.__dataclass_fields__})


AS_IT_IS = Reading()


def reading_options(command: Command) -> Command:
    """Words and metavariables are those of ``ckpt-tools convert``."""
    options = [
        click.option("--model-key", help="The key of the model in a DCP tree, e.g. app.model. Default: detected."),
        click.option("--include", multiple=True, metavar="GLOB", help="Take only tensors whose names match."),
        click.option("--exclude", multiple=True, metavar="GLOB", help="Leave out tensors whose names match."),
        click.option("--rename", multiple=True, metavar="REGEX=REPL", help="Rename tensors, as '^model[.]='."),
        click.option("--key-map", metavar="FILE", help="A JSON file that maps old names to new names."),
    ]
    for option in reversed(options):
        command = option(command)
    return command

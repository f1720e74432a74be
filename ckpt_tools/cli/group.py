"""A group of commands. Their help wraps at words, and a line says when a store is asked again."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import click

from ckpt_tools.cli.ending import StoppableGroup
from ckpt_tools.cli.retries import telling_of_retries
from ckpt_tools.cli.wrapping import filled

NARROW_COLUMNS = 70
"""Below this, the first column of a list of options is narrower, so that words of the second fit."""


class Formatter(click.HelpFormatter):
    """Help text that is not broken inside words or at hyphens: ``--world-size`` stays one word."""

    def write_text(self, text: str) -> None:
        paragraphs = [" ".join(each.split()) for each in text.split("\n\n")]
        indent = " " * self.current_indent
        wrapped = ["\n".join(indent + line for line in filled(each, self._room(0))) for each in paragraphs]
        self.write("\n\n".join(wrapped) + "\n")

    def write_dl(self, rows: Iterable[tuple[str, str]], col_max: int = 30, col_spacing: int = 2) -> None:
        rows = list(rows)
        col_max = min(col_max, 24) if self.width < NARROW_COLUMNS else col_max
        first = min(max(len(term) for term, _ in rows), col_max) + col_spacing
        for term, text in rows:
            lines = filled(" ".join(text.split()), self._room(first))
            head = f"{'':{self.current_indent}}{term:{first}}"
            if len(term) > first - col_spacing:
                self.write(f"{head.rstrip()}\n")
                head = " " * (self.current_indent + first)
            self.write(f"{head}{lines[0] if lines else ''}".rstrip() + "\n")
            for line in lines[1:]:
                self.write(f"{'':{self.current_indent + first}}{line}\n")

    def _room(self, used: int) -> int:
        return max(self.width - self.current_indent - used, 10)


class Context(click.Context):
    """The context of a running command. Its help wraps at words, and a line says when a store is asked again."""

    formatter_class = Formatter

    def invoke(self, callback: Callable[..., Any], /, *given: Any, **options: Any) -> Any:
        with telling_of_retries(quiet=bool(self.params.get("quiet"))):
            return super().invoke(callback, *given, **options)


class Group(StoppableGroup):
    """A group of commands whose summaries are never cut."""

    context_class = Context

    def add_command(self, cmd: click.Command, name: str | None = None) -> None:
        cmd.context_class = Context
        super().add_command(cmd, name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        known = {name: self.get_command(ctx, name) for name in self.list_commands(ctx)}
        rows = [(name, _summary(command)) for name, command in known.items() if command is not None]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def _summary(command: click.Command) -> str:
    """The first sentence of its help."""
    text = command.help or command.short_help or ""
    words = text.split("\n\n")[0].split()
    end = next((number for number, word in enumerate(words, 1) if word.endswith(".")), len(words))
    return " ".join(words[:end])

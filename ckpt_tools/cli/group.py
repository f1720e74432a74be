"""A group of commands. Their help wraps at words, and a line on stderr says when a store is asked again."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any, NamedTuple

import click

from ckpt_tools.cli.ending import StoppableGroup
from ckpt_tools.cli.wrapping import columns, filled
from ckpt_tools.core import progress as notices

LINE_SECONDS = 2.0
"""Many threads may be retrying at once, each every few tenths of a second: one line this often is enough."""


@contextmanager
def telling_of_retries(*, quiet: bool) -> Iterator[None]:
    """While inside, stderr says so when a store is asked again, unless ``quiet``."""
    if quiet:
        yield
        return
    with notices.hearing(_lines()):
        yield


def _lines() -> notices.Listener:
    lock = threading.Lock()
    last = float("-inf")

    def say(sentence: str) -> None:
        nonlocal last
        with lock:
            if time.monotonic() - last < LINE_SECONDS:
                return
            last = time.monotonic()
            width = columns(sys.stderr)
            # Not by click: it writes past the stream with which rich keeps its bar below what is printed.
            lines = filled(sentence, width) if width else [sentence]
            sys.stderr.write("\n".join(lines) + "\n")
            sys.stderr.flush()

    return say


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


class Home(NamedTuple):
    """The module of this package that a command is in, and the first sentence of its help."""

    module: str
    summary: str


class Commands(MutableMapping[str, click.Command]):
    """Commands by name. Each is imported when it is asked for, so that one command does not pay for the others."""

    def __init__(self, homes: Mapping[str, Home]) -> None:
        self._homes = homes
        self._known: dict[str, click.Command | None] = dict.fromkeys(homes)

    def __getitem__(self, name: str) -> click.Command:
        found = self._known[name]
        if found is None:
            module = import_module(f"ckpt_tools.cli.{self._homes[name].module}")
            self[name] = found = getattr(module, f"{name.replace('-', '_')}_command")
        return found

    def __setitem__(self, name: str, command: click.Command) -> None:
        command.context_class = Context
        self._known[name] = command

    def __delitem__(self, name: str) -> None:
        del self._known[name]

    def __contains__(self, name: object) -> bool:
        return name in self._known

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)


class Group(StoppableGroup):
    """A group of commands whose summaries are in ``homes``, so that listing them imports no command."""

    context_class = Context

    def __init__(self, *, homes: Mapping[str, Home], **settings: Any) -> None:
        super().__init__(commands=Commands(homes), **settings)
        self.homes = homes

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, self.homes[name].summary) for name in self.list_commands(ctx)])


class SubGroup(StoppableGroup):
    """A command that does something by itself, and has commands."""

    context_class = Context

    def add_command(self, cmd: click.Command, name: str | None = None) -> None:
        cmd.context_class = Context
        super().add_command(cmd, name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary(each)) for name, each in sorted(self.commands.items())])


def summary(command: click.Command) -> str:
    """The first sentence of its help."""
    text = command.help or command.short_help or ""
    words = text.split("\n\n")[0].split()
    end = next((number for number, word in enumerate(words, 1) if word.endswith(".")), len(words))
    return " ".join(words[:end])

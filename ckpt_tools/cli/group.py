"""The group of commands, in sections, and the context that they run in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from importlib import import_module
from typing import Any, NamedTuple

import click

from ckpt_tools.cli import reporting
from ckpt_tools.cli.ending import StoppableGroup
from ckpt_tools.cli.settings import GRAVE, Defaults, Lent
from ckpt_tools.core.wording import printable
from ckpt_tools.errors import UsageError
from ckpt_tools.help_text import Grouped, HelpContext


class Context(HelpContext):
    """The context of a running command: what it logs goes to stderr, and what was not typed is taken from settings."""

    def __init__(self, command: click.Command, parent: click.Context | None = None, **settings: Any) -> None:
        if parent is not None:
            settings["default_map"] = Defaults(self, _before(command, parent))
        super().__init__(command, parent, **settings)

    def invoke(self, callback: Callable[..., Any], /, *given: Any, **options: Any) -> Any:
        lent = self._lent()
        for name, each in lent.items():
            _tell(name, each)
        with reporting.heard(quiet=bool(self.params.get("quiet"))):
            while True:
                try:
                    return super().invoke(callback, *given, **options)
                except UsageError as error:
                    if error.inapplicable not in lent:
                        origin = _origin(error, lent)
                        if not origin:
                            raise
                        raise UsageError(f"{error.message} ({origin})", path=error.path, key=error.key) from error
                    dropped = lent.pop(error.inapplicable)
                    options |= self._without(error.inapplicable)
                    if reporting.is_verbose():
                        reporting.notice(f"{dropped.option} from {dropped.where} does not apply here", "info")

    def _lent(self) -> dict[str, Lent]:
        """The values of this command that were neither typed nor left to their defaults."""
        found = self.default_map.lent if isinstance(self.default_map, Defaults) else {}
        return {name: each for name, each in found.items() if self.is_lent(name) and each.where != TYPED}

    def is_lent(self, name: str) -> bool:
        """Whether the value of the parameter is from settings."""
        return self.get_parameter_source(name) is click.core.ParameterSource.DEFAULT_MAP

    def _without(self, name: str) -> dict[str, Any]:
        """The parameter with its default."""
        option = next(each for each in self.command.params if each.name == name)
        return {
            name: option.process_value(self, False if isinstance(option, click.Option) and option.is_flag else None)
        }


TYPED = "typed before the command"


def _before(command: click.Command, parent: click.Context) -> dict[str, Lent]:
    """``--quiet`` where it stands before the command. Raises ``UsageError`` if that has none."""
    root = parent.find_root()
    if not root.params.get("quiet") or isinstance(command, click.Group):
        return {}
    if all(each.name != "quiet" for each in command.params):
        raise UsageError(f"{command.name} has no --quiet")
    return {"quiet": Lent("--quiet", True, TYPED)}


def _tell(name: str, lent: Lent) -> None:
    """On stderr: where a value is from. That of a store may be a secret."""
    is_grave = name in GRAVE and bool(lent.value)
    if is_grave or reporting.is_verbose():
        value = "" if name == "storage_options" or lent.value is True else f" {printable(str(lent.value))}"
        reporting.notice(f"{lent.option}{value} is from {lent.where}", "warning" if is_grave else "info")


def _origin(error: UsageError, lent: Mapping[str, Lent]) -> str:
    """Origins of the options of ``lent`` that the error names."""
    named = [each for each in lent.values() if each.option in error.message or repr(each.value) in error.message]
    return "; ".join(f"{each.option} is from {each.where}" for each in named)


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


class Group(StoppableGroup, Grouped):
    """A group of commands whose summaries are in ``sections``, so that listing them imports no command."""

    context_class = Context

    def __init__(self, *, sections: Mapping[str, Mapping[str, Home]], **settings: Any) -> None:
        homes = {name: home for each in sections.values() for name, home in each.items()}
        super().__init__(commands=Commands(homes), **settings)
        self.sections = sections

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Commands first."""
        self.format_commands(ctx, formatter)
        Grouped.format_options(self, ctx, formatter)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, homes in self.sections.items():
            with formatter.section(title):
                formatter.write_dl([(name, home.summary) for name, home in homes.items()])


class SubGroup(StoppableGroup, Grouped):
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

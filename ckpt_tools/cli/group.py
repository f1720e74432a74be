"""The group of commands, in sections, and the context that they run in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from importlib import import_module
from typing import Any, NamedTuple

import click

from ckpt_tools.cli import reporting
from ckpt_tools.cli.ending import StoppableGroup
from ckpt_tools.cli.settings import DESTRUCTIVE_OPTIONS, DefaultFromSettings, SettingsDefaults
from ckpt_tools.errors import UsageError
from ckpt_tools.messages.help_text import GroupedCommand, HelpContext
from ckpt_tools.messages.wording import escape_unprintable


class CommandContext(HelpContext):
    """The context of a running command: what it logs goes to stderr, and what was not typed is taken from settings."""

    def __init__(self, command: click.Command, parent: click.Context | None = None, **settings: Any) -> None:
        if parent is not None:
            settings["default_map"] = SettingsDefaults(self, _inherit_quiet(command, parent))
        super().__init__(command, parent, **settings)

    def invoke(self, callback: Callable[..., Any], /, *arguments: Any, **options: Any) -> Any:
        used_defaults = self._find_used_defaults()
        for name, each in used_defaults.items():
            _report_default(name, each)
        with reporting.log_to_stderr(quiet=bool(self.params.get("quiet"))):
            # A default from settings may not apply to this command line, as --memory to a format that takes none. The
            # API names it; the command runs again without it, at most once for each. What is typed is always refused.
            while True:
                try:
                    return super().invoke(callback, *arguments, **options)
                except UsageError as error:
                    if error.inapplicable not in used_defaults:
                        origins = [
                            f"{each.option} is from {each.origin}"
                            for each in used_defaults.values()
                            if each.option in error.message or repr(each.value) in error.message
                        ]
                        if not origins:
                            raise
                        message = f"{error.message} ({'; '.join(origins)})"
                        raise UsageError(message, path=error.path, key=error.key) from error
                    dropped_default = used_defaults.pop(error.inapplicable)
                    options |= self._make_builtin_default(error.inapplicable)
                    if reporting.is_verbose():
                        reporting.print_notice(
                            f"{dropped_default.option} from {dropped_default.origin} does not apply here", "info"
                        )

    def _find_used_defaults(self) -> dict[str, DefaultFromSettings]:
        """The values of this command that were neither typed nor left to their defaults."""
        defaults = self.default_map.found_defaults if isinstance(self.default_map, SettingsDefaults) else {}
        return {name: each for name, each in defaults.items() if self.is_from_settings(name) and each.origin != TYPED}

    def is_from_settings(self, name: str) -> bool:
        """Whether the value of the parameter is from settings."""
        return self.get_parameter_source(name) is click.core.ParameterSource.DEFAULT_MAP

    def _make_builtin_default(self, name: str) -> dict[str, Any]:
        """The parameter with its default."""
        option = next(each for each in self.command.params if each.name == name)
        return {
            name: option.process_value(self, False if isinstance(option, click.Option) and option.is_flag else None)
        }


TYPED = "typed before the command"


def _inherit_quiet(command: click.Command, parent: click.Context) -> dict[str, DefaultFromSettings]:
    """``--quiet`` where it stands before the command. Raises ``UsageError`` if that has none."""
    root = parent.find_root()
    if not root.params.get("quiet") or isinstance(command, click.Group):
        return {}
    if all(each.name != "quiet" for each in command.params):
        raise UsageError(f"{command.name} has no --quiet")
    return {"quiet": DefaultFromSettings("--quiet", True, TYPED)}


def _report_default(name: str, default: DefaultFromSettings) -> None:
    """On stderr: where a value is from. That of a store may be a secret."""
    is_destructive = name in DESTRUCTIVE_OPTIONS and bool(default.value)
    if is_destructive or reporting.is_verbose():
        value = (
            "" if name == "storage_options" or default.value is True else f" {escape_unprintable(str(default.value))}"
        )
        reporting.print_notice(
            f"{default.option}{value} is from {default.origin}", "warning" if is_destructive else "info"
        )


class CommandLocation(NamedTuple):
    """The module of this package that a command is in, and the first sentence of its help."""

    module: str
    summary: str


class LazyCommands(MutableMapping[str, click.Command]):
    """Commands by name. Each is imported when it is asked for, so that one command does not pay for the others."""

    def __init__(self, locations: Mapping[str, CommandLocation]) -> None:
        self._locations = locations
        self._commands: dict[str, click.Command | None] = dict.fromkeys(locations)

    def __getitem__(self, name: str) -> click.Command:
        command = self._commands[name]
        if command is None:
            module = import_module(f"ckpt_tools.cli.{self._locations[name].module}")
            self[name] = command = getattr(module, f"{name.replace('-', '_')}_command")
        return command

    def __setitem__(self, name: str, command: click.Command) -> None:
        command.context_class = CommandContext
        self._commands[name] = command

    def __delitem__(self, name: str) -> None:
        del self._commands[name]

    def __contains__(self, name: object) -> bool:
        return name in self._commands

    def __iter__(self) -> Iterator[str]:
        return iter(self._commands)

    def __len__(self) -> int:
        return len(self._commands)


class RootGroup(StoppableGroup, GroupedCommand):
    """A group of commands whose summaries are in ``sections``, so that listing them imports no command."""

    context_class = CommandContext

    def __init__(self, *, sections: Mapping[str, Mapping[str, CommandLocation]], **settings: Any) -> None:
        locations = {name: home for each in sections.values() for name, home in each.items()}
        super().__init__(commands=LazyCommands(locations), **settings)
        self.sections = sections

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Commands first."""
        self.format_commands(ctx, formatter)
        GroupedCommand.format_options(self, ctx, formatter)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, locations in self.sections.items():
            with formatter.section(title):
                formatter.write_dl([(name, location.summary) for name, location in locations.items()])


class CommandGroup(StoppableGroup, GroupedCommand):
    """A command that does something by itself, and has commands."""

    context_class = CommandContext

    def add_command(self, cmd: click.Command, name: str | None = None) -> None:
        cmd.context_class = CommandContext
        super().add_command(cmd, name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, get_summary(each)) for name, each in sorted(self.commands.items())])


def get_summary(command: click.Command) -> str:
    """The first sentence of its help."""
    text = command.help or command.short_help or ""
    words = text.split("\n\n")[0].split()
    end = next((number for number, word in enumerate(words, 1) if word.endswith(".")), len(words))
    return " ".join(words[:end])

"""Options that the command line does not give: from variables ``CKPT_TOOLS_<OPTION>`` and from a settings file.

The environment comes before the file, and the table of a command in the file before the keys for all commands. A name
that no command knows is refused. docs/terminal.md says it to users.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import click

from ckpt_tools.arguments import check_not_empty
from ckpt_tools.cli.beside import ExternalCommand
from ckpt_tools.errors import UsageError
from ckpt_tools.process.credentials import remember_secrets_in_words

PREFIX = "CKPT_TOOLS_"
FILE_VARIABLE = f"{PREFIX}SETTINGS"
INTERNAL_VARIABLES = frozenset(
    {FILE_VARIABLE, f"{PREFIX}RUN_MARK", f"{PREFIX}TEST_MARK", f"{PREFIX}DST", f"{PREFIX}STEP"}
)
"""Variables beside those of options: the file, marks that find the processes of a run, and what ``convert-run`` tells
the command of ``--then``."""

OPTIONS_WITHOUT_SETTINGS = frozenset({"help", "settings", "version"})

DESTRUCTIVE_OPTIONS = frozenset({"allow", "allow_less", "incomplete", "overwrite", "yes"})
"""Parameters that remove or replace something or vouch for code. A file has them in the table of a command alone, and
stderr says so when they are used."""

_FLAGS = {"1": True, "true": True, "0": False, "false": False}


class DefaultFromSettings(NamedTuple):
    """A value of ``option`` that was not typed; ``origin`` names the variable, or the file with its key."""

    option: str
    value: Any
    origin: str


@dataclass(frozen=True, slots=True)
class CommandSettings:
    """``keys`` are those for all commands, ``tables`` those of one by its words, of the file ``file_name``."""

    variables: Mapping[str, str]
    keys: Mapping[str, Any]
    tables: Mapping[tuple[str, ...], Mapping[str, Any]]
    file_name: str

    def find_defaults(self, context: click.Context, words: tuple[str, ...]) -> Mapping[str, DefaultFromSettings]:
        """Values for the command that is typed as ``words``, by parameter. Raises ``UsageError`` for a bad one."""
        defaults: dict[str, DefaultFromSettings] = {}
        for option in _list_options(context.command):
            default = self._find_default(option, words)
            if default is not None:
                defaults[str(option.name)] = _check_default(option, default, context)
        return defaults

    def _find_default(self, option: click.Option, words: tuple[str, ...]) -> DefaultFromSettings | None:
        key = _get_option_key(option)
        if _get_variable_name(key) in self.variables:
            origin = _get_variable_name(key)
            return DefaultFromSettings(f"--{key}", _parse_variable(option, self.variables[origin], origin), origin)
        for title, table in ((f"[{'.'.join(words)}] ", self.tables.get(words, {})), ("", self.keys)):
            if key in table:
                origin = f"{title}{key} in {self.file_name}"
                return DefaultFromSettings(f"--{key}", _parse_file_value(option, table[key], origin), origin)
        return None


def load_settings(group: click.Group, settings_file: str | None) -> CommandSettings:
    """The settings of this process; ``settings_file`` is the file of ``--settings``. Raises ``UsageError``."""
    variables = {
        key: text for key, text in os.environ.items() if key.startswith(PREFIX) and key not in INTERNAL_VARIABLES
    }
    file = _find_settings_file(settings_file)
    if not variables and file is None:
        return CommandSettings({}, {}, {}, "")
    commands = dict(_iterate_commands(group))
    known_keys = {_get_option_key(option) for command in commands.values() for option in _list_options(command)}
    for variable in variables:
        if variable not in map(_get_variable_name, known_keys):
            raise UsageError(
                f"{variable} is not the variable of an "
                f"option{_suggest_nearest(variable, map(_get_variable_name, known_keys))}"
            )
    if file is None:
        return CommandSettings(variables, {}, {}, "")
    keys, tables = _split_tables(_parse_settings_file(file), commands, str(file))
    return CommandSettings(variables, keys, tables, str(file))


def _find_settings_file(settings_file: str | None) -> Path | None:
    """The file that is named, or the user's own if there is one."""
    if settings_file is None and FILE_VARIABLE in os.environ:
        settings_file = os.environ[FILE_VARIABLE]
        check_not_empty(FILE_VARIABLE, settings_file)
    if settings_file is not None:
        check_not_empty("--settings", settings_file)
        return Path(settings_file)
    base = Path(os.environ.get("XDG_CONFIG_HOME", ""))
    default_file = (base if base.is_absolute() else Path.home() / ".config") / "ckpt-tools" / "settings.toml"
    return default_file if default_file.is_file() else None


def _parse_settings_file(file: Path) -> dict[str, Any]:
    import tomllib

    from ckpt_tools.process.text_files import read_text

    try:
        return tomllib.loads(read_text(file))
    except OSError as error:
        raise UsageError(f"the settings file {file} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"the settings file {file} is not TOML: {error}") from error


def _split_tables(
    document: Mapping[str, Any], commands: Mapping[tuple[str, ...], click.Command], file_name: str
) -> tuple[Mapping[str, Any], Mapping[tuple[str, ...], Mapping[str, Any]]]:
    """Keys for all commands, and tables by command. Raises ``UsageError`` for a name that no command knows."""
    keys: dict[str, Any] = {}
    tables: dict[tuple[str, ...], dict[str, Any]] = {}
    pending: list[tuple[tuple[str, ...], Mapping[str, Any]]] = [((), document)]
    while pending:
        words, table = pending.pop()
        selected_commands = commands.values() if not words else [commands[words]] if words in commands else []
        options = {
            _get_option_key(option): option for command in selected_commands for option in _list_options(command)
        }
        for key, value in table.items():
            if isinstance(value, Mapping) and any(each[: len(words) + 1] == (*words, key) for each in commands):
                pending.append(((*words, key), value))
            elif key not in options:
                what = f"an option of {' '.join(words)}" if words else "an option or a command"
                raise UsageError(
                    f"{file_name}: {'.'.join((*words, key))} is not {what}{_suggest_nearest(key, options)}"
                )
            elif not words and options[key].name in DESTRUCTIVE_OPTIONS:
                raise UsageError(f"{file_name}: {key} is for the table of one command, such as [convert]")
            else:
                (tables.setdefault(words, {}) if words else keys)[key] = value
    return keys, tables


def _suggest_nearest(name: str, known_names: Iterable[str]) -> str:
    from difflib import get_close_matches

    matches = get_close_matches(name, list(known_names), 1)
    return f"; the nearest is {matches[0]}" if matches else ""


def _iterate_commands(
    group: click.Group, parent_words: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """The converter's commands by the words that are typed."""
    for name, command in group.commands.items():
        if not isinstance(command, ExternalCommand):
            yield (*parent_words, name), command
        if isinstance(command, click.Group):
            yield from _iterate_commands(command, (*parent_words, name))


def _list_options(command: click.Command) -> list[click.Option]:
    click_options = (each for each in command.params if isinstance(each, click.Option))
    return [each for each in click_options if each.name not in OPTIONS_WITHOUT_SETTINGS]


def _get_option_key(option: click.Option) -> str:
    return max(option.opts, key=len).removeprefix("--")


def _get_variable_name(key: str) -> str:
    return PREFIX + key.upper().replace("-", "_")


def _parse_variable(option: click.Option, text: str, origin: str) -> Any:
    """The value of a variable: several are a line each, and a flag is 1, 0, true or false."""
    if option.is_flag:
        if text.lower() not in _FLAGS:
            raise UsageError(f"{origin} is 1, 0, true or false, and not {text!r}")
        return _FLAGS[text.lower()]
    return text.removesuffix("\n").split("\n") if option.multiple else text


def _parse_file_value(option: click.Option, value: Any, origin: str) -> Any:
    if option.is_flag:
        expected_type, is_expected_type = "true or false", isinstance(value, bool)
    elif option.multiple:
        expected_type, is_expected_type = (
            "a list of strings",
            isinstance(value, list) and all(isinstance(each, str) for each in value),
        )
    else:
        expected_type, is_expected_type = (
            "a string or a number",
            isinstance(value, str | int) and not isinstance(value, bool),
        )
    if not is_expected_type:
        raise UsageError(f"{origin} is {expected_type}")
    return value if isinstance(value, bool | list) else str(value)


def _check_default(option: click.Option, default: DefaultFromSettings, context: click.Context) -> DefaultFromSettings:
    """The value itself; credentials in it are remembered. Raises ``UsageError`` for an empty part, and as click."""
    for text in default.value if isinstance(default.value, list) else [default.value]:
        if isinstance(text, str):
            remember_secrets_in_words([f"--{_get_option_key(option)}", text])
    check_not_empty(default.origin, "" if default.value == [""] else default.value)
    try:
        option.type_cast_value(context, default.value)
    except click.BadParameter as error:
        raise UsageError(f"{default.origin}: {error.message}") from error
    return default


class SettingsDefaults(MutableMapping[str, Any]):
    """Values for parameters that were not typed, found when click first asks: a help needs none."""

    def __init__(self, context: click.Context, fixed_defaults: Mapping[str, DefaultFromSettings]) -> None:
        self._context, self._fixed_defaults = context, fixed_defaults
        self._found_defaults: dict[str, DefaultFromSettings] | None = None

    @property
    def found_defaults(self) -> dict[str, DefaultFromSettings]:
        if self._context.resilient_parsing:  # of a help, which no setting breaks
            return dict(self._fixed_defaults)
        if self._found_defaults is None:
            root = self._context.find_root()
            if FILE_VARIABLE not in root.meta:
                assert isinstance(root.command, click.Group)
                root.meta[FILE_VARIABLE] = load_settings(root.command, root.params.get("settings"))
            words = tuple(_list_command_words(self._context))
            self._found_defaults = {
                **root.meta[FILE_VARIABLE].find_defaults(self._context, words),
                **self._fixed_defaults,
            }
        return self._found_defaults

    def __getitem__(self, name: str) -> Any:
        return self.found_defaults[name].value

    def __setitem__(self, name: str, value: Any) -> None:
        raise TypeError("defaults are not changed")

    def __delitem__(self, name: str) -> None:
        del self.found_defaults[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.found_defaults)

    def __len__(self) -> int:
        return len(self.found_defaults)


def _list_command_words(context: click.Context) -> Sequence[str]:
    """Words of the command of ``context``, without the name of the program."""
    parent_words = (
        [] if context.parent is None or context.parent.parent is None else [*_list_command_words(context.parent)]
    )
    return [*parent_words, str(context.info_name)]

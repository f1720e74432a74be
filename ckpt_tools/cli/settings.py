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
from ckpt_tools.cli.beside import BesideCommand
from ckpt_tools.credentials import remember_words
from ckpt_tools.errors import UsageError

PREFIX = "CKPT_TOOLS_"
FILE = f"{PREFIX}SETTINGS"
INTERNAL = frozenset({FILE, f"{PREFIX}RUN_MARK", f"{PREFIX}TEST_MARK"})
"""Variables beside those of options: the file, and marks that find the processes of a run."""

NO_SETTINGS = frozenset({"help", "settings", "version"})

GRAVE = frozenset({"allow", "allow_less", "incomplete", "overwrite", "yes"})
"""Parameters that remove or replace something or vouch for code. A file has them in the table of a command alone, and
stderr says so when they are used."""

_FLAGS = {"1": True, "true": True, "0": False, "false": False}


class Lent(NamedTuple):
    """A value of ``option`` that was not typed; ``where`` names the variable, or the file with its key."""

    option: str
    value: Any
    where: str


@dataclass(frozen=True, slots=True)
class Settings:
    """``keys`` are those for all commands, ``tables`` those of one by its words, of the file ``name``."""

    variables: Mapping[str, str]
    keys: Mapping[str, Any]
    tables: Mapping[tuple[str, ...], Mapping[str, Any]]
    name: str

    def of(self, context: click.Context, words: tuple[str, ...]) -> Mapping[str, Lent]:
        """Values for the command that is typed as ``words``, by parameter. Raises ``UsageError`` for a bad one."""
        found: dict[str, Lent] = {}
        for option in _options(context.command):
            lent = self._lent(option, words)
            if lent is not None:
                found[str(option.name)] = _checked(option, lent, context)
        return found

    def _lent(self, option: click.Option, words: tuple[str, ...]) -> Lent | None:
        key = _key(option)
        if _variable(key) in self.variables:
            where = _variable(key)
            return Lent(f"--{key}", _of_text(option, self.variables[where], where), where)
        for title, table in ((f"[{'.'.join(words)}] ", self.tables.get(words, {})), ("", self.keys)):
            if key in table:
                where = f"{title}{key} in {self.name}"
                return Lent(f"--{key}", _of_file(option, table[key], where), where)
        return None


def load(group: click.Group, named: str | None) -> Settings:
    """The settings of this process; ``named`` is the file of ``--settings``. Raises ``UsageError``."""
    own = {key: text for key, text in os.environ.items() if key.startswith(PREFIX) and key not in INTERNAL}
    file = _file(named)
    if not own and file is None:
        return Settings({}, {}, {}, "")
    commands = dict(_commands(group))
    known = {_key(option) for command in commands.values() for option in _options(command)}
    for variable in own:
        if variable not in map(_variable, known):
            raise UsageError(f"{variable} is not the variable of an option{_nearest(variable, map(_variable, known))}")
    if file is None:
        return Settings(own, {}, {}, "")
    keys, tables = _parts(_parsed(file), commands, str(file))
    return Settings(own, keys, tables, str(file))


def _file(named: str | None) -> Path | None:
    """The file that is named, or the user's own if there is one."""
    if named is None and FILE in os.environ:
        named = os.environ[FILE]
        check_not_empty(FILE, named)
    if named is not None:
        check_not_empty("--settings", named)
        return Path(named)
    base = Path(os.environ.get("XDG_CONFIG_HOME", ""))
    own = (base if base.is_absolute() else Path.home() / ".config") / "ckpt-tools" / "settings.toml"
    return own if own.is_file() else None


def _parsed(file: Path) -> dict[str, Any]:
    import tomllib

    from ckpt_tools.text_files import read_text

    try:
        return tomllib.loads(read_text(file))
    except OSError as error:
        raise UsageError(f"the settings file {file} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"the settings file {file} is not TOML: {error}") from error


def _parts(
    found: Mapping[str, Any], commands: Mapping[tuple[str, ...], click.Command], name: str
) -> tuple[Mapping[str, Any], Mapping[tuple[str, ...], Mapping[str, Any]]]:
    """Keys for all commands, and tables by command. Raises ``UsageError`` for a name that no command knows."""
    keys: dict[str, Any] = {}
    tables: dict[tuple[str, ...], dict[str, Any]] = {}
    pending: list[tuple[tuple[str, ...], Mapping[str, Any]]] = [((), found)]
    while pending:
        words, table = pending.pop()
        mine = commands.values() if not words else [commands[words]] if words in commands else []
        options = {_key(option): option for command in mine for option in _options(command)}
        for key, value in table.items():
            if isinstance(value, Mapping) and any(each[: len(words) + 1] == (*words, key) for each in commands):
                pending.append(((*words, key), value))
            elif key not in options:
                what = f"an option of {' '.join(words)}" if words else "an option or a command"
                raise UsageError(f"{name}: {'.'.join((*words, key))} is not {what}{_nearest(key, options)}")
            elif not words and options[key].name in GRAVE:
                raise UsageError(f"{name}: {key} is for the table of one command, such as [convert]")
            else:
                (tables.setdefault(words, {}) if words else keys)[key] = value
    return keys, tables


def _nearest(name: str, known: Iterable[str]) -> str:
    from difflib import get_close_matches

    found = get_close_matches(name, list(known), 1)
    return f"; the nearest is {found[0]}" if found else ""


def _commands(group: click.Group, before: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """The converter's commands by the words that are typed."""
    for name, command in group.commands.items():
        if not isinstance(command, BesideCommand):
            yield (*before, name), command
        if isinstance(command, click.Group):
            yield from _commands(command, (*before, name))


def _options(command: click.Command) -> list[click.Option]:
    given = (each for each in command.params if isinstance(each, click.Option))
    return [each for each in given if each.name not in NO_SETTINGS]


def _key(option: click.Option) -> str:
    return max(option.opts, key=len).removeprefix("--")


def _variable(key: str) -> str:
    return PREFIX + key.upper().replace("-", "_")


def _of_text(option: click.Option, text: str, where: str) -> Any:
    """The value of a variable: several are a line each, and a flag is 1, 0, true or false."""
    if option.is_flag:
        if text.lower() not in _FLAGS:
            raise UsageError(f"{where} is 1, 0, true or false, and not {text!r}")
        return _FLAGS[text.lower()]
    return text.removesuffix("\n").split("\n") if option.multiple else text


def _of_file(option: click.Option, value: Any, where: str) -> Any:
    if option.is_flag:
        kind, fits = "true or false", isinstance(value, bool)
    elif option.multiple:
        kind, fits = "a list of strings", isinstance(value, list) and all(isinstance(each, str) for each in value)
    else:
        kind, fits = "a string or a number", isinstance(value, str | int) and not isinstance(value, bool)
    if not fits:
        raise UsageError(f"{where} is {kind}")
    return value if isinstance(value, bool | list) else str(value)


def _checked(option: click.Option, lent: Lent, context: click.Context) -> Lent:
    """The value itself; credentials in it are remembered. Raises ``UsageError`` for an empty part, and as click."""
    for text in lent.value if isinstance(lent.value, list) else [lent.value]:
        if isinstance(text, str):
            remember_words([f"--{_key(option)}", text])
    check_not_empty(lent.where, "" if lent.value == [""] else lent.value)
    try:
        option.type_cast_value(context, lent.value)
    except click.BadParameter as error:
        raise UsageError(f"{lent.where}: {error.message}") from error
    return lent


class Defaults(MutableMapping[str, Any]):
    """Values for parameters that were not typed, found when click first asks: a help needs none."""

    def __init__(self, context: click.Context, fixed: Mapping[str, Lent]) -> None:
        self._context, self._fixed = context, fixed
        self._lent: dict[str, Lent] | None = None

    @property
    def lent(self) -> dict[str, Lent]:
        if self._context.resilient_parsing:  # of a help, which no setting breaks
            return dict(self._fixed)
        if self._lent is None:
            root = self._context.find_root()
            if FILE not in root.meta:
                assert isinstance(root.command, click.Group)
                root.meta[FILE] = load(root.command, root.params.get("settings"))
            words = tuple(_words(self._context))
            self._lent = {**root.meta[FILE].of(self._context, words), **self._fixed}
        return self._lent

    def __getitem__(self, name: str) -> Any:
        return self.lent[name].value

    def __setitem__(self, name: str, value: Any) -> None:
        raise TypeError("defaults are not changed")

    def __delitem__(self, name: str) -> None:
        del self.lent[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.lent)

    def __len__(self) -> int:
        return len(self.lent)


def _words(context: click.Context) -> Sequence[str]:
    """Words of the command of ``context``, without the name of the program."""
    before = [] if context.parent is None or context.parent.parent is None else [*_words(context.parent)]
    return [*before, str(context.info_name)]

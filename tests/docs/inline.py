"""Commands in backticks inside the prose of a page, with or without the name of the program."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from tests.support.commands import all_commands

_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"(?<!`)`([^`]+)`(?!`)")
COMMANDS = {name: command for name, command in all_commands().items() if name not in ("train", "predict", "serve")}

READING = {"inspect", "verify", "diff", "ls", "plan"}
WRITING = {"convert", "merge-lora", "consolidate", "reshard"}


def inline_commands(page: Path) -> list[tuple[str, list[str]]]:
    """Each command with its words; those that only describe a command (``...``, ``A|B``) are none."""
    found = []
    for code in _CODE.findall(_FENCE.sub("", page.read_text())):
        text = " ".join(code.split())
        name, _, rest = text.removeprefix("ckpt-tools ").partition(" ")
        two, _, more = rest.partition(" ")
        if f"{name} {two}" in COMMANDS:
            name, rest = f"{name} {two}", more
        if name in COMMANDS and rest and not re.search(r"\.\.\.|[|<>&;$]|\\", rest):
            found.append((name, shlex.split(rest)))
    return found


def runnable(folder: Path, name: str, words: list[str]) -> str | None:
    """The line to run in ``folder``, which has all that the command reads; it writes to a new place. None for any
    other."""
    places = [word for word in words if not word.startswith("-")]
    is_written = name in WRITING
    inputs = places[: len(COMMANDS[name].params)] if not is_written else places[: 2 if name == "merge-lora" else 1]
    if name not in READING | WRITING or (is_written and len(places) <= len(inputs)):
        return None
    if not inputs or not all((folder / place.partition("@")[0]).exists() for place in inputs):
        return None
    target = places[len(inputs)] if is_written else ""
    new = [f"inline-{word}" if word == target and target else word for word in words]
    return f"ckpt-tools {name} {shlex.join(new)} > /dev/null"

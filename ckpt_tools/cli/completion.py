"""``ckpt-tools completion``, and what a shell is offered. click has the scripts and the protocol."""

from __future__ import annotations

import io
import os
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import get_args

import click
from click.shell_completion import CompletionItem, ShellComplete, get_completion_class

from ckpt_tools.cli import options
from ckpt_tools.core.option_names import ALIASES, DTYPE_NAMES, ReadFormat, WrittenFormat

SHELLS = ("bash", "zsh", "fish")
VARIABLE = "_CKPT_TOOLS_COMPLETE"
"""Set by the script while a shell asks. Its form is click's."""

NAMES_SECONDS = 2.0
"""How long the headers of a checkpoint are waited for."""

PLACES = frozenset({"FILE", "DIR", "FOLDER", "URL", "PATH|URL", "FILE|NAME"})
"""What stands for a path in a help."""

Found = Iterable[str]


@click.command(
    "completion",
    cls=options.Command,
    examples=(
        'eval "$(ckpt-tools completion bash)"',
        'eval "$(ckpt-tools completion zsh)"',
        "ckpt-tools completion fish | source",
    ),
)
@click.argument("shell", metavar="SHELL", type=click.Choice(SHELLS))
@options.verbose
def completion_command(shell: str) -> None:
    """Print the script that completes words in a shell.

    SHELL is bash, zsh or fish. The script completes commands, options, formats, dtypes, recipes, paths, and for
    --include and --exclude the names of tensors. The first line below belongs into ~/.bashrc, the second into
    ~/.zshrc, the third into ~/.config/fish/config.fish.
    """
    click.echo(_shell(shell).source_template % _shell(shell).source_vars(), nl=False)


def _shell(name: str, group: click.Command | None = None) -> ShellComplete:
    found = get_completion_class(name)
    assert found is not None
    return found(group or completion_command, {}, "ckpt-tools", VARIABLE)


def answer(group: click.Group, instruction: str) -> None:
    """Print what completes the words that the shell has, and end the process. Whatever fails offers nothing."""
    items: Sequence[CompletionItem[str]] = ()
    sys.stderr = io.StringIO()
    shell = _shell(instruction.partition("_")[0], group)
    with suppress(Exception, SystemExit):
        words, incomplete = shell.get_completion_args()
        items = _items(shell, words, incomplete)
    with suppress(OSError):
        sys.stdout.write("".join(f"{shell.format_completion(item)}\n" for item in items))
        sys.stdout.flush()
    os._exit(0)  # a thread may still wait for a store


def _items(shell: ShellComplete, words: list[str], incomplete: str) -> Sequence[CompletionItem[str]]:
    from click.shell_completion import _resolve_context, _resolve_incomplete

    context = _resolve_context(shell.cli, shell.ctx_args, shell.prog_name, words)
    wanted, incomplete = _resolve_incomplete(context, words, incomplete)
    if not isinstance(wanted, click.Parameter) or (isinstance(wanted.type, click.Choice) and wanted.name != "dtype"):
        return wanted.shell_complete(context, incomplete)
    if words and words[-1].startswith("-"):  # the option whose value is wanted, without which the line can be parsed
        context = _resolve_context(shell.cli, shell.ctx_args, shell.prog_name, words[:-1])
    found = [name for name in _values(context, wanted) if name.startswith(incomplete)]
    paths = [CompletionItem(incomplete, type="file")] if _is_place(wanted) else []
    return [*paths, *map(CompletionItem, found)]


def _values(context: click.Context, wanted: click.Parameter) -> Found:
    offered: Mapping[str, Callable[[], Found]] = {
        "to": lambda: [*get_args(WrittenFormat), *ALIASES["to"]],
        "from_": lambda: [*get_args(ReadFormat), *ALIASES["from_"]],
        "dtype": lambda: [*DTYPE_NAMES, *ALIASES["dtype"]],
        "recipe": _recipes,
        "include": lambda: _tensors(context),
        "exclude": lambda: _tensors(context),
    }
    return offered.get(str(wanted.name), tuple)()


def _is_place(wanted: click.Parameter) -> bool:
    words = str(wanted.metavar or "").strip("[]")
    is_path = isinstance(wanted.type, click.Path) or words in PLACES or words.endswith("|FILE")
    return isinstance(wanted, click.Argument) or is_path


def _recipes() -> Found:
    from ckpt_tools import list_recipes

    recipes = list_recipes()
    return [*(each.name for each in recipes), *sorted({name for each in recipes for name in each.also})]


def _tensors(context: click.Context) -> Found:
    """Names of the source's tensors, if it answers in time. A recipe makes others, which only a plan tells."""
    given = context.params
    source = given.get("src") or given.get("a") or given.get("base")
    if not source or given.get("recipe"):
        return ()
    names: list[str] = []

    def look() -> None:
        from ckpt_tools import inspect

        with suppress(Exception):
            reading = {name: given[name] for name in ("from_", "tag", "storage_options") if given.get(name)}
            names.extend(dict.fromkeys(each.name for each in inspect(source, **reading).tensors))

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    thread.join(NAMES_SECONDS)
    return tuple(names)

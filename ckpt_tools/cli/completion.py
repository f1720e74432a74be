"""``ckpt-tools completion``, and what a shell is offered. click has the scripts and the protocol."""

from __future__ import annotations

import io
import os
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress

import click
from click.shell_completion import CompletionItem, ShellComplete, get_completion_class

from ckpt_tools.cli import options
from ckpt_tools.core.option_names import DTYPE_NAMES, OPTION_VALUE_ALIASES, READ_FORMATS, WRITTEN_FORMATS

SHELLS = ("bash", "zsh", "fish")
COMPLETION_VARIABLE = "_CKPT_TOOLS_COMPLETE"
"""Set by the script while a shell asks. Its form is click's."""

TENSOR_NAMES_SECONDS = 2.0
"""How long the headers of a checkpoint are waited for."""

PATH_METAVARS = frozenset({"FILE", "DIR", "FOLDER", "URL", "PATH|URL", "FILE|NAME"})
"""What stands for a path in a help."""

Candidates = Iterable[str]


@click.command(
    "completion",
    cls=options.ConverterCommand,
    examples=(
        'eval "$(ckpt-tools completion bash)"',
        'eval "$(ckpt-tools completion zsh)"',
        "ckpt-tools completion fish | source",
    ),
)
@click.argument("shell", metavar="SHELL", type=click.Choice(SHELLS))
@options.verbosity_options
def completion_command(shell: str) -> None:
    """Print the script that completes words in a shell.

    SHELL is bash, zsh or fish. The script completes commands, options, formats, dtypes, recipes, paths, and for
    --include and --exclude the names of tensors. The first line below belongs into ~/.bashrc, the second into
    ~/.zshrc, the third into ~/.config/fish/config.fish.
    """
    click.echo(_get_shell(shell).source_template % _get_shell(shell).source_vars(), nl=False)


def _get_shell(name: str, group: click.Command | None = None) -> ShellComplete:
    shell_class = get_completion_class(name)
    assert shell_class is not None
    return shell_class(group or completion_command, {}, "ckpt-tools", COMPLETION_VARIABLE)


def print_completions(group: click.Group, instruction: str) -> None:
    """Print what completes the words that the shell has, and end the process. Whatever fails offers nothing."""
    items: Sequence[CompletionItem[str]] = ()
    sys.stderr = io.StringIO()
    shell = _get_shell(instruction.partition("_")[0], group)
    with suppress(Exception, SystemExit):
        words, incomplete = shell.get_completion_args()
        items = _list_items(shell, words, incomplete)
    with suppress(OSError):
        sys.stdout.write("".join(f"{shell.format_completion(item)}\n" for item in items))
        sys.stdout.flush()
    os._exit(0)  # a thread may still wait for a store


def _list_items(shell: ShellComplete, words: list[str], incomplete: str) -> Sequence[CompletionItem[str]]:
    from click.shell_completion import _resolve_context, _resolve_incomplete

    context = _resolve_context(shell.cli, shell.ctx_args, shell.prog_name, words)
    parameter, incomplete = _resolve_incomplete(context, words, incomplete)
    if not isinstance(parameter, click.Parameter) or (
        isinstance(parameter.type, click.Choice) and parameter.name != "dtype"
    ):
        return parameter.shell_complete(context, incomplete)
    if words and words[-1].startswith("-"):  # the option whose value is wanted, without which the line can be parsed
        context = _resolve_context(shell.cli, shell.ctx_args, shell.prog_name, words[:-1])
    candidates = [name for name in _list_candidates(context, parameter) if name.startswith(incomplete)]
    metavar = str(parameter.metavar or "").strip("[]")
    takes_path = (
        isinstance(parameter, click.Argument)
        or isinstance(parameter.type, click.Path)
        or metavar in PATH_METAVARS
        or metavar.endswith("|FILE")
    )
    paths = [CompletionItem(incomplete, type="file")] if takes_path else []
    return [*paths, *map(CompletionItem, candidates)]


def _list_candidates(context: click.Context, parameter: click.Parameter) -> Candidates:
    candidates_by_option: Mapping[str, Callable[[], Candidates]] = {
        "to": lambda: [*WRITTEN_FORMATS, *OPTION_VALUE_ALIASES["to"]],
        "from_": lambda: [*READ_FORMATS, *OPTION_VALUE_ALIASES["from_"]],
        "dtype": lambda: [*DTYPE_NAMES, *OPTION_VALUE_ALIASES["dtype"]],
        "recipe": _list_recipe_names,
        "include": lambda: _list_tensor_names(context),
        "exclude": lambda: _list_tensor_names(context),
    }
    return candidates_by_option.get(str(parameter.name), tuple)()


def _list_recipe_names() -> Candidates:
    from ckpt_tools import list_recipes

    recipes = list_recipes()
    return [*(each.name for each in recipes), *sorted({name for each in recipes for name in each.also})]


def _list_tensor_names(context: click.Context) -> Candidates:
    """Names of the source's tensors, if it answers in time. A recipe makes others, which only a plan tells."""
    params = context.params
    source = params.get("src") or params.get("a") or params.get("base")
    if not source or params.get("recipe"):
        return ()
    names: list[str] = []

    def read_names() -> None:
        from ckpt_tools import inspect

        with suppress(Exception):
            read_options = {name: params[name] for name in ("from_", "tag", "storage_options") if params.get(name)}
            names.extend(dict.fromkeys(each.name for each in inspect(source, **read_options).tensors))

    thread = threading.Thread(target=read_names, daemon=True)
    thread.start()
    thread.join(TENSOR_NAMES_SECONDS)
    return tuple(names)

"""The group of commands, and the one place where an error becomes a sentence and an exit code."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence

import click

from ckpt_tools import __version__
from ckpt_tools.cli import process
from ckpt_tools.cli.ending import end, ended_by_signals
from ckpt_tools.cli.group import Group, Home
from ckpt_tools.cli.wrapping import echo, say
from ckpt_tools.core.option_names import on_command_line
from ckpt_tools.core.wording import printable
from ckpt_tools.credentials import mask_output, remember_words, without_secrets
from ckpt_tools.errors import CkptError, StoreError

COMMANDS = {
    "inspect": Home("inspect", "Show what a checkpoint holds, from its headers alone."),
    "cat": Home("inspect", "Print a part of one tensor, as numpy prints it."),
    "ls": Home("runs", "List the checkpoints of a run, the newest first, and whether each is complete."),
    "plan": Home("convert", "Show what convert would read, write, cast, drop and remove."),
    "convert": Home("convert", "Write a checkpoint in another format."),
    "reshard": Home("convert", "Write the same checkpoint in the same format for another number of ranks."),
    "consolidate": Home(
        "convert", "Write the model's weights alone, as safetensors or in the format that DST's ending implies."
    ),
    "merge-lora": Home("convert", "Write a base model with a LoRA adapter of PEFT merged into it."),
    "make-loadable": Home(
        "convert", "Write a file of torch.save again, so that torch.load(weights_only=True) takes it."
    ),
    "verify": Home(
        "verify",
        "Check that DST holds the tensors of SRC bit for bit; without DST, that SRC agrees with its own checksums.",
    ),
    "diff": Home("verify", "Show which tensors of A and B differ, and by how much, in any two formats."),
    "scan": Home("scan", "Prove that loading any file of SRC runs no code, or list what is not proved."),
    "checksum": Home("verify", "Write the digests of a checkpoint's tensors, for verify to check."),
    "sign": Home("verify", "Sign every file of a checkpoint, or a list of digests, with OpenSSF model-signing."),
    "clean": Home("runs", "Remove the leftovers of killed or failed runs at DST or beside it, and nothing else."),
    "prune": Home("runs", "Remove old checkpoints of a run; without --yes, list what would be removed."),
    "recipes": Home("recipes", "List the recipes, which map tensors from one model layout to another."),
    "formats": Home("inspect", "List the formats that can be read and written."),
    "train": Home("beside", "Train a small model whose checkpoints the other commands open."),
    "predict": Home("beside", "Predict images, texts or tables with a checkpoint."),
    "serve": Home("beside", "Serve a model file over HTTP."),
}
"""The commands. A summary is the first sentence of the command's own help, which is not imported to list them."""


@click.group(
    cls=Group,
    homes=COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.version_option(__version__, prog_name="ckpt-tools")
def group() -> None:
    """Open any sharded training checkpoint and write any other, without executing a pickle.

    Exit codes: 0 done, 1 other failure, 2 usage, 3 source not found, 4 malformed or unsupported checkpoint,
    5 I/O failure (a retry may help), 6 differences found, 7 refused as unsafe, 8 destination exists,
    9 over the memory budget; 129, 130, 143 ended by SIGHUP, SIGINT (Ctrl-C), SIGTERM.
    """


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with the documented code."""
    is_process = arguments is None
    if is_process:
        mask_output()
        process.rest()
    try:
        _run(arguments)
    finally:
        if is_process:
            process.end()


def _run(arguments: Sequence[str] | None) -> None:
    words = list(sys.argv[1:] if arguments is None else arguments)
    remember_words(words)
    verbose = "--verbose" in words or "-v" in words
    try:
        with on_command_line(), ended_by_signals(words, is_process=arguments is None):
            code = group.main(words, prog_name="ckpt-tools", standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except CkptError as error:
        _explain(f"Error: {error}", error.exit_code, verbose)
    except click.ClickException as error:
        shown = io.StringIO()
        error.show(file=shown)
        say(shown.getvalue().rstrip("\n"), err=True)
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt) as error:
        end(error, words, lambda sentence: _say(sentence, verbose), is_process=arguments is None)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        _explain(f"Error: {where}{error.strerror or error}", StoreError.exit_code, verbose)
    except MemoryError:
        _explain("Error: the machine is out of memory; lower --memory and --workers.", 1, verbose)
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        _explain(f"Error: {reason} (unexpected; run again with --verbose and report it)", 1, verbose)


def _explain(sentence: str, code: int, verbose: bool) -> None:
    _say(sentence, verbose)
    sys.exit(code)


def _say(sentence: str, verbose: bool) -> None:
    """Print the sentence on stderr; with ``--verbose``, after the traceback."""
    if verbose:
        import traceback

        echo(without_secrets(traceback.format_exc()), err=True)
    say(printable(sentence), err=True)

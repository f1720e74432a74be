"""The group of commands, and the one place where an error becomes a sentence and an exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress

import click

from ckpt_tools import __version__
from ckpt_tools.cli import options, process, reporting
from ckpt_tools.cli.ending import end_command_on_signals, exit_after_signal
from ckpt_tools.cli.group import CommandLocation, RootGroup
from ckpt_tools.core.option_names import use_command_line_spelling
from ckpt_tools.errors import CkptError, StoreError
from ckpt_tools.process.credentials import mask_output, remember_secrets_in_words

PROGRAM = "ckpt-tools"

SECTIONS = {
    "Begin": {
        "samples": CommandLocation("samples", "Write small checkpoints into FOLDER, to try the other commands on."),
    },
    "Look": {
        "inspect": CommandLocation("inspect", "Show what a checkpoint holds, from its headers alone."),
        "cat": CommandLocation("inspect", "Print a part of one tensor, as numpy prints it."),
        "plan": CommandLocation("convert", "Show what convert would read, write, cast, drop and remove."),
        "diff": CommandLocation("verify", "Show which tensors of A and B differ, and by how much, in any two formats."),
        "formats": CommandLocation("inspect", "List the formats that can be read and written."),
        "recipes": CommandLocation("recipes", "List the recipes, which map tensors from one model layout to another."),
    },
    "Convert": {
        "convert": CommandLocation("convert", "Write a checkpoint in another format."),
        "reshard": CommandLocation(
            "convert", "Write the same checkpoint in the same format for another number of ranks."
        ),
        "consolidate": CommandLocation(
            "convert", "Write the model's weights alone, as safetensors or in the format that DST's ending implies."
        ),
        "convert-run": CommandLocation(
            "convert_run", "Write every complete checkpoint of a run in another format, each once."
        ),
        "merge-lora": CommandLocation("convert", "Write a base model with a LoRA adapter of PEFT merged into it."),
        "average": CommandLocation("convert", "Write the average of the weights of several checkpoints."),
        "delta": CommandLocation(
            "delta", "Write the changes from one version of a model to the next, as SGLang applies them."
        ),
        "make-loadable": CommandLocation(
            "convert", "Write a file of torch.save again, so that torch.load(weights_only=True) takes it."
        ),
    },
    "Check": {
        "verify": CommandLocation(
            "verify",
            "Check that DST holds the tensors of SRC bit for bit; without DST, that SRC agrees with its own checksums.",
        ),
        "verify-forward": CommandLocation(
            "beside",
            "Compare what the models of two checkpoints compute for the same inputs, layer by layer.",
        ),
        "check": CommandLocation(
            "check", "Check that a checkpoint is healthy: finite, trained, and whole; beside the previous one too."
        ),
        "scan": CommandLocation("scan", "Prove that loading any file of SRC runs no code, or list what is not proved."),
        "checksum": CommandLocation("verify", "Write the digests of a checkpoint's tensors, for verify to check."),
        "sign": CommandLocation(
            "verify", "Sign every file of a checkpoint, or a list of digests, with OpenSSF model-signing."
        ),
    },
    "Runs": {
        "ls": CommandLocation("runs", "List the checkpoints of a run, the newest first, and whether each is complete."),
        "prune": CommandLocation("runs", "Remove old checkpoints of a run; without --yes, list what would be removed."),
        "clean": CommandLocation(
            "runs", "Remove the leftovers of killed or failed runs at DST or beside it, and nothing else."
        ),
    },
    "Shell": {
        "completion": CommandLocation("completion", "Print the script that completes words in a shell."),
    },
    "Train and serve": {
        "train": CommandLocation("beside", "Train a small model whose checkpoints the other commands open."),
        "predict": CommandLocation("beside", "Predict images, texts or tables with a checkpoint."),
        "serve": CommandLocation("beside", "Serve a model file over HTTP."),
    },
}
"""The commands, as the help lists them. A summary is the first sentence of the command's own help, which is not
imported to list them."""

COMMANDS = {name: home for each in SECTIONS.values() for name, home in each.items()}


@click.group(
    cls=RootGroup,
    sections=SECTIONS,
    headings={"Before any command": ("settings", "log_format", "quiet", "verbose", "version", "help")},
    examples=("ckpt-tools inspect run/step-1000", "ckpt-tools convert run/step-1000 model --to hf --dtype bf16"),
    context_settings={"max_content_width": 110},
)
@click.option(
    "--settings",
    metavar="FILE",
    help="A TOML file of options. Default: ~/.config/ckpt-tools/settings.toml, if it is there.",
)
@options.quiet_option
@options.verbosity_options
@click.version_option(__version__, prog_name=PROGRAM)
def group(settings: str | None, quiet: bool) -> None:
    """Open any sharded training checkpoint and write any other, without executing a pickle.

    Exit codes: 0 done, 1 other failure, 2 usage, 3 source not found, 4 malformed or unsupported checkpoint,
    5 I/O failure (a retry may help), 6 differences found or unhealthy, 7 refused as unsafe, 8 destination exists,
    9 over the memory budget; 129, 130, 143 ended by SIGHUP, SIGINT (Ctrl-C), SIGTERM.
    """


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with the documented code."""
    is_process = arguments is None
    if is_process:
        mask_output()
        process.tune_for_short_life()
    try:
        _run_command_line(arguments)
    except SystemExit as error:
        if is_process:
            process.prepare_exit(error.code if isinstance(error.code, int) else 1)
        raise


def _answer_completion() -> None:
    """Answer a shell that asks for completions, which ends the process."""
    instruction = os.environ.get("_CKPT_TOOLS_COMPLETE", "")
    if instruction.endswith("_complete"):
        from ckpt_tools.cli.completion import print_completions

        print_completions(group, instruction)


def _run_command_line(arguments: Sequence[str] | None) -> None:
    words = list(sys.argv[1:] if arguments is None else arguments)
    remember_secrets_in_words(words)
    reporting.read_log_options(words)
    try:
        if arguments is None:
            _answer_completion()
        with use_command_line_spelling(), end_command_on_signals(words, is_process=arguments is None):
            code = group.main(words, prog_name=PROGRAM, standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except CkptError as error:
        _print_error_and_exit(f"Error: {error}", error, error.exit_code)
    except click.ClickException as error:
        reporting.print_usage_error(error)
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt) as error:
        interrupt = error
        exit_after_signal(
            error, words, lambda said, code: reporting.print_error(said, interrupt, code), is_process=arguments is None
        )
    except BrokenPipeError:
        sys.exit(1)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        _print_error_and_exit(f"Error: {where}{error.strerror or error}", error, StoreError.exit_code)
    except MemoryError as error:
        _print_error_and_exit("Error: the machine is out of memory; lower --memory and --workers.", error, 1)
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        _print_error_and_exit(f"Error: {reason} (unexpected; run again with --verbose and report it)", error, 1)


def _print_error_and_exit(sentence: str, error: BaseException, code: int) -> None:
    with suppress(OSError):  # a full disk below stderr does not change how the command ends
        reporting.print_error(sentence, error, code)
    sys.exit(code)

"""``ckpt-tools convert-run``."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import click

from ckpt_tools.cli import options
from ckpt_tools.cli.output import print_json, print_wrapped, show_notes
from ckpt_tools.core.option_names import DEFAULT_POLL_SECONDS
from ckpt_tools.core.options import RunKeywords
from ckpt_tools.errors import CkptError, UsageError
from ckpt_tools.messages.wording import escape_unprintable, format_count, format_size

if TYPE_CHECKING:
    from ckpt_tools.conversion.convert_run import ConvertedCheckpoint
    from ckpt_tools.core.notes import Note


@click.command(
    "convert-run",
    cls=options.ConverterCommand,
    examples=(
        "ckpt-tools convert-run run 'exported/{step}' --to hf --dtype bf16",
        "ckpt-tools convert-run run 'exported/{step}' --to hf --follow",
    ),
)
@click.argument("run", metavar="RUN")
@click.argument("dst", metavar="DST")
@options.number_list_option("--steps", "N,N", int, "1000,2000", "Convert these steps alone. Default: all.")
@click.option("--every", type=click.IntRange(min=1), metavar="N", help="Convert only steps that are multiples of N.")
@click.option("--last", type=click.IntRange(min=1), metavar="K", help="Convert only the K newest of these.")
@click.option("--follow", is_flag=True, help="Wait for the next checkpoints of a training that goes on.")
@click.option(
    "--until", type=click.IntRange(min=0), metavar="STEP", help="With --follow: end after this step, or a later one."
)
@click.option(
    "--poll",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help=f"With --follow: how often to look. Default: {DEFAULT_POLL_SECONDS:.0f}.",
)
@click.option(
    "--then",
    metavar="COMMAND",
    help="Run this in a shell after each checkpoint, with its place in CKPT_TOOLS_DST and its step in CKPT_TOOLS_STEP.",
)
@options.options_of(RunKeywords)
@options.json_option
@options.output_options
def convert_run_command(run: str, dst: str, then: str | None, as_json: bool, quiet: bool, **keywords: Any) -> None:
    """Write every complete checkpoint of a run in another format, each once.

    DST is a folder or file in which {step} stands for the step, or {name} for the name of the
    checkpoint: 'exported/{step}'. What is there already is not written again, so that the same
    command continues after a kill. The first error ends it.
    """
    from ckpt_tools import convert_run

    if then is not None and not then.strip():
        raise UsageError("--then is empty; name a command")
    last_notes: tuple[Note, ...] = ()

    def show_checkpoint(checkpoint: ConvertedCheckpoint) -> None:
        """Print a line, and what was dropped where that differs from the checkpoint before; then run the command."""
        nonlocal last_notes
        if as_json:
            print_json(checkpoint.to_json(), indent=None)
        else:
            print_wrapped(escape_unprintable(_describe_checkpoint(checkpoint)))
            if checkpoint.report is not None and checkpoint.report.notes != last_notes:
                last_notes = checkpoint.report.notes
                show_notes(last_notes)
        sys.stdout.flush()  # a pipe's reader waits for the line
        if then is not None and checkpoint.report is not None:
            _run_command(then, checkpoint, as_json=as_json)

    report = convert_run(run, dst, on_checkpoint=show_checkpoint, **keywords)
    if not as_json and not quiet:
        print_wrapped(
            f"{format_count(len(report.checkpoints), 'checkpoint')}: {report.num_written:,} written, "
            f"{report.num_published:,} there already, {report.num_skipped:,} skipped"
        )


def _describe_checkpoint(checkpoint: ConvertedCheckpoint) -> str:
    name, report = checkpoint.name, checkpoint.report
    if report is not None:
        return f"{name}: {report.destination}, {format_size(report.plan.file_bytes)}, {report.seconds:.2f} s"
    if checkpoint.destination is not None:
        return f"{name}: {checkpoint.destination} is there already"
    return f"{name}: skipped: {checkpoint.reason}"


def _run_command(command: str, checkpoint: ConvertedCheckpoint, *, as_json: bool) -> None:
    """Run the command of ``--then``; what it prints goes to stderr if stdout has JSON. Raises CkptError if it fails."""
    step = "" if checkpoint.step is None else str(checkpoint.step)
    environment = {**os.environ, "CKPT_TOOLS_DST": str(checkpoint.destination), "CKPT_TOOLS_STEP": step}
    code = subprocess.run(
        command, shell=True, check=False, env=environment, stdin=subprocess.DEVNULL, stdout=2 if as_json else None
    ).returncode
    if code:
        how = f"ended by signal {-code}" if code < 0 else f"failed with exit code {code}"
        raise CkptError(
            f"the command of --then {how} after {checkpoint.name}; {checkpoint.destination} is written, and the "
            f"command is not run for it again"
        )

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


def _parse_steps(context: click.Context, option: click.Parameter, text: str | None) -> tuple[int, ...]:
    words = [] if text is None else text.split(",")
    if not all(word.isascii() and word.isdecimal() and len(word) < 19 for word in words):
        raise click.BadParameter(f"{text!r} is not steps, such as 1000,2000")
    return tuple(map(int, words))


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
@click.option("--steps", metavar="N,N", callback=_parse_steps, help="Convert these steps alone. Default: all.")
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
    lines = _CheckpointLines(then, as_json)
    report = convert_run(run, dst, on_checkpoint=lines.show, **keywords)
    if not as_json and not quiet:
        print_wrapped(
            f"{format_count(len(report.checkpoints), 'checkpoint')}: {report.num_written:,} written, "
            f"{report.num_published:,} there already, {report.num_skipped:,} skipped"
        )


class _CheckpointLines:
    """A line for each checkpoint, and what was dropped where that differs from the checkpoint before."""

    def __init__(self, then: str | None, as_json: bool) -> None:
        self.then, self.as_json = then, as_json
        self.last_notes: tuple[Note, ...] = ()

    def show(self, checkpoint: ConvertedCheckpoint) -> None:
        if self.as_json:
            print_json(checkpoint.to_json(), indent=None)
        else:
            self._print_text(checkpoint)
        sys.stdout.flush()  # a pipe's reader waits for the line
        if self.then is not None and checkpoint.report is not None:
            _run_command(self.then, checkpoint, as_json=self.as_json)

    def _print_text(self, checkpoint: ConvertedCheckpoint) -> None:
        name, report = checkpoint.name, checkpoint.report
        if report is None:
            text = f"skipped: {checkpoint.reason}"
            text = text if checkpoint.destination is None else f"{checkpoint.destination} is there already"
            print_wrapped(escape_unprintable(f"{name}: {text}"))
            return
        size = format_size(report.plan.file_bytes)
        print_wrapped(escape_unprintable(f"{name}: {report.destination}, {size}, {report.seconds:.2f} s"))
        if report.notes != self.last_notes:
            show_notes(report.notes)
            self.last_notes = report.notes


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

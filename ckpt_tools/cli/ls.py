"""``ckpt-tools ls``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ckpt_tools.cli import options
from ckpt_tools.cli.render import print_json
from ckpt_tools.cli.wrapping import say_columns
from ckpt_tools.core.wording import printable, size

if TYPE_CHECKING:
    from ckpt_tools.runs.report import RunCheckpoint


@click.command("ls")
@click.argument("run", metavar="RUN")
@options.storage
@options.as_json
@options.talking
def ls_command(run: str, as_json: bool, quiet: bool, storage_options: dict[str, str]) -> None:
    """List the checkpoints of a run, the newest first, and whether each is complete.

    RUN is a folder or URL that holds checkpoints of any trainer, or one checkpoint.
    Only headers are read. A checkpoint is complete by its trainer's own marker, such
    as .metadata or trainer_state.json.
    """
    from ckpt_tools import ls

    found = ls(run, storage_options=storage_options)
    if as_json:
        print_json(found.to_json())
        return
    header = ("checkpoint", "step", "time (UTC)", "size", "format", "ranks", "complete")
    say_columns(header, [_row(each) for each in found.checkpoints], right=(1, 3, 5))


def _row(each: RunCheckpoint) -> tuple[str, ...]:
    step = "" if each.step is None else f"{each.step:,}"
    ranks = "" if each.world_size is None else str(each.world_size)
    state = "yes" if each.problem is None else f"no: {each.problem}"
    when = "" if each.time is None else each.time.replace("T", " ")[:16]
    return printable(each.name), step, when, size(each.file_bytes), each.format, ranks, printable(state)

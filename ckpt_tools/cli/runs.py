"""``ckpt-tools ls``, ``prune`` and ``clean``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import click

from ckpt_tools.cli import options
from ckpt_tools.cli.render import print_json
from ckpt_tools.cli.wrapping import say, say_columns
from ckpt_tools.core.wording import count, printable, size

if TYPE_CHECKING:
    from ckpt_tools.runs.report import RunCheckpoint


@click.command("ls", cls=options.Command, examples=("ckpt-tools ls run",))
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
    show_listing(found.checkpoints)


def show_listing(checkpoints: Iterable[RunCheckpoint]) -> None:
    header = ("checkpoint", "step", "time (UTC)", "size", "format", "ranks", "complete")
    say_columns(header, map(_row, checkpoints), right=(1, 3, 5))


def _row(each: RunCheckpoint) -> tuple[str, ...]:
    step = "" if each.step is None else f"{each.step:,}"
    ranks = "" if each.world_size is None else str(each.world_size)
    state = "yes" if each.problem is None else f"no: {each.problem}"
    when = "" if each.time is None else each.time.replace("T", " ")[:16]
    return printable(each.name), step, when, size(each.file_bytes), each.format, ranks, printable(state)


@click.command(
    "prune",
    cls=options.Command,
    examples=(
        "ckpt-tools prune run --keep-last 3",
        "ckpt-tools prune run --keep-last 3 --keep-every 1000 --yes",
    ),
)
@click.argument("run", metavar="RUN")
@click.option(
    "--keep-last",
    type=click.IntRange(min=1),
    required=True,
    metavar="K",
    help="Keep the K newest complete checkpoints.",
)
@click.option(
    "--keep-every", type=click.IntRange(min=1), metavar="N", help="Keep checkpoints whose step is a multiple of N."
)
@click.option(
    "--keep-best",
    metavar="METRIC[:min|:max]",
    help="Keep the best checkpoint by a metric in the trainer's own record, e.g. eval_loss:min.",
)
@click.option("--incomplete", is_flag=True, help="Remove incomplete checkpoints too, an hour after their last write.")
@click.option(
    "--allow-less", is_flag=True, help="Prune even if a new checkpoint that stays holds less than an older one."
)
@click.option("--yes", is_flag=True, help="Remove them. Default: list what would be removed.")
@options.storage
@options.as_json
@options.talking
def prune_command(run: str, as_json: bool, quiet: bool, **rules: Any) -> None:
    """Remove old checkpoints of a run; without --yes, list what would be removed.

    The newest complete checkpoint always stays. A checkpoint also stays if its folder holds
    files that no trainer writes, if a link or the file latest names it, or if the trainer's
    own record calls it the best.
    """
    from ckpt_tools import prune

    report = prune(run, **rules)
    if as_json:
        print_json(report.to_json())
        return
    verb = "removed" if report.is_removed else "would go"
    rows = [
        (printable(each.name), "stays" if each.stays else verb, size(each.file_bytes), printable(each.reason))
        for each in report.checkpoints
    ]
    say_columns(("checkpoint", "", "size", "reason"), rows, right=(2,))
    amount = f"{count(report.num_files, 'file')}, {size(report.file_bytes)}"
    if report.is_removed or not report.num_files:
        say(f"{amount} removed" if report.num_files else "nothing to remove")
    else:
        say(f"{amount} would be removed; add --yes to remove them")


@click.command("clean", cls=options.Command, examples=("ckpt-tools clean run/step-1000 --dry-run",))
@click.argument("dst", metavar="DST")
@options.storage
@click.option("--dry-run", is_flag=True, help="List the leftovers and remove nothing.")
@options.as_json
@options.verbose
def clean_command(dst: str, dry_run: bool, as_json: bool, storage_options: dict[str, str]) -> None:
    """Remove the leftovers of killed or failed runs at DST or beside it, and nothing else."""
    from ckpt_tools import clean

    report = clean(dst, dry_run=dry_run, storage_options=storage_options)
    if as_json:
        print_json(report.to_json())
        return
    for left in report.leftovers:
        say(f"{left.url}: {left.kind}, {size(left.num_bytes)}")
    done = f"{size(report.num_bytes)} {'removed' if report.is_removed else 'to be removed'}"
    say(f"{report.destination}: {done if report.leftovers else 'no leftovers'}")

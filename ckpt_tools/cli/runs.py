"""``ckpt-tools ls``, ``prune`` and ``clean``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import click

from ckpt_tools.cli import options
from ckpt_tools.cli.output import print_result, print_table, print_wrapped
from ckpt_tools.messages.wording import escape_unprintable, format_count, format_size

if TYPE_CHECKING:
    from ckpt_tools.runs.listing import RunCheckpoint
    from ckpt_tools.runs.pruning import PruneReport
    from ckpt_tools.stores.publishing import CleanReport


@click.command("ls", cls=options.ConverterCommand, examples=("ckpt-tools ls run",))
@click.argument("run", metavar="RUN")
@options.option_of("storage_options")
@options.json_option
@options.output_options
def ls_command(run: str, as_json: bool, quiet: bool, storage_options: dict[str, str]) -> None:
    """List the checkpoints of a run, the newest first, and whether each is complete.

    RUN is a folder or URL that holds checkpoints of any trainer, or one checkpoint.
    Only headers are read. A checkpoint is complete by its trainer's own marker, such
    as .metadata or trainer_state.json.
    """
    from ckpt_tools import ls

    print_result(ls(run, storage_options=storage_options), as_json, lambda listing: show_listing(listing.checkpoints))


def show_listing(checkpoints: Iterable[RunCheckpoint]) -> None:
    header = ("checkpoint", "step", "time (UTC)", "size", "format", "ranks", "complete")
    print_table(header, map(_format_row, checkpoints), right_aligned=(1, 3, 5))


def _format_row(checkpoint: RunCheckpoint) -> tuple[str, ...]:
    step = "" if checkpoint.step is None else f"{checkpoint.step:,}"
    ranks = "" if checkpoint.world_size is None else str(checkpoint.world_size)
    completeness = "yes" if checkpoint.problem is None else f"no: {checkpoint.problem}"
    timestamp = "" if checkpoint.time is None else checkpoint.time.replace("T", " ")[:16]
    return (
        escape_unprintable(checkpoint.name),
        step,
        timestamp,
        format_size(checkpoint.file_bytes),
        checkpoint.format,
        ranks,
        escape_unprintable(completeness),
    )


@click.command(
    "prune",
    cls=options.ConverterCommand,
    examples=(
        "ckpt-tools prune run --keep-last 3",
        "ckpt-tools prune run --keep-last 3 --keep-every 1000 --healthy --yes",
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
@click.option(
    "--healthy",
    is_flag=True,
    help="Read the newest checkpoints, and keep the newest one without NaN and infinities too.",
)
@click.option("--incomplete", is_flag=True, help="Remove incomplete checkpoints too, an hour after their last write.")
@click.option(
    "--allow-less", is_flag=True, help="Prune even if a new checkpoint that stays holds less than an older one."
)
@click.option("--yes", is_flag=True, help="Remove them. Default: list what would be removed.")
@options.option_of("storage_options")
@options.json_option
@options.output_options
def prune_command(run: str, as_json: bool, quiet: bool, **rules: Any) -> None:
    """Remove old checkpoints of a run; without --yes, list what would be removed.

    The newest complete checkpoint always stays. A checkpoint also stays if its folder holds
    files that no trainer writes, if a link or the file latest names it, or if the trainer's
    own record calls it the best.
    """
    from ckpt_tools import prune

    print_result(prune(run, **rules), as_json, _print_pruned)


def _print_pruned(report: PruneReport) -> None:
    verb = "removed" if report.is_removed else "would go"
    rows = [
        (
            escape_unprintable(each.name),
            "stays" if each.stays else verb,
            format_size(each.file_bytes),
            escape_unprintable(each.reason),
        )
        for each in report.checkpoints
    ]
    print_table(("checkpoint", "", "size", "reason"), rows, right_aligned=(2,))
    amount = f"{format_count(report.num_files, 'file')}, {format_size(report.file_bytes)}"
    if report.is_removed or not report.num_files:
        print_wrapped(f"{amount} removed" if report.num_files else "nothing to remove")
    else:
        print_wrapped(f"{amount} would be removed; add --yes to remove them")


@click.command("clean", cls=options.ConverterCommand, examples=("ckpt-tools clean run/step-1000 --dry-run",))
@click.argument("dst", metavar="DST")
@options.option_of("storage_options")
@click.option("--dry-run", is_flag=True, help="List the leftovers and remove nothing.")
@options.json_option
@options.verbosity_options
def clean_command(dst: str, dry_run: bool, as_json: bool, storage_options: dict[str, str]) -> None:
    """Remove the leftovers of killed or failed runs at DST or beside it, and nothing else."""
    from ckpt_tools import clean

    print_result(clean(dst, dry_run=dry_run, storage_options=storage_options), as_json, _print_leftovers)


def _print_leftovers(report: CleanReport) -> None:
    for leftover in report.leftovers:
        print_wrapped(f"{leftover.url}: {leftover.kind}, {format_size(leftover.num_bytes)}")
    outcome = f"{format_size(report.num_bytes)} {'removed' if report.is_removed else 'to be removed'}"
    print_wrapped(f"{report.destination}: {outcome if report.leftovers else 'no leftovers'}")

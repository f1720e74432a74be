"""``ckpt-tools prune``."""

from __future__ import annotations

import click

from ckpt_tools.cli import options
from ckpt_tools.cli.render import print_json
from ckpt_tools.cli.wrapping import say, say_columns
from ckpt_tools.core.wording import count, printable, size


@click.command("prune")
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
@click.option("--yes", is_flag=True, help="Remove them. Default: list what would be removed.")
@options.storage
@options.as_json
@options.talking
def prune_command(
    run: str,
    keep_last: int,
    keep_every: int | None,
    keep_best: str | None,
    incomplete: bool,
    yes: bool,
    as_json: bool,
    quiet: bool,
    storage_options: dict[str, str],
) -> None:
    """Remove old checkpoints of a run; without --yes, list what would be removed.

    The newest complete checkpoint always stays. A checkpoint also stays if its folder holds
    files that no trainer writes, or if a link or the file latest names it.
    """
    from ckpt_tools import prune

    report = prune(
        run,
        keep_last=keep_last,
        keep_every=keep_every,
        keep_best=keep_best,
        incomplete=incomplete,
        yes=yes,
        storage_options=storage_options,
    )
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

"""``ckpt-tools clean``."""

from __future__ import annotations

import click

from ckpt_tools.cli import options
from ckpt_tools.cli.render import print_json
from ckpt_tools.cli.wrapping import say
from ckpt_tools.core.wording import size


@click.command("clean")
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

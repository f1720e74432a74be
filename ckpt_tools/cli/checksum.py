"""``ckpt-tools checksum``."""

from __future__ import annotations

from typing import Any

import click

from ckpt_tools.cli import options
from ckpt_tools.cli.render import print_json, progress
from ckpt_tools.cli.wrapping import say
from ckpt_tools.core.wording import count, size


@click.command("checksum")
@options.source
@click.option("--output", metavar="FILE", help="The file to write; - prints the digests. Default: stored with SRC.")
@options.reading
@options.workers
@click.option("--overwrite", is_flag=True, help="Replace existing digests.")
@options.as_json
@options.talking
def checksum_command(src: str, output: str | None, as_json: bool, quiet: bool, **chosen: Any) -> None:
    """Write the digests of a checkpoint's tensors, for verify to check.

    They are stored in the folder of SRC, or beside its file.
    """
    from ckpt_tools import checksum

    with progress("hashing", quiet=quiet) as on_progress:
        report = checksum(src, output=output, on_progress=on_progress, **chosen)
    if as_json or report.destination is None:
        print_json(report.to_json())
    else:
        say(f"{report.destination}: digests of {count(report.num_tensors, 'tensor')}, {size(report.num_bytes)}")

"""``ckpt-tools verify``."""

from __future__ import annotations

from typing import Any

import click

from ckpt_tools.cli import options
from ckpt_tools.cli.render import print_json, progress, show, size, table
from ckpt_tools.errors import DifferenceError


@click.command("verify")
@options.source
@click.argument("dst", metavar="[DST]", required=False)
@options.reading
@click.option("--state", type=click.Choice(["model", "all"]), help="As it was for convert.")
@options.choosing
@click.option("--workers", type=click.IntRange(min=1), help="Threads; one a processor if left out.")
@options.as_json
@options.talking
def verify_command(src: str, dst: str | None, as_json: bool, quiet: bool, **chosen: Any) -> None:
    """Check that DST holds the tensors of SRC bit for bit; without DST, that SRC agrees with its own checksums.

    Give the options that DST was converted with. Exits with 6 where a tensor differs.
    """
    from ckpt_tools import verify

    with progress("verifying", quiet=quiet) as on_progress:
        report = verify(src, dst, on_progress=on_progress, **chosen)
    if as_json:
        print_json(report.to_json())
    elif report.equal:
        same = "are bit for bit the same" if dst else "are whole"
        click.echo(f"{report.num_tensors:,} tensors, {size(report.num_bytes)}: all {same}")
    else:
        drawn = table(None, "tensor", "difference")
        for difference in report.differences:
            drawn.add_row(str(difference.key), difference.what)
        show(drawn)
    if not report.equal:
        raise DifferenceError(f"{len(report.differences):,} of {report.num_tensors:,} tensors differ")

"""``ckpt-tools verify``."""

from __future__ import annotations

from typing import Any

import click

from ckpt_tools.cli import options
from ckpt_tools.cli.diff import refuse, show_report
from ckpt_tools.cli.render import print_json, progress
from ckpt_tools.core.wording import count


@click.command("verify")
@options.source
@click.argument("dst", metavar="[DST]", required=False)
@options.reading
@options.state("As it was for convert.")
@options.choosing
@click.option("--digests", metavar="FILE", help="Check SRC against these digests; those that lie with it if left out.")
@click.option("--public-key", metavar="FILE", help="Check the signature of SRC, or of --digests, with this key first.")
@click.option("--signature", metavar="FILE", help="Where the signature is; with what it signs if left out.")
@options.workers
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
    else:
        show_report(report, "are bit for bit the same" if dst else _whole(report.num_digests))
    refuse(report)


def _whole(num_digests: int | None) -> str:
    if num_digests is None:
        return "are whole; no digests lie with them (see checksum)"
    return f"are whole, and have the {count(num_digests, 'digest')} written down for them"

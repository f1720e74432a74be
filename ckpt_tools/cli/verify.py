"""``ckpt-tools verify``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ckpt_tools.cli import options
from ckpt_tools.cli.diff import exit_by, show_report
from ckpt_tools.cli.render import print_json, progress
from ckpt_tools.cli.wrapping import say
from ckpt_tools.core.wording import count

if TYPE_CHECKING:
    from ckpt_tools.verification.report import VerifyReport


@click.command("verify")
@options.source
@click.argument("dst", metavar="[DST]", required=False)
@options.reading
@options.state("The --state of the conversion.")
@options.choosing
@click.option("--digests", metavar="FILE", help="Check SRC against these digests. Default: those stored with SRC.")
@click.option("--public-key", metavar="FILE", help="First check the signature of SRC, or of --digests, with this key.")
@click.option("--signature", metavar="FILE", help="The file of the signature. Default: stored with what it signs.")
@options.workers
@options.listing
@options.as_json
@options.talking
def verify_command(src: str, dst: str | None, top: int | None, as_json: bool, quiet: bool, **chosen: Any) -> None:
    """Check that DST holds the tensors of SRC bit for bit; without DST, that SRC agrees with its own checksums.

    Give the same options as for the conversion to DST. Exits with 6 if a tensor differs.
    """
    from ckpt_tools import verify

    with progress("verifying", quiet=quiet) as on_progress:
        report = verify(src, dst, on_progress=on_progress, **chosen)
    if as_json:
        print_json(report.to_json())
    else:
        _show(report, dst, top)
    exit_by(report)


def _show(report: VerifyReport, dst: str | None, top: int | None) -> None:
    if not report.equal:
        say("verification failed")
    show_report(report, "are bit for bit the same" if dst else _whole(report.num_digests), top=top)
    if dst and set(report.summary.aspects) == {"dtype"}:
        say("Every difference is in dtype. Was DST converted with --dtype? Then give verify the same --dtype.")


def _whole(num_digests: int | None) -> str:
    if num_digests is None:
        return "are whole; no digests are stored with them (see checksum)"
    return f"are whole, and match {count(num_digests, 'recorded digest')}"

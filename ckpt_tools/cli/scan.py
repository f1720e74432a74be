"""``ckpt-tools scan``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ckpt_tools.cli import options
from ckpt_tools.cli.render import print_json
from ckpt_tools.cli.wrapping import say, say_item
from ckpt_tools.core.wording import count, printable
from ckpt_tools.errors import MalformedError, UnsafeError

if TYPE_CHECKING:
    from ckpt_tools.verification.scan import ScanReport


@click.command("scan")
@options.source
@options.as_json
@options.talking
def scan_command(src: str, as_json: bool, quiet: bool, storage_options: dict[str, str]) -> None:
    """List the calls that loading the pickles of SRC would execute. Nothing is executed.

    Exits with 7 if a call is unsafe, or if a file name leads out of SRC. Otherwise
    exits with 4 if a pickle cannot be read to its end.
    """
    from ckpt_tools import scan

    report = scan(src, storage_options=storage_options)
    if as_json:
        print_json(report.to_json())
    elif report.clean:
        say(f"{count(report.num_pickles, 'pickle')} in {count(report.num_files, 'file')}: no unsafe calls")
    else:
        _show(report)
    if report.unsafe:
        raise UnsafeError(f"{src} is not safe to load: {count(report.num_findings, 'finding')}")
    if not report.clean:
        raise MalformedError(f"{src} cannot be checked to the end: {count(report.num_findings, 'finding')}")


def _show(report: ScanReport) -> None:
    for finding in report.findings:
        place = f" ({finding.place})" if finding.place else ""
        say_item(printable(f"{finding.danger.value}: {finding.file}{place}"), printable(finding.what))
    if report.num_findings > len(report.findings):
        say(f"and {report.num_findings - len(report.findings):,} more")

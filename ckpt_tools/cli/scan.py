"""``ckpt-tools scan``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ckpt_tools.cli import options
from ckpt_tools.cli.render import print_json, show, table
from ckpt_tools.cli.wrapping import say
from ckpt_tools.core.wording import count
from ckpt_tools.errors import MalformedError, UnsafeError

if TYPE_CHECKING:
    from ckpt_tools.verification.scan import ScanReport


@click.command("scan")
@options.source
@options.as_json
@options.talking
def scan_command(src: str, as_json: bool, quiet: bool, storage_options: dict[str, str]) -> None:
    """Show what a loader that executes pickles would run of any file of SRC; run nothing.

    Exits with 7 where there is something that would run or lead out of SRC, and with 4 where there is nothing of that
    kind but a pickle that could not be followed to its end.
    """
    from ckpt_tools import scan

    report = scan(src, storage_options=storage_options)
    if as_json:
        print_json(report.to_json())
    elif report.clean:
        say(f"{count(report.num_pickles, 'pickle')} in {count(report.num_files, 'file')}: nothing in them would run")
    else:
        _show(report)
    if report.unsafe:
        raise UnsafeError(f"{src} is not safe to load: {count(report.num_findings, 'finding')}")
    if not report.clean:
        raise MalformedError(f"{src} could not be followed to the end: {count(report.num_findings, 'finding')}")


def _show(report: ScanReport) -> None:
    from rich.text import Text

    drawn = table(None, "file", "place", "", "what")
    for finding in report.findings:
        # As they are: brackets in a call are no markup.
        drawn.add_row(*map(Text, (finding.file, finding.place, finding.danger.value, finding.what)))
    show(drawn)
    if report.num_findings > len(report.findings):
        say(f"and {report.num_findings - len(report.findings):,} more")

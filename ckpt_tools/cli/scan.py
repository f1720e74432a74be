"""``ckpt-tools scan``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ckpt_tools.cli import options
from ckpt_tools.cli.render import print_json
from ckpt_tools.cli.wrapping import say, say_item
from ckpt_tools.core.wording import count, printable, size
from ckpt_tools.errors import UnsafeError, UsageError

if TYPE_CHECKING:
    from ckpt_tools.verification.scan import ScanReport

_FORMATS = ("text", "json", "sarif")


@click.command("scan")
@options.source
@click.option(
    "--allow",
    multiple=True,
    metavar="MODULE.NAME",
    help="A class or function that you vouch for, by its exact name. Repeatable.",
)
@click.option("--format", "form", type=click.Choice(_FORMATS), help="How to print the result. Default: text.")
@options.as_json
@options.talking
def scan_command(
    src: str, allow: tuple[str, ...], form: str | None, as_json: bool, quiet: bool, storage_options: dict[str, str]
) -> None:
    """Prove that loading any file of SRC runs no code, or list what is not proved.

    Nothing is executed. Exits with 0 if every byte of every file was accounted for
    and nothing would run. Otherwise exits with 7.
    """
    from ckpt_tools import scan

    form = _form(form, as_json)
    report = scan(src, allow=allow, storage_options=storage_options)
    if form == "json":
        print_json(report.to_json())
    elif form == "sarif":
        print_json(report.to_sarif())
    else:
        _show(report)
    if not report.clean:
        raise UnsafeError(f"{src} is not proved to be safe: {count(report.num_findings, 'finding')}")


def _form(form: str | None, as_json: bool) -> str:
    if as_json and form not in (None, "json"):
        raise UsageError(f"--json and --format {form} contradict each other; give one of them")
    return "json" if as_json else form or "text"


def _show(report: ScanReport) -> None:
    for finding in report.findings:
        place = f" ({finding.place})" if finding.place else ""
        say_item(printable(f"{finding.danger.value}: {finding.file}{place}"), printable(finding.what))
    if report.num_findings > len(report.findings):
        say(f"and {report.num_findings - len(report.findings):,} more")
    proved = f"{count(report.num_files, 'file')} ({size(report.num_bytes)}), {count(report.num_pickles, 'pickle')}"
    say(f"proved: {proved}" if report.findings else f"nothing would run: proved {proved}")
    if report.allowed:
        say(f"allowed by you: {', '.join(report.allowed)}")
    if report.names:
        say(
            "if you trust the code of these names on the loading machine: "
            + " ".join(f"--allow {n}" for n in report.names)
        )

"""``ckpt-tools diff``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ckpt_tools.cli import options
from ckpt_tools.cli.render import print_json, progress, show, show_notes, table
from ckpt_tools.cli.wrapping import say
from ckpt_tools.core.wording import count, size
from ckpt_tools.errors import DifferenceError

if TYPE_CHECKING:
    from ckpt_tools.verification.report import VerifyReport


@click.command("diff")
@click.argument("a", metavar="A")
@click.argument("b", metavar="B")
@options.storage
@options.reading
@options.state("Weights alone, or everything. Default: everything.")
@options.weights
@options.naming
@options.workers
@options.as_json
@options.talking
def diff_command(a: str, b: str, as_json: bool, quiet: bool, **chosen: Any) -> None:
    """Show which tensors of A and B differ, and by how much, whatever the formats.

    Names of A can be rewritten into those of B; --from, --tag and the keys say how A is read. Exits with 6 where
    anything differs.
    """
    from ckpt_tools import diff

    with progress("comparing", quiet=quiet) as on_progress:
        report = diff(a, b, on_progress=on_progress, **chosen)
    if as_json:
        print_json(report.to_json())
    else:
        show_report(report, "are the same, bit for bit")
    refuse(report)


def show_report(report: VerifyReport, same: str) -> None:
    """The differences, or one line that says that there are none."""
    if report.equal:
        say(f"{count(report.num_tensors, 'tensor')}, {size(report.num_bytes)}: all {same}")
    else:
        drawn = table(None, "tensor", "difference")
        for difference in report.differences:
            drawn.add_row(str(difference.key), difference.what)
        show(drawn)
    show_notes(report.notes)


def refuse(report: VerifyReport) -> None:
    """Raises DifferenceError where there are differences."""
    if not report.equal:
        differ = "differs" if report.num_differing == 1 else "differ"
        raise DifferenceError(f"{report.num_differing:,} of {count(report.num_tensors, 'tensor')} {differ}")

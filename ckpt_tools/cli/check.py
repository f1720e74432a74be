"""``ckpt-tools check``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ckpt_tools.cli import options
from ckpt_tools.cli.output import MAX_TABLE_ROWS, print_result, print_table, print_wrapped, show_notes
from ckpt_tools.cli.reporting import show_progress
from ckpt_tools.core.options import ReadKeywords
from ckpt_tools.errors import DifferenceError
from ckpt_tools.messages.wording import escape_unprintable, format_count, format_size, format_tensor_count

if TYPE_CHECKING:
    from ckpt_tools.verification.health.report import HealthReport


@click.command(
    "check",
    cls=options.ConverterCommand,
    examples=(
        "ckpt-tools check run/step-2000",
        "ckpt-tools check run/step-2000 --against run/step-1000 --sample",
    ),
)
@options.source_argument
@options.options_of(ReadKeywords)
@click.option("--against", metavar="PREV", help="The previous checkpoint of the run, of any format.")
@click.option("--ignore", multiple=True, metavar="RULE", help="Make no findings of this rule. Repeatable.")
@options.option_of("exclude", "Do not look at tensors whose names match. Repeatable.")
@click.option("--sample", is_flag=True, help="Read at most 16 blocks of each tensor.")
@options.option_of("memory")
@options.option_of("workers")
@options.json_option
@options.transfer_options
def check_command(src: str, as_json: bool, quiet: bool, **keywords: Any) -> None:
    """Check that a checkpoint is healthy: finite, trained, and whole; beside the previous one too.

    Finds NaN and infinities, weights and moments of zeros, layers, experts and optimizer state that are missing,
    and adapters without their other half. --against adds weights that jumped, that did not change, and that are lost.
    Exits with 6 if anything is found.
    """
    from ckpt_tools import check

    with show_progress("reading", quiet=quiet) as on_progress:
        report = check(src, on_progress=on_progress, **keywords)
    print_result(report, as_json, _print_health)
    if not report.healthy:
        raise DifferenceError(f"{src} is not healthy: {format_count(len(report.findings), 'finding')}")


def _print_health(report: HealthReport) -> None:
    findings = report.findings
    rows = [
        (each.rule.value, *map(escape_unprintable, (each.full_name, each.what))) for each in findings[:MAX_TABLE_ROWS]
    ]
    if rows:
        print_table(("rule", "tensor", "finding"), rows)
    if len(findings) > len(rows):
        print_wrapped(f"and {len(findings) - len(rows):,} more; see --json")
    verdict = format_count(len(findings), "finding") if findings else "healthy"
    print_wrapped(f"{format_tensor_count(report.tensors_by_role)}, {format_size(report.num_bytes)} read: {verdict}")
    show_notes(report.notes)

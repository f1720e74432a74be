"""``ckpt-tools delta``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ckpt_tools.cli import options
from ckpt_tools.cli.output import print_result, print_wrapped, show_notes
from ckpt_tools.cli.reporting import show_progress
from ckpt_tools.core.options import DeltaKeywords
from ckpt_tools.messages.wording import format_count, format_size

if TYPE_CHECKING:
    from ckpt_tools.conversion.delta import DeltaReport


@click.command(
    "delta",
    cls=options.ConverterCommand,
    examples=("ckpt-tools delta base run/step-1000 published/weight_v000001",),
)
@click.argument("old", metavar="OLD")
@click.argument("new", metavar="NEW")
@click.argument("out", metavar="OUT")
@options.options_of(DeltaKeywords)
@options.json_option
@options.transfer_options
def delta_command(old: str, new: str, out: str, as_json: bool, quiet: bool, **keywords: Any) -> None:
    """Write the changes from one version of a model to the next, as SGLang applies them.

    OLD and NEW are checkpoints of any formats with the same tensors; weights of NEW are cast to the dtypes in OLD. OUT
    is a folder weight_vNNNNNN, as slime publishes it. The folder for temporary files (TMPDIR) needs room for it.
    """
    from ckpt_tools import delta

    with show_progress("comparing", quiet=quiet) as on_progress:
        report = delta(old, new, out, on_progress=on_progress, **keywords)
    print_result(report, as_json, _print_delta)


def _print_delta(report: DeltaReport) -> None:
    elements, tensors = format_count(report.num_elements, "element"), format_count(report.num_tensors, "tensor")
    print_wrapped(
        f"{report.destination}: {report.num_changed_elements:,} of {elements} changed ({report.changed_ratio:.2%}), in "
        f"{report.num_changed_tensors:,} of {tensors}; {format_size(report.bytes_written)}, {report.size_ratio:.2%} of "
        f"{format_size(report.num_bytes)}, {report.seconds:.2f} s"
    )
    show_notes(report.notes)

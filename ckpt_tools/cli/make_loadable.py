"""``ckpt-tools make-loadable``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ckpt_tools.cli import options
from ckpt_tools.cli.render import print_json, progress
from ckpt_tools.cli.wrapping import say, say_item
from ckpt_tools.core.wording import count, printable, size

if TYPE_CHECKING:
    from ckpt_tools.loadable import LoadableReport


@click.command("make-loadable")
@options.source
@click.argument("dst", metavar="DST")
@click.option("--strict", is_flag=True, help="Fail if something would be left out.")
@click.option("--overwrite", is_flag=True, help="Replace the file at DST, and nothing else.")
@click.option("--fsync", is_flag=True, help="Wait until the output is safe from a power failure.")
@options.as_json
@options.talking
def make_loadable_command(
    src: str,
    dst: str,
    strict: bool,
    overwrite: bool,
    fsync: bool,
    as_json: bool,
    quiet: bool,
    storage_options: dict[str, str],
) -> None:
    """Write a file of torch.save again, so that torch.load(weights_only=True) takes it.

    Objects of classes that it does not allow are left out or become plain values, and are
    listed. Tensors stay bit for bit as they are. Nothing is executed.
    """
    from ckpt_tools import make_loadable

    with progress("writing", quiet=quiet) as on_progress:
        report = make_loadable(
            src,
            dst,
            strict=strict,
            overwrite=overwrite,
            fsync=fsync,
            on_progress=on_progress,
            storage_options=storage_options,
        )
    if as_json:
        print_json(report.to_json())
    else:
        _show(report)


def _show(report: LoadableReport) -> None:
    say(f"{report.destination}: {count(report.num_storages, 'storage')}, {size(report.bytes_written)}")
    for gone in report.left_out:
        tensors = f" with {count(gone.num_tensors, 'tensor')}" if gone.num_tensors else ""
        say_item("left out", printable(f"{gone.place}: {gone.kind}{tensors}"))
    for changed in report.replaced:
        say_item("replaced", printable(f"{changed.place}: {changed.kind} by {changed.by}"))

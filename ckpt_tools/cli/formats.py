"""``ckpt-tools formats``."""

from __future__ import annotations

import click

from ckpt_tools.cli import options
from ckpt_tools.cli.render import print_json, show, table


@click.command("formats")
@options.as_json
def formats_command(as_json: bool) -> None:
    """List the formats that can be read and written."""
    from ckpt_tools import list_formats

    found = list_formats()
    if as_json:
        print_json([row.to_json() for row in found])
        return
    drawn = table(None, "format", "read", "write", "holds", "description")
    for row in found:
        drawn.add_row(row.name, "yes" if row.reads else "", "yes" if row.writes else "", row.holds, row.about)
    show(drawn)

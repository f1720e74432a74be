"""``ckpt-tools formats``."""

from __future__ import annotations

import click

from ckpt_tools.cli import options
from ckpt_tools.cli.render import print_json
from ckpt_tools.cli.wrapping import say_columns


@click.command("formats")
@options.as_json
def formats_command(as_json: bool) -> None:
    """List the formats that can be read and written."""
    from ckpt_tools import list_formats

    found = list_formats()
    if as_json:
        print_json([row.to_json() for row in found])
        return
    rows = [(row.name, "yes" if row.reads else "", "yes" if row.writes else "", row.holds, row.about) for row in found]
    say_columns(("format", "read", "write", "holds", "description"), rows)

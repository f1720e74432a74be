"""``ckpt-tools sign``."""

from __future__ import annotations

from typing import Any

import click

from ckpt_tools.cli import options
from ckpt_tools.cli.render import print_json
from ckpt_tools.cli.wrapping import say


@click.command("sign")
@click.argument("src", metavar="SRC")
@click.option("--private-key", metavar="FILE", required=True, help="An elliptic-curve private key in PEM format.")
@click.option("--signature", metavar="FILE", help="The file of the signature. Default: stored with SRC.")
@click.option("--overwrite", is_flag=True, help="Replace an existing signature.")
@options.as_json
@click.option("--verbose", "-v", is_flag=True, expose_value=False, help="Show the traceback of an error.")
def sign_command(src: str, as_json: bool, **chosen: Any) -> None:
    """Sign every file of a checkpoint, or a list of digests, with OpenSSF model-signing."""
    from ckpt_tools import sign

    report = sign(src, **chosen)
    if as_json:
        print_json(report.to_json())
    else:
        say(report.signature)

"""The command line: parse, one API call, render. ``main`` is the console script's entry point."""

from ckpt_tools.process.signals import use_default_interrupt

with use_default_interrupt():
    from ckpt_tools.cli import process
    from ckpt_tools.cli.main import main

__all__ = ["main", "process"]

"""``python -m training``: one run. Under torchrun, be one rank of it."""

from __future__ import annotations

from ckpt_tools.signals import killed_by_interrupts

with killed_by_interrupts():
    import os
    import sys
    from functools import partial
    from typing import Any

    import click

    from ckpt_tools.errors import CkptError

    from .config.command_line import CONTEXT, Command, config_of, run_options
    from .config.installed import check_installed
    from .loop.interruption import how_to_go_on, interruptible


@click.command(cls=Command, params=run_options(), context_settings=CONTEXT)
def main(**options: Any) -> None:
    """Train a small model. Writes result.json to --out, and sharded checkpoints there or to --storage."""
    try:
        run(options)
    except CkptError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(error.exit_code)


def run(options: dict[str, Any]) -> None:
    """Train as the options say, and print where the result lies."""
    config = config_of(options)
    check_installed(config)
    # What follows imports torch, which takes seconds: a mistake in the options is answered before.
    if config.launcher == "torchrun" and _is_a_rank():
        from .launchers.torchrun import work

        work(config)
    with interruptible(partial(how_to_go_on, config)):
        from .launchers import launch

        result = launch(config)
    click.echo(f"{result.correct} of {result.total} held-out samples right ({result.accuracy:.4f})")
    click.echo(f"checkpoint: {result.checkpoint}")


def _is_a_rank() -> bool:
    """Whether torchrun started this process, or another launcher that says to each process which rank it is."""
    return {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys()


if __name__ == "__main__":
    with killed_by_interrupts():
        main()

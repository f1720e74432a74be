"""``python -m training``: one training run. Under torchrun, one rank of it."""

from __future__ import annotations

from ckpt_tools.process.signals import use_default_interrupt

with use_default_interrupt():
    import os
    from functools import partial
    from typing import Any

    import click

    from .config.command_line import CONTEXT_SETTINGS, CheckedCommand, check_installed, config_of, make_click_options
    from .config.options import options_by_heading
    from .loop.stopping import advice_after_stop, end_on_signals


@click.command(
    cls=CheckedCommand,
    params=make_click_options(),
    headings=options_by_heading(),
    examples=(
        "ckpt-tools train --engine fsdp2 --out run",
        "ckpt-tools train --model lm --engine zero3 --num-workers 4 --out run",
    ),
    context_settings=CONTEXT_SETTINGS,
)
def main(**options: Any) -> None:
    """Train a model with FSDP2 or DeepSpeed, and save sharded checkpoints.

    Give --out, and --engine or --strategy. Writes result.json to --out, and checkpoints there or to
    --storage.
    """
    config = config_of(options)
    check_installed(config)
    # The imports below load torch, which takes seconds, so options are checked first.
    if config.launcher == "torchrun" and _is_a_rank():
        from .launchers.torchrun import run_rank_process

        run_rank_process(config)
    with end_on_signals(partial(advice_after_stop, config)):
        from .launchers import launch

        result = launch(config)
    if result.total:
        click.echo(f"{result.correct} of {result.total} held-out samples right ({result.accuracy:.4f})")
    else:
        click.echo("  ".join(f"held-out {name} {value:.4f}" for name, value in result.held_out.items()))
    click.echo(f"checkpoint: {result.checkpoint}")


def _is_a_rank() -> bool:
    """Whether torchrun, or another launcher that sets its environment variables, started this process."""
    return {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys()


if __name__ == "__main__":
    with use_default_interrupt():
        main()

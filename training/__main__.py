"""``python -m training``: one run. Under torchrun, be one rank of it."""

from __future__ import annotations

from ckpt_tools.signals import killed_by_interrupts

with killed_by_interrupts():
    import os
    import sys
    from functools import partial
    from pathlib import Path
    from typing import Any

    import click

    from ckpt_tools.errors import CkptError

    from .config import (
        DATASETS,
        ENGINES,
        LAUNCHERS,
        METRICS,
        OVERRIDES,
        PRECISIONS,
        RESUME_AUTO,
        RESUME_LATEST,
        TrainConfig,
    )
    from .installed import check_installed
    from .interruption import how_to_go_on, interruptible


@click.command(context_settings={"show_default": True, "help_option_names": ["-h", "--help"]})
@click.option("--engine", type=click.Choice(ENGINES), required=True, help="How the model is sharded.")
@click.option("--launcher", type=click.Choice(LAUNCHERS), default="ray", help="Who starts the workers.")
@click.option("--num-workers", type=int, default=2, help="The world size; one GPU each where there is CUDA.")
@click.option("--epochs", type=int, default=12, help="The length of the learning rate schedule.")
@click.option("--until", type=int, help="Stop after this epoch of the schedule.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="The folder of the run.")
@click.option("--dataset", type=click.Choice(DATASETS), default="digits")
@click.option("--data-root", type=click.Path(path_type=Path), help="Where fashion-mnist is or is put.")
@click.option("--num-samples", type=int, help="Train on the first samples only.")
@click.option("--batch-size", type=int, default=64, help="Samples a step, over all workers.")
@click.option("--learning-rate", type=float, default=1e-3, help="The peak, after the warm-up.")
@click.option("--weight-decay", type=float, default=0.05)
@click.option("--warmup-fraction", type=float, default=0.1, help="The part of the schedule that warms up.")
@click.option("--precision", type=click.Choice(PRECISIONS), default="fp32", help="What the model computes in.")
@click.option("--seed", type=int, default=0, help="Of the first weights and the order of samples.")
@click.option("--save-every", type=int, default=1, help="Epochs between checkpoints; the last epoch is always saved.")
@click.option("--save-every-steps", type=int, help="Optimizer steps between checkpoints, also within an epoch.")
@click.option("--save-every-minutes", type=float, help="Minutes between checkpoints, also within an epoch.")
@click.option("--async-save", is_flag=True, help="Copy the state to memory, go on, and write it beside the training.")
@click.option("--keep-last", type=int, metavar="K", help="Keep the newest K checkpoints of --out.  [default: all]")
@click.option("--keep-best", type=click.Choice(METRICS), help="With --keep-last: keep also the best by this metric.")
@click.option("--max-restarts", type=int, default=0, help="How often the run is started again after a failure.")
@click.option("--storage", metavar="URL", help="Where checkpoints go, such as s3://bucket/run; else to --out.")
@click.option(
    "--resume",
    metavar=f"PATH|URL|{RESUME_LATEST}|{RESUME_AUTO}",
    help="Continue a checkpoint, or this run's last; auto: if there is one.",
)
@click.option("--init-from", metavar="PATH|URL", help="Start with the weights of a checkpoint of any format.")
@click.option("--rename", multiple=True, metavar="REGEX=REPL", help="With --init-from: change names; repeatable.")
@click.option("--export", metavar="PATH|URL", help="At the end, write the weights as one file or folder.")
@click.option(
    "--override",
    type=click.Choice(OVERRIDES),
    multiple=True,
    metavar="NAME",
    help="With --resume: a setting that may differ from the checkpoint's run, such as learning-rate; repeatable.",
)
def main(**options: Any) -> None:
    """Train the Vision Transformer; leaves result.json in --out, sharded checkpoints there or in --storage."""
    try:
        run(options)
    except CkptError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(error.exit_code)


def run(options: dict[str, Any]) -> None:
    """Train as the options say, and print where the result lies."""
    paths = {name: options[name].absolute() for name in ("out", "data_root") if options[name]}
    config = TrainConfig(**(options | paths))
    check_installed(config)
    # What follows imports torch, which takes seconds: a mistake in the options is answered before.
    if config.launcher == "torchrun" and _is_under_torchrun():
        from .launchers.torchrun import work

        work(config)
    with interruptible(partial(how_to_go_on, config)):
        from .launchers import launch

        result = launch(config)
    click.echo(f"{result.correct} of {result.total} held-out samples right ({result.accuracy:.4f})")
    click.echo(f"checkpoint: {result.checkpoint}")


def _is_under_torchrun() -> bool:
    """Whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


if __name__ == "__main__":
    with killed_by_interrupts():
        main()

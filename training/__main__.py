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

    from .commands import Command
    from .config import (
        DATASETS,
        LAUNCHERS,
        METRICS,
        OVERRIDES,
        PIPELINE_SCHEDULES,
        PRECISIONS,
        RESUME_AUTO,
        RESUME_LATEST,
        SCHEDULES,
        TrainConfig,
    )
    from .config_files import read_defaults
    from .installed import check_installed
    from .interruption import how_to_go_on, interruptible
    from .strategies import ENGINES, STRATEGIES


@click.command(cls=Command, context_settings={"show_default": True, "help_option_names": ["-h", "--help"]})
@click.option(
    "--config",
    metavar="FILE|NAME",
    callback=read_defaults,
    is_eager=True,
    expose_value=False,
    help="A TOML file of options, or one that comes along, such as full_shard; the command line wins.",
)
@click.option("--strategy", type=click.Choice(STRATEGIES), help="How the model is spread over the workers.")
@click.option("--engine", type=click.Choice(ENGINES), help="Which framework does it; alone, it shards fully.")
@click.option("--model", default="vit", metavar="NAME|hf:FOLDER", help="vit, lm, cnn, resnet18, ...")
@click.option("--launcher", type=click.Choice(LAUNCHERS), default="ray", help="Who starts the workers.")
@click.option("--num-workers", type=int, default=2, help="The world size; one GPU each where there is CUDA.")
@click.option("--epochs", type=int, default=12, help="The length of the learning rate schedule.")
@click.option("--until", type=int, help="Stop after this epoch of the schedule.")
@click.option("--max-steps", type=int, help="Stop after so many optimizer steps, also within an epoch.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="The folder of the run.")
@click.option("--dataset", type=click.Choice(DATASETS), default="digits")
@click.option("--data-root", type=click.Path(path_type=Path), help="Where fashion-mnist is or is put.")
@click.option("--num-samples", type=int, help="Train on the first samples only.")
@click.option("--batch-size", type=int, default=64, help="Samples a step, over all workers.")
@click.option("--learning-rate", type=float, default=1e-3, help="The peak, after the warm-up.")
@click.option("--weight-decay", type=float, default=0.05)
@click.option("--schedule", type=click.Choice(SCHEDULES), default="cosine", help="After the warm-up.")
@click.option("--warmup-fraction", type=float, default=0.1, help="The part of the schedule that warms up.")
@click.option("--precision", type=click.Choice(PRECISIONS), default="fp32", help="What the model computes in.")
@click.option("--clip-grad-norm", type=float, help="Scale gradients down to this norm, over all weights.")
@click.option("--gradient-accumulation", type=int, default=1, help="Micro-batches that one step adds up.")
@click.option("--shard-size", type=int, help="Of hybrid_shard and zero3_hpz: workers that share one copy.")
@click.option("--tp", type=int, default=1, help="Workers that compute each layer together, beside FSDP2.")
@click.option("--pp", type=int, default=1, help="Stages of a pipeline of layers, beside FSDP2.")
@click.option("--pp-schedule", type=click.Choice(PIPELINE_SCHEDULES), help="Of the pipeline.  [default: 1f1b]")
@click.option("--ep", type=int, default=1, help="Workers that hold the experts of a layer together, beside FSDP2.")
@click.option("--cpu-offload", is_flag=True, help="FSDP2: weights, gradients and optimizer in the host's memory.")
@click.option("--reshard-after-forward", type=int, help="full_shard: keep shards over so many workers until backward.")
@click.option("--forward-prefetch", type=int, default=0, help="FSDP2: blocks gathered ahead, forwards.")
@click.option("--backward-prefetch", type=int, default=0, help="FSDP2: blocks gathered ahead, backwards.")
@click.option("--activation-checkpointing", is_flag=True, help="Compute each block again in backward.")
@click.option("--compile", is_flag=True, help="torch.compile of each block; in training, not in evaluation.")
@click.option("--deepspeed-config", type=click.Path(path_type=Path), help="A JSON file in the place of ours.")
@click.option("--seed", type=int, default=0, help="Of the first weights and the order of samples.")
@click.option("--save-every", type=int, default=1, help="Epochs between checkpoints; the last epoch is always saved.")
@click.option("--save-every-steps", type=int, help="Optimizer steps between checkpoints, also within an epoch.")
@click.option("--save-every-minutes", type=float, help="Minutes between checkpoints, also within an epoch.")
@click.option("--async-save", is_flag=True, help="Copy the state to memory, go on, and write it beside the training.")
@click.option("--keep-last", type=int, metavar="K", help="Keep the newest K checkpoints of --out.  [default: all]")
@click.option("--keep-best", type=click.Choice(METRICS), help="With --keep-last: keep also the best by this metric.")
@click.option("--log-every", type=int, default=10, help="Steps between two that are measured, recorded and shown.")
@click.option("--tensorboard", is_flag=True, help="Write event files to OUT/tensorboard too.")
@click.option("--profile", is_flag=True, help="Trace a few steps of each rank into OUT/profile.")
@click.option("--max-restarts", type=int, default=0, help="How often the run is started again after a failure.")
@click.option("--min-workers", type=int, help="Ray: go on with so many if machines are lost.  [default: all]")
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
    """Train a small model; leaves result.json in --out, sharded checkpoints there or in --storage."""
    try:
        run(options)
    except CkptError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(error.exit_code)


def config_of(options: dict[str, Any]) -> TrainConfig:
    """The run that these options describe, from whichever folder it is started. Raises ``UsageError``."""
    paths = {name: options[name].absolute() for name in ("out", "data_root", "deepspeed_config") if options[name]}
    return TrainConfig(**(options | paths))


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

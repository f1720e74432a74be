"""The small runs that these tests share, each a job of a pool of ranks: starting processes and importing the frameworks
would be most of a small run's time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import ckpt_tools
from training.config.train_config import TrainConfig
from training.launchers.torchrun import run_rank

NUM_WORKERS = 2
SECONDS = 900.0
"""For all of them, on a machine that others use too."""

NUM_SAMPLES = 256
BATCH_SIZE = 64
EPOCHS = 2
STILL = 1e-30  # a learning rate under which no float32 weight of a usual size moves
STEPS_PER_EPOCH = NUM_SAMPLES // BATCH_SIZE


def small_config(out: Path, **values: Any) -> TrainConfig:
    """Two epochs of four steps on two ranks, of the model that takes a fifth of the default one's time."""
    size = {
        "model": "cnn",
        "num_samples": NUM_SAMPLES,
        "batch_size": BATCH_SIZE,
        "epochs": EPOCHS,
        "num_workers": NUM_WORKERS,
    }
    return TrainConfig(out=out, launcher="torchrun", **(size | values))


def started_config(out: Path, engine: str) -> TrainConfig:
    """A run that starts with the last weights of another engine's, and changes none. They had other names meanwhile,
    which a rule or a recipe changes back."""
    other = {"fsdp2": "zero3", "zero2": "fsdp2"}[engine]
    bare = {"fsdp2": {"rename": ("^backbone[.]=",)}, "zero2": {"recipe": str(out / "bare.toml"), "inverse": True}}
    still = {"learning_rate": STILL, "weight_decay": 0.0, "until": 1}
    names = {"init_from": str(out / f"{other}-renamed"), **bare[engine]}
    return small_config(out / f"{engine}-started", engine=engine, **still, **names)


def prepare(config: TrainConfig) -> None:
    """On the first rank: the weights that the run starts from."""
    if config.init_from is not None and not Path(config.init_from).exists():
        run = config.init_from.removesuffix("-renamed")
        last = f"{run}/checkpoints/epoch_{EPOCHS:04d}"
        ckpt_tools.convert(last, config.init_from, to="safetensors", state="model", rename=["^=backbone."])
        if config.recipe is not None:
            Path(config.recipe).write_text('map = [{left = "{name...}", right = "backbone.{name...}"}]')


def configs(out: Path) -> Iterator[TrainConfig]:
    """Every engine's uninterrupted run ``<engine>``; the resumed one of two, ``<engine>-resumed``; two that resume
    another engine's, ``<engine>-of-<other>``; three that resume with a learning rate and weight decay that change no
    weight, ``<engine>-still``; one that goes on in bf16, ``zero2-to-bf16``; two that start from weights,
    ``<engine>-started``; two in bf16; and one step of the default model, ``zero3-vit``."""
    for engine in ("fsdp2", "zero1", "zero2", "zero3"):
        yield small_config(out / engine, engine=engine, log_every=2, tensorboard=True)
    for engine in ("fsdp2", "zero3"):
        first_epoch = out / engine / "checkpoints" / "epoch_0001"
        yield small_config(out / f"{engine}-resumed", engine=engine, resume=str(first_epoch), tensorboard=True)
    for engine, other in (("fsdp2", "zero3"), ("zero1", "fsdp2")):
        first_epoch = out / other / "checkpoints" / "epoch_0001"
        yield small_config(out / f"{engine}-of-{other}", engine=engine, resume=str(first_epoch))
    for engine in ("fsdp2", "zero2", "zero3"):
        first_epoch = out / engine / "checkpoints" / "epoch_0001"
        still = {"learning_rate": STILL, "weight_decay": 0.0}
        yield small_config(out / f"{engine}-still", engine=engine, resume=str(first_epoch), **still)
    first_epoch = out / "zero2" / "checkpoints" / "epoch_0001"
    yield small_config(out / "zero2-to-bf16", engine="zero2", precision="bf16", resume=str(first_epoch))
    for engine in ("fsdp2", "zero2"):
        yield started_config(out, engine)
    for engine in ("fsdp2", "zero2"):
        yield small_config(out / f"{engine}-bf16", engine=engine, precision="bf16", until=1)
    yield small_config(out / "zero3-vit", model="vit", engine="zero3", num_samples=BATCH_SIZE, epochs=1)


def train(config: TrainConfig) -> None:
    """A job of a pool."""
    config.out.mkdir(exist_ok=True)
    if torch.distributed.get_rank() == 0:
        prepare(config)
    torch.distributed.barrier()
    run_rank(config, torch.device("cpu"))

"""Runs on the ranks of a pool: starting processes and importing the frameworks would be most of a small run's time."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import ckpt_tools
from fixtures.launch import pool
from training.config.options import BY_NAME
from training.config.train_config import TrainConfig
from training.launchers.torchrun import run_rank
from training.loop.result import RunResult

SECONDS = 900.0
"""For a run, on a machine that others use too."""

NUM_WORKERS, NUM_SAMPLES, BATCH_SIZE, EPOCHS = 2, 256, 64, 2
STEPS_PER_EPOCH = NUM_SAMPLES // BATCH_SIZE
STOPPED_AFTER = 6
"""Steps of the small runs that are stopped: the second of the second epoch's four."""

TINY_BATCH, TINY_STEPS = 16, 2
WITHIN = "epoch_0001_step_000003"
"""The checkpoint of a tiny run between the two steps of the second epoch."""

STILL: dict[str, Any] = {"learning_rate": 1e-30, "weight_decay": 0.0}
"""With these no float32 weight of a usual size moves."""


def small_config(out: Path, **values: Any) -> TrainConfig:
    """Two epochs of four steps on two ranks, of the model that takes a fifth of the default one's time."""
    size = {"num_samples": NUM_SAMPLES, "batch_size": BATCH_SIZE, "epochs": EPOCHS, "num_workers": NUM_WORKERS}
    return TrainConfig(out=out, **({"launcher": "torchrun", "model": "cnn"} | size | values))


def tiny_config(out: Path, **values: Any) -> TrainConfig:
    """Two epochs of two steps."""
    size = {"num_samples": TINY_BATCH * TINY_STEPS, "batch_size": TINY_BATCH, "epochs": EPOCHS, "num_workers": 2}
    data = {"dataset": "text"} if str(values.get("model")).startswith(("lm", "hf:")) else {}
    return TrainConfig(out=out, **({"launcher": "torchrun"} | size | data | values))


def resuming(out: Path, of: Path, name: str = "epoch_0001", **values: Any) -> TrainConfig:
    return tiny_config(out, resume=str(of / "checkpoints" / name), **values)


def starting(out: Path, of: Path, **values: Any) -> TrainConfig:
    """A tiny run that starts with the weights of another one's last checkpoint, and changes none."""
    return tiny_config(out, **(values | {"init_from": str(of / "checkpoints/epoch_0002"), "until": 1} | STILL))


def saving(strategy: str) -> dict[str, Any]:
    """A checkpoint after each step; while the next one changes the weights, if the framework can."""
    return {"save_every_steps": 1, "async_save": BY_NAME[strategy].framework == "fsdp2"}  # type: ignore[index]


def result_of(run: Path | TrainConfig) -> RunResult:
    return RunResult.read((run if isinstance(run, Path) else run.out) / "result.json")


def losses(run: Path | TrainConfig | RunResult) -> list[float]:
    result = run if isinstance(run, RunResult) else result_of(run)
    return [loss for epoch in result.history for loss in epoch.losses]


def check_same_end(resumed: RunResult, whole: RunResult) -> None:
    """The same steps from where it went on, the same mean losses, predictions and bits of state."""
    theirs = whole.history[len(whole.history) - len(resumed.history) :]
    for ours, epoch in zip(resumed.history, theirs, strict=True):
        assert ours.earlier_steps + len(ours.losses) == len(epoch.losses)
        assert (ours.losses, ours.mean_loss) == (epoch.losses[ours.earlier_steps :], epoch.mean_loss)
    assert (resumed.predicted, resumed.held_out) == (whole.predicted, whole.held_out)
    assert ckpt_tools.diff(resumed.checkpoint, whole.checkpoint).equal


class AskedAfter:
    """On the last rank alone: the request to stop, once the ranks have agreed so many times."""

    def __init__(self, questions: int) -> None:
        self.left = questions if torch.distributed.get_rank() == torch.distributed.get_world_size() - 1 else sys.maxsize

    def __call__(self) -> bool:
        self.left -= 1
        return self.left < 0


def train(config: TrainConfig, questions: int = sys.maxsize) -> bool:
    """A job of a pool. Whether it was stopped."""
    if torch.distributed.get_rank() == 0:
        config.out.mkdir(parents=True, exist_ok=True)
    torch.distributed.barrier()
    forget_groups()  # of jobs of other tests
    stopped = run_rank(config, torch.device("cpu"), AskedAfter(questions))
    forget_groups()
    return stopped is not None


def forget_groups() -> None:
    """DeepSpeed keeps the groups of hpZ and of tensor parallelism for the life of a process, and would use them in the
    runs that follow."""
    if "deepspeed" in sys.modules:
        sys.modules["deepspeed.utils.groups"]._release_process_group_references()


def train_each(*configs: TrainConfig, questions: int = sys.maxsize) -> None:
    """Run them one after the other, each as a job of its own, so that a pool that keeps many groups is renewed between
    two of them. Each is asked to stop once its ranks have agreed so many times."""
    for config in configs:
        stopped = pool(config.num_workers).run(train, config, questions, seconds=SECONDS)
        assert stopped == [questions < sys.maxsize] * config.num_workers


def small_runs(out: Path) -> dict[str, tuple[TrainConfig, int | None]]:
    """The runs that tests share, by name, and after how many steps they are stopped, to go on by themselves.

    ``<engine>`` is uninterrupted, ``-resumed`` goes on from its first epoch, ``-of-<other>`` from another engine's,
    ``-still`` so that no weight changes, ``-started`` begins with the last weights of another engine's run. ``ended``
    is stopped at the last step of an epoch, before its evaluation. ``each-step`` and ``each-step-async`` save after
    each step.
    """
    found: dict[str, tuple[TrainConfig, int | None]] = {}

    def add(name: str, engine: str, stopped_after: int | None = None, **values: Any) -> None:
        found[name] = small_config(out / name, engine=engine, **values), stopped_after

    def first_epoch(engine: str) -> str:
        return str(out / engine / "checkpoints/epoch_0001")

    for engine in ("fsdp2", "zero1", "zero2", "zero3"):
        add(engine, engine, log_every=2, tensorboard=True)
        add(f"{engine}-resumed", engine, resume=first_epoch(engine), tensorboard=True)
        add(f"{engine}-still", engine, resume=first_epoch(engine), **STILL)
        add(f"{engine}-stopped", engine, STOPPED_AFTER)
        add(f"{engine}-bf16", engine, precision="bf16", until=1)
    for engine, other in (("fsdp2", "zero3"), ("zero1", "fsdp2")):
        add(f"{engine}-of-{other}", engine, resume=first_epoch(other))
    for engine, other, names in (
        ("fsdp2", "zero3", {"rename": ("^backbone[.]=",)}),
        ("zero2", "fsdp2", {"recipe": str(out / "bare.toml"), "inverse": True}),
    ):
        add(f"{engine}-started", engine, init_from=str(out / f"{other}-renamed"), until=1, **STILL, **names)
    add("zero3-vit", "zero3", model="vit", num_samples=BATCH_SIZE, epochs=1)
    add("each-step", "fsdp2", save_every_steps=1, epochs=1)
    add("each-step-async", "fsdp2", save_every_steps=1, epochs=1, async_save=True)
    add("ended", "fsdp2", STEPS_PER_EPOCH, async_save=True, save_every=9)
    add("kept", "fsdp2", save_every_steps=1, keep_last=2, keep_best="loss", epochs=3)
    return found


def make(out: Path, name: str) -> None:
    """The run of this name in ``out``, and those that it needs, if they are not there."""
    if (out / name / "result.json").exists():
        return
    config, stopped_after = small_runs(out)[name]
    if source := config.resume or config.init_from:
        other = out / Path(source).relative_to(out).parts[0].removesuffix("-renamed")
        make(out, other.name)
        if config.init_from and not Path(config.init_from).exists():
            last = f"{other}/checkpoints/epoch_{EPOCHS:04d}"
            ckpt_tools.convert(last, config.init_from, to="safetensors", state="model", rename=["^=backbone."])
            (out / "bare.toml").write_text('map = [{left = "{name...}", right = "backbone.{name...}"}]')
    if stopped_after is not None:
        # It is asked before the first step, after each, and after each epoch.
        train_each(config, questions=stopped_after + (stopped_after - 1) // STEPS_PER_EPOCH)
        config = replace(config, resume="auto")
    train_each(config)


BY_RAY = """
import json, sys
from ckpt_tools.errors import CkptError
from training.config.command_line import config_of, parse_options
from training.launchers import launch
from training.launchers.ray_train import cluster

with cluster(2):
    for words in json.loads(sys.argv[1]):
        try:
            launch(config_of(parse_options(words)))
        except CkptError as error:
            print(type(error).__name__, error)
"""


def by_ray(*configs: TrainConfig, **environment: str) -> list[str]:
    """The lines that are printed, with those of errors; in a process of its own, with one local Ray for all."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    words = json.dumps([config.to_args() for config in configs])
    environment = clean | environment | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", BY_RAY, words]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()

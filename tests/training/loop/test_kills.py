"""A run whose workers are killed, and that is asked to stop, at random moments ends as one that nobody touched.

Under each launcher: torchrun and Ray start a lost worker again by themselves, DeepSpeed's launcher ends the run, and
the same command goes on with ``--resume auto``. As many kills as ``--kills`` says, which the summary counts.
Checkpoints are written all the time, so many kills hit one that is half written.
"""

import json
import os
import random
import re
import signal
import time
from collections import Counter
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any

import pytest

import ckpt_tools
from fixtures.launch import free_port
from tests.training.jobs import NUM_WORKERS, result_of, train_each
from tests.training.watched import Watched, watched
from training.checkpoints.locking import lock_run
from training.checkpoints.run_folder import list_saved_checkpoints
from training.config.options import LauncherName
from training.config.train_config import EngineName, TrainConfig

STEPS_PER_EPOCH = 4
EPOCHS = 9000
"""Of the schedule: no run gets so far."""

START_SPAN, TRAIN_SPAN = 8.0, 2.0
"""Seconds after a rank's start, and after its first checkpoint: a kill comes at a random moment of either."""

WORKERS, RUNS = "workers killed", "runs asked to stop"

END_SECONDS = 120.0
"""For a stopped run to end, on a machine that others use too."""


@dataclass(frozen=True, slots=True)
class Start:
    """A way to start a run. ``restarts``: whether it starts a lost worker again."""

    name: str
    engine: EngineName
    launcher: LauncherName
    restarts: bool
    stages: int = 1

    def config(self, out: Path, **values: object) -> TrainConfig:
        size = {"num_samples": 64 * STEPS_PER_EPOCH, "batch_size": 64, "epochs": EPOCHS, "model": "cnn"}
        if self.stages > 1:
            size |= {"num_samples": 8 * STEPS_PER_EPOCH, "batch_size": 8, "model": "lm", "dataset": "text"}
            size |= {"pp": self.stages, "gradient_accumulation": self.stages}
        saving = {"save_every_steps": 1, "keep_last": 3, "log_every": 1, "resume": "auto"}
        return TrainConfig(out=out, engine=self.engine, launcher=self.launcher, **(size | saving | values))  # type: ignore[arg-type]

    def command(self, config: TrainConfig) -> list[str]:
        """As the page about training teaches them."""
        if self.name != "deepspeed":
            return ["-m", "training", *config.to_args()]
        runner = ["-m", "deepspeed.launcher.runner", "--num_gpus=2", f"--master_port={free_port()}", "--no_local_rank"]
        return [*runner, "--module", "training", *config.to_args()]

    def ranks(self, run: Watched) -> set[int]:
        """The processes that train, among those that the run has started."""
        return {each for each in run.processes() if self.is_rank(each)}

    def is_rank(self, process: int) -> bool:
        """The guard of a rank has its environment too."""
        if self.launcher == "ray":
            return b"RayTrainWorker" in read(process, "cmdline")
        return b"\0RANK=" in read(process, "environ") and b"\0-m\0training\0" in read(process, "cmdline")


STARTS = [
    Start("torchrun", "fsdp2", "torchrun", restarts=True),
    Start("ray", "fsdp2", "ray", restarts=True),
    Start("ray-zero3", "zero3", "ray", restarts=True),
    Start("deepspeed", "zero2", "torchrun", restarts=False),
    Start("torchrun-pipeline", "fsdp2", "torchrun", restarts=True, stages=2),
    Start("torchrun-deepspeed-pipeline", "zero1", "torchrun", restarts=True, stages=2),
]


def read(process: int, file: str) -> bytes:
    try:
        return Path(f"/proc/{process}/{file}").read_bytes()
    except OSError:
        return b""


@dataclass(slots=True)
class Plan:
    """How many kills of workers, and as many requests to stop; at the moments of a seed."""

    kills: int
    moments: random.Random
    done: Counter[str]

    def wait_for_a_moment(self, run: Watched, what: str) -> None:
        """While the ranks train and save, or, every other time of the soak, while they start or begin."""
        if self.kills > 1 and self.done.total() % 2:
            self.done[f"{what} while they started"] += 1
            time.sleep(self.moments.uniform(0, START_SPAN))
            return
        self.done[f"{what} while they trained"] += 1
        before = newest(run.out)
        run.wait_until(lambda: newest(run.out) != before)
        time.sleep(self.moments.uniform(0, TRAIN_SPAN))

    @property
    def requests(self) -> int:
        return sum(number for what, number in self.done.items() if what.startswith(RUNS))


@pytest.fixture
def plan(request, record_property):
    asked = request.config.getoption
    moments = random.Random(f"{asked('--kill-seed')} {request.node.name}")
    yield (plan := Plan(asked("--kills"), moments, Counter()))
    record_property("kills", ", ".join(f"{number} {what}" for what, number in sorted(plan.done.items())))


@pytest.fixture(autouse=True)
def cpu(monkeypatch):
    """As torchrun's launcher sets it for its ranks; and DeepSpeed's launcher looks for GPUs if it is not told."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")


def newest(out: Path) -> str | None:
    return max((path.name for path in list_saved_checkpoints(out)), default=None)


def running(start: Start, out: Path, restarts: int = 0) -> Any:
    return watched(out, *start.command(start.config(out, max_restarts=restarts)))


def kill_a_rank(start: Start, run: Watched, plan: Plan, known: frozenset[int] = frozenset()) -> frozenset[int]:
    """One that was started since the last time, whose ranks are ``known``; the ranks to know the next time."""
    run.wait_until(lambda: len(start.ranks(run) - known) == NUM_WORKERS)
    ranks = start.ranks(run) - known
    plan.wait_for_a_moment(run, WORKERS)
    os.kill(plan.moments.choice(sorted(ranks)), signal.SIGKILL)
    return known | ranks


def stop(start: Start, run: Watched, plan: Plan, number: signal.Signals = signal.SIGTERM) -> None:
    """It ends between two steps with the last one saved, or before the first; and nothing of it is left.

    DeepSpeed's runner does not pass SIGTERM on, so all of its processes are told, as schedulers do. So they are under
    Ray, whose own processes are not of the command's group.
    """
    plan.wait_for_a_moment(run, RUNS)
    if start.name.startswith("torchrun"):
        run.process.send_signal(number)
    else:
        os.killpg(run.process.pid, number)
    _, said = run.process.communicate(timeout=END_SECONDS)
    if start.name == "deepspeed":
        assert run.process.returncode == -number
    else:
        check_said(run, said)
    assert not run.left_in_time()
    assert newest(run.out) is None or ckpt_tools.ls(run.out).checkpoints[-1].is_complete


def check_said(run: Watched, said: str) -> None:
    if run.process.returncode == 75:
        at = f": {newest(run.out)} is saved; continue with --resume latest\n"
        before = ", before the first step: no checkpoint was saved yet; start the run again\n"
        assert said in (f"stopped as requested{at}", f"stopped as requested{before}")
    else:
        assert run.process.returncode == 128 + signal.SIGTERM, said
        assert said.startswith("interrupted by SIGTERM: ")


def check_goes_on_to_the_same_end(start: Start, out: Path, whole: Path) -> None:
    """In the epoch after the last kill. Each step of all epochs had the loss that the same samples give: those of a run
    that nobody touched."""
    last = int((newest(out) or "epoch_0000")[6:10]) + 1
    rest = replace(start.config(out, until=last), launcher="torchrun")
    plain = replace(rest, out=whole, save_every=last, save_every_steps=None)
    with lock_run(rest):
        assert not list((out / "checkpoints").glob(".epoch*"))
    train_each(rest, plain)
    ours, theirs = result_of(out), result_of(whole)
    assert losses(out) == losses(whole)
    assert list(losses(whole)) == list(range(1, last * STEPS_PER_EPOCH + 1))
    assert ours.predicted == theirs.predicted
    assert ckpt_tools.diff(ours.checkpoint, theirs.checkpoint).equal


def losses(out: Path) -> dict[int, float]:
    """Of each step; if a step was trained again after a kill, the later line counts."""
    found = {}
    for text in (out / "metrics.jsonl").read_text().splitlines():
        if "learning_rate" in (line := json.loads(text)):
            found[line["step"]] = line["loss"]
    return dict(sorted(found.items()))


@pytest.mark.timeout(3 * 3600)
@pytest.mark.soak
@pytest.mark.parametrize("start", STARTS, ids=lambda start: start.name)
def test_a_run_that_is_killed_and_stopped_goes_on_to_the_same_end(start, plan, tmp_path):
    """The first request to stop finds the run whose workers were killed."""
    out = tmp_path / "run"
    if start.restarts:
        with running(start, out, restarts=2 * plan.kills) as run:
            reduce(lambda known, _: kill_a_rank(start, run, plan, known), range(plan.kills), frozenset[int]())
            stop(start, run, plan, signal.SIGUSR1 if start.name == "torchrun" else signal.SIGTERM)
            # Ray tells nobody of a worker that it lost before the training began.
            way = "has lost its process, as" if start.launcher == "ray" else "was ended"
            reasons = re.findall(rf"(?m)^restart \d+ of \d+: rank \d {way} by SIGKILL; the kernel .+", run.said)
            assert len(reasons) >= plan.done[f"{WORKERS} while they trained"]
    else:
        for _ in range(plan.kills):
            with running(start, out) as run:
                kill_a_rank(start, run, plan)
                run.process.communicate(timeout=END_SECONDS)
                assert not run.left_in_time()
    while plan.requests < plan.kills:
        with running(start, out) as run:
            run.wait_until(lambda: bool(start.ranks(run)))
            stop(start, run, plan)
    check_goes_on_to_the_same_end(start, out, tmp_path / "whole")

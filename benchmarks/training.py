"""Overhead of `training/` over the framework that it drives.

- `fsdp2-step`, `zero2-step`: a step of a run, against a bare loop over the same samples with the same framework
- `resume`: a state of FSDP2 through `load_into`, against `dcp.load`
- `stall`: how long `--async-save` stops the training, against a save in the foreground

The contestants take turns in the same processes, in alternating order. A ratio is the median of those of the rounds.
Of a step, the processor time of a rank is measured too: other programs on the machine hardly change it. Where torch
finds GPUs, each rank has one.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.state_dict import set_state_dict
from torch.distributed.fsdp import fully_shard

from benchmarks.builders import empty_model
from benchmarks.inputs import STATE_BYTES, fit_llama
from benchmarks.runner import RunSettings
from benchmarks.turns import Taken, compare_with_promises, take_turns
from ckpt_tools import load_into
from fixtures.launch import pool
from training.checkpoints.settings import RunProgress
from training.config.train_config import TrainConfig
from training.data.datasets import load_dataset, to_input
from training.engines import create_engine
from training.engines.optimizers import make_warmup_schedule
from training.launchers.torchrun import run_rank
from training.loop.outlets import Outlet
from training.loop.saving import CheckpointSaver
from training.models.zoo import make_spec

FSDP2_STEP, ZERO2_STEP, RESUME, STALL = "fsdp2-step", "zero2-step", "resume", "stall"
PROMISED = {FSDP2_STEP: 1.05, ZERO2_STEP: 1.05, RESUME: 1.2, STALL: 0.2}
"""Largest ratios of our time to the other's."""

OURS, THEIRS = "ours", "theirs"
STRATEGIES = {FSDP2_STEP: "full_shard", ZERO2_STEP: "zero2"}

BATCH, LOG_EVERY = 64, 10
"""Defaults of a run."""

MAX_EPOCH_STEPS = 22
"""The most steps of an epoch of `digits`."""

LIMIT_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class TurnSettings:
    """`size_bytes` is the size of the state that is resumed and saved; a turn has so many `steps` of `model`."""

    rounds: int
    size_bytes: int
    ranks: int = 2
    steps: int = MAX_EPOCH_STEPS
    model: str = "vit"


Turns = dict[str, list[Taken]]
"""The turns of ``OURS`` and ``THEIRS``."""


def measure_training(work: str, settings: RunSettings) -> list[str]:
    """The table of one work, on a rank for each GPU; without one, on 2."""
    turn_settings = TurnSettings(settings.runs, settings.size_bytes, torch.cuda.device_count() or 2)
    turns = take_turns_in_ranks(work, turn_settings, settings.data / "training")
    return compare_with_promises({work: (turns[OURS], turns[THEIRS])}, PROMISED)


def take_turns_in_ranks(work: str, settings: TurnSettings, data: Path) -> Turns:
    """The turns of rank 0."""
    data.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=data) as folder:
        job: Callable[..., Turns] = {RESUME: resume_turns, STALL: stall_turns}.get(work, step_turns)
        first, *_ = pool(settings.ranks).run(job, work, settings, Path(folder), seconds=LIMIT_SECONDS)
    return dict(first)


def _choose_device() -> Any:
    """This rank's GPU; without one, the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", dist.get_rank())
    torch.cuda.set_device(device)
    return device


def _wait_for_gpu() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _time_on_all_ranks(function: Callable[[], object]) -> Taken:
    """Time from the start of the first rank to the end of the last."""
    dist.barrier()
    started = time.perf_counter()
    function()
    _wait_for_gpu()
    dist.barrier()
    return Taken(time.perf_counter() - started)


def _make_config(out: Path, **values: Any) -> Any:
    if dist.get_rank() == 0:
        out.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    return TrainConfig(out=out, launcher="torchrun", num_workers=dist.get_world_size(), **values)


def step_turns(work: str, settings: TurnSettings, folder: Path) -> Turns:
    """A run, and a loop of as many steps in an epoch. The first LOG_EVERY steps warm both up."""
    size = {"num_samples": BATCH * settings.steps, "epochs": 1, "batch_size": BATCH, "log_every": LOG_EVERY}
    config = _make_config(folder / "run", strategy=STRATEGIES[work], model=settings.model, **size)
    numbers = count()
    ours, theirs = (lambda: _our_step(config, next(numbers))), partial(_bare_step, config)
    return take_turns({THEIRS: theirs, OURS: ours}, settings.rounds)


class _StepClock:
    """Times at which the epoch begins and its steps end on this rank. A run calls it as its check whether to stop."""

    def __init__(self, config: Any) -> None:
        self._num_steps = config.num_samples // BATCH
        self._marks: list[tuple[float, float]] = []

    def __call__(self) -> bool:
        if len(self._marks) in (LOG_EVERY, self._num_steps):
            _wait_for_gpu()
        self._marks.append((time.perf_counter(), time.process_time()))
        return False

    def compute_mean_step(self) -> Taken:
        """Mean of the steps after the first LOG_EVERY. Processor time is the mean of the ranks; collective."""
        marks = torch.tensor(self._marks, dtype=torch.float64)
        seconds, processor = (marks[self._num_steps] - marks[LOG_EVERY]) / (self._num_steps - LOG_EVERY)
        dist.all_reduce(processor)
        return Taken(float(seconds), float(processor) / dist.get_world_size())


def _our_step(config: Any, number: int) -> Taken:
    config = replace(config, out=config.out / str(number))
    if dist.get_rank() == 0:
        config.out.mkdir(parents=True)
    dist.barrier()
    clock = _StepClock(config)
    stop_request: Any = clock
    run_rank(config, _choose_device(), stop_request)
    dist.barrier()
    return clock.compute_mean_step()


def _bare_step(config: Any) -> Taken:
    """The loop of the framework's own guide: forward, loss, backward, step."""
    model, step = _bare_fsdp2(config) if config.sharding.framework == "fsdp2" else _bare_deepspeed(config)
    model.train()
    clock, numbers = _StepClock(config), count(1)
    clock()
    for inputs, labels in _iter_batches(config):
        loss = step(inputs, labels)
        if next(numbers) % LOG_EVERY == 0:
            loss.item()
        clock()
    if hasattr(model, "destroy"):
        model.destroy()
    return clock.compute_mean_step()


def _iter_batches(config: Any) -> Iterator[tuple[Any, Any]]:
    """This rank's batches of the epoch, in a random order."""
    samples, device = load_dataset("digits", "train", None).take_first(config.num_samples), _choose_device()
    assert len(samples) == config.num_samples
    order = torch.randperm(config.num_samples, generator=torch.Generator().manual_seed(0))
    share, rank = BATCH // config.num_workers, dist.get_rank()
    for start in range(0, config.num_samples, BATCH):
        mine = order[start + rank * share : start + (rank + 1) * share]
        yield to_input(samples.pixels[mine]).to(device), samples.labels[mine].to(device)


def _bare_fsdp2(config: Any) -> tuple[Any, Callable[[Any, Any], Any]]:
    made = make_spec(config).make()
    model = made.module.to(_choose_device())
    for block in made.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)

    def step(inputs: Any, labels: Any) -> Any:
        loss: Any = torch.nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        return loss.detach()

    return model, step


def _bare_deepspeed(config: Any) -> tuple[Any, Callable[[Any, Any], Any]]:
    import deepspeed

    from training.engines.deepspeed import join_process_group
    from training.engines.deepspeed_config import deepspeed_config

    join_process_group(_choose_device())
    model = make_spec(config).make().module
    options = deepspeed_config(config, config.num_workers)
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=list(model.parameters()),
        config=options,
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0),
    )

    def step(inputs: Any, labels: Any) -> Any:
        loss = torch.nn.functional.cross_entropy(engine(inputs), labels)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return engine, step


def resume_turns(work: str, settings: TurnSettings, folder: Path) -> Turns:
    """Loading into the same model, with an optimizer without state, as in a run that resumes."""
    engine = _make_engine(settings, folder)
    saved = folder / "saved"
    engine.prepare_save(RunProgress(1, 1))(saved)

    def time_load(load: Callable[[], object]) -> Taken:
        engine.optimizer.state.clear()
        return _time_on_all_ranks(load)

    def load_by_torch() -> None:
        state = engine.state_dict(RunProgress(1, 1))["app"]
        state_dict_loader.load({"app": state}, checkpoint_id=saved)
        set_state_dict(engine.model, engine.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])

    ours = partial(time_load, lambda: load_into(engine.model, engine.optimizer, saved))
    theirs = partial(time_load, load_by_torch)
    return take_turns({THEIRS: theirs, OURS: ours}, settings.rounds)


def stall_turns(work: str, settings: TurnSettings, folder: Path) -> Turns:
    """Saves of a run, each complete before the next begins."""
    engine = _make_engine(settings, folder)
    config, outlet, numbers = engine._config, Outlet(engine._config), count(1)
    configs = [replace(config, async_save=is_async) for is_async in (True, False)]
    background, waiting = (CheckpointSaver(config, engine, outlet) for config in configs)

    def time_stall(saver: CheckpointSaver) -> Taken:
        def save() -> None:
            number = next(numbers)
            saver.save(RunProgress(number, number), {})
            saver.finish_pending()

        _time_on_all_ranks(save)
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        return Taken(saver.records[-1].stall_seconds)

    return take_turns({THEIRS: partial(time_stall, waiting), OURS: partial(time_stall, background)}, settings.rounds)


def _make_engine(settings: TurnSettings, folder: Path) -> Any:
    """The FSDP2 engine of a Llama with a state of that size, after one step."""
    if dist.get_rank() == 0:
        llama: Any = empty_model(fit_llama(settings.size_bytes // STATE_BYTES))
        llama.config.save_pretrained(folder / "llama")
    config = _make_config(
        folder, strategy="full_shard", model=f"hf:{folder / 'llama'}", dataset="text", batch_size=settings.ranks
    )
    engine: Any = create_engine(config, make_warmup_schedule(10, 0.1, "cosine"), _choose_device())
    words = torch.zeros(1, 8, dtype=torch.int64, device=_choose_device())
    engine.step((words, words))
    return engine

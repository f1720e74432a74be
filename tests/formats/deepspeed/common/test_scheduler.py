"""The scheduler of any trainer is where DeepSpeed's ``load_checkpoint`` reads it; where it is not, a note says so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.format_utils import torch_save_to_dcp

import ckpt_tools
from ckpt_tools.core.notes import Outcome
from ckpt_tools.core.options import ReadOptions
from ckpt_tools.runs.opening import read_checkpoint
from fixtures import launch, models, recipe, zero
from tests.support.truth import Truth

pytestmark = pytest.mark.extended

Tree = dict[str, Any]

TARGETS = ["zero1-fp32", "zero2-bf16", "zero3-fp16", "universal-1", "universal-3"]

RANKS = 2


def written(source: Path, folder: Path, target: str) -> str:
    """The code that loads ``source`` as ``target`` for two ranks."""
    kind, _, dtype = target.partition("-")
    if kind == "universal":
        report = ckpt_tools.convert(source, folder, to="universal")
    else:
        long = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}[dtype]
        report = ckpt_tools.convert(source, folder, to=kind, world_size=RANKS, dtype=long)  # type: ignore[arg-type]
    return report.loading


def flavour_of(target: str) -> str:
    return f"zero{target[-1]}-fp32" if target.startswith("universal") else target


def goes_on(code: str, target: str) -> tuple[list[float], list[float], list[str]]:
    """Runs on every rank ``code``, which loads: the rates of two steps, their losses, and the names in the client
    state."""
    run = zero.Run(
        recipe.CASES["plain"], zero.FLAVOURS[flavour_of(target)], seed=2, load_universal="universal" in target
    )
    try:
        names: dict[str, Any] = {"engine": run.engine}
        exec(code, names)
        client = names["client_state"]
        rates, losses = [], []
        for _ in range(2):
            rates.append(run.engine.get_lr()[0])
            losses += run.train(1)
        return [*rates, run.engine.get_lr()[0]], losses, sorted(client)
    finally:
        run.close()


def resumed(code: str, target: str) -> tuple[list[float], list[float], list[str]]:
    return launch.pool(RANKS).run(goes_on, code, target)[0]


def uninterrupted(first: int = recipe.STEPS_BEFORE) -> list[float]:
    """The rates of two steps after ``first`` of them."""
    param = torch.nn.Parameter(torch.zeros(1))
    schedule = recipe.schedule_of(torch.optim.AdamW([param], lr=0.005))
    rates = []
    for _ in range(first + 3):
        rates.append(schedule.get_last_lr()[0])
        schedule.optimizer.step()
        schedule.step()
    return rates[first:]


@pytest.fixture
def saved(checkpoint, tmp_path):
    """``saved(change, form)``: the training state of an FSDP2 run as a tree of torch that ``change`` changed."""

    def make(change: Callable[[Tree], None], form: str = "dcp") -> Path:
        whole, file = tmp_path / "whole.pt", tmp_path / "changed.pt"
        ckpt_tools.convert(checkpoint("fsdp2", "plain", 2).checkpoint, whole, to="torch", state="all")
        tree = torch.load(whole, weights_only=True)
        change(tree.get("app", tree))
        torch.save(tree, file)
        if form == "dcp":
            torch_save_to_dcp(file, tmp_path / "dcp")
        return tmp_path / "dcp" if form == "dcp" else file

    return make


def called(name: str, wrapped: Callable[[Tree], Any] = lambda state: state) -> Callable[[Tree], None]:
    def change(app: Tree) -> None:
        app[name] = wrapped(app.pop("lr_scheduler"))

    return change


NAMED = {
    "lr_scheduler": called("lr_scheduler"),
    "scheduler": called("scheduler"),
    "lr_schedulers": called("lr_schedulers", lambda state: [state]),
    "schedulers": called("schedulers", lambda state: {"CosineAnnealingLR": state}),
}


@pytest.mark.parametrize("form", ["dcp", "torch"])
@pytest.mark.parametrize("name", NAMED)
def test_a_scheduler_is_found_by_its_name(name, form, saved, tmp_path):
    source = saved(NAMED[name], form)
    report = ckpt_tools.convert(source, tmp_path / "out", to="zero1", world_size=RANKS, strict=True)
    (note,) = [note for note in report.plan.notes if "sched" in note.what]
    assert (note.outcome, note.what) == (Outcome.KEPT, name)
    assert "load_checkpoint gives it to the run's scheduler" in note.why
    assert "load_lr_scheduler_states=False" in note.why
    rates, _, client = resumed(report.loading, "zero1-fp32")
    assert rates == uninterrupted()
    assert name not in client


@pytest.mark.parametrize("target", TARGETS)
def test_training_goes_on_as_if_nothing_had_happened(target, saved, checkpoint, tmp_path):
    rates, losses, _ = resumed(written(saved(NAMED["scheduler"]), tmp_path / "out", target), target)
    assert rates == uninterrupted()
    truth = Truth.load(checkpoint("fsdp2", "plain", 2).root).facts["losses"]
    np.testing.assert_allclose(losses, truth[:2], rtol=1e-5 if target.endswith(("fp32", "1", "3")) else 0.05)


def two(state: Tree) -> list[Tree]:
    return [state, dict(state)]


UNFIT: dict[str, tuple[Callable[[Tree], None], str]] = {
    "none": (lambda app: app.pop("lr_scheduler"), "none is taken from the source"),
    "two of one name": (called("scheduler", two), "it has 2 schedulers"),
    "no state of torch": (called("scheduler", lambda state: {"max_lr": 0.1}), "not the state of one scheduler"),
    "two names": (
        lambda app: app.update(warmup_scheduler=dict(app["lr_scheduler"]), scheduler=app.pop("lr_scheduler")),
        "the source has several (warmup_scheduler, scheduler)",
    ),
    "other groups": (
        called("scheduler", lambda state: {**state, "base_lrs": [0.1, 0.2, 0.3]}),
        "it has 3 learning rates for 1 parameter group",
    ),
}


@pytest.mark.parametrize("target", ["zero1-fp32", "zero3-fp16", "universal-3"])
@pytest.mark.parametrize("case", UNFIT)
def test_without_one_that_fits_the_note_says_what_to_pass(case, target, saved, tmp_path):
    change, why = UNFIT[case]
    source = saved(change)
    code = written(source, tmp_path / "out", target)
    notes = ckpt_tools.plan(source, tmp_path / "planned", to="zero1").notes
    (note,) = [note for note in notes if note.what == "lr_scheduler"]
    assert why in note.why and "load_lr_scheduler_states=False" in note.why
    rates, losses, client = resumed(code, target)
    assert np.isfinite([*rates, *losses]).all()
    kept = read_checkpoint(source, ReadOptions())[1].extra.keys()
    assert {name for name in kept if "sched" in name} <= {*client}


def test_an_unfit_one_of_deepspeeds_name_is_returned(saved, tmp_path):
    source = saved(called("lr_scheduler", two), "torch")
    report = ckpt_tools.convert(source, tmp_path / "out", to="zero1", world_size=RANKS)
    (note,) = [note for note in report.plan.notes if note.what == "lr_scheduler"]
    assert "it has 2 schedulers; load with load_lr_scheduler_states=False, which returns it" in note.why
    assert "lr_scheduler" in resumed(report.loading, "zero1-fp32")[2]


def test_a_trainers_folder(checkpoint, tmp_path):
    source = checkpoint("fsdp2-accelerate", "plain", 2).checkpoint
    rates, _, _ = resumed(written(source, tmp_path / "out", "zero2-bf16"), "zero2-bf16")
    assert rates == uninterrupted()


@pytest.mark.parametrize("target", ["zero1-fp32", "zero3-fp16", "universal-1"])
def test_from_stage_to_stage_and_back(target, saved, tmp_path):
    """On the way back the state is called as DeepSpeed calls it."""
    written(saved(NAMED["scheduler"]), tmp_path / "out", target)
    again = written(tmp_path / "out", tmp_path / "again", "zero2-fp32")
    assert resumed(again, "zero2-fp32")[0] == uninterrupted()
    ckpt_tools.convert(tmp_path / "again", tmp_path / "back.pt", to="torch", state="all")
    tree = torch.load(tmp_path / "back.pt", weights_only=True)
    app = tree.get("app", tree)
    assert app["lr_scheduler"]["last_epoch"] == recipe.STEPS_BEFORE and "scheduler" not in app


# The rest of what DeepSpeed's loader takes from a model file


OWN = (
    *("optimizer", "module", "model", "ds_config", "ds_version", "global_steps", "skipped_steps", "global_samples"),
    *(
        "dp_world_size",
        "mp_world_size",
        "sampler",
        "data_sampler",
        "random_ltd",
        "curriculum",
        "folding",
        "num_experts",
    ),
    *("ds_autoep_layers", "autoep_layers", "buffer_names", "param_shapes", "checkpoint_parallel_dimensions"),
)
"""Names of a user's entries, most of which DeepSpeed uses itself."""


@pytest.mark.parametrize("target", TARGETS)
def test_entries_with_names_of_deepspeed_do_not_reach_its_loader(target, saved, tmp_path):
    def change(app: Tree) -> None:
        app |= {name: "the user's" for name in OWN if name != "model"}

    source = saved(change)
    rates, _, client = resumed(written(source, tmp_path / "out", target), target)
    assert rates == uninterrupted()
    assert {"sampler", "curriculum"} <= {*client}
    notes = ckpt_tools.plan(source, tmp_path / "planned", to="zero1").notes
    lost = {note.what for note in notes if note.outcome is Outcome.DROPPED}
    assert lost == {*OWN} - {"model", "sampler", "curriculum"}
    assert read_checkpoint(tmp_path / "out", ReadOptions())[1].extra["client_state"].keys() >= {"sampler", "curriculum"}


@pytest.mark.parametrize("target", TARGETS)
def test_what_the_source_does_not_have_is_not_there(target, saved, tmp_path):
    """DeepSpeed asks whether a run's data sampler and random-LTD are in the file, and not whether they are None."""
    written(saved(NAMED["lr_scheduler"]), tmp_path / "out", target)
    for file in (tmp_path / "out").rglob("*model_states.pt"):
        assert not {"data_sampler", "random_ltd"} & torch.load(file, weights_only=False).keys()


@pytest.mark.parametrize("target", ["zero1-fp32", "zero2-bf16", "zero3-fp16"])
@pytest.mark.parametrize("has_schedule", [True, False])
def test_without_an_optimizer(target, has_schedule, saved, tmp_path):
    def change(app: Tree) -> None:
        del app["optim"]
        if not has_schedule:
            del app["lr_scheduler"]

    code = written(saved(change), tmp_path / "out", target)
    assert "load_optimizer_states=False" in code and ("load_lr_scheduler_states=False" in code) is not has_schedule
    _, losses, _ = resumed(code, target)
    assert np.isfinite(losses).all()


def own_schedule(folder: str, saves: bool) -> tuple[list[float], int]:
    """Runs on every rank: three steps under DeepSpeed's own WarmupLR, saved into ``folder``; or two more after it."""
    zero.prepare()
    case, flavour = recipe.CASES["plain"], zero.FLAVOURS["zero1-fp32"]
    model = models.build(case.variant, dtype=torch.float32, seed=1)
    warmup = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 8, "warmup_type": "linear"}}
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=recipe.optimizer_of(case, model), config=flavour.config() | {"scheduler": warmup}
    )
    if not saves:
        engine.load_checkpoint(folder)
    rates = []
    for _ in range(3):
        ids, targets = models.batch(case.variant, engine.global_steps)
        engine.backward(models.loss_of(engine(ids), targets))
        engine.step()
        rates.append(engine.get_lr()[0])
    if saves:
        engine.save_checkpoint(folder)
    engine.destroy()
    return rates, engine.lr_scheduler.last_batch_iteration


def test_deepspeeds_own_scheduler(tmp_path):
    pool = launch.pool(RANKS)
    before, at = pool.run(own_schedule, str(tmp_path / "native"), True)[0]
    report = ckpt_tools.convert(tmp_path / "native", tmp_path / "again", to="zero1", world_size=RANKS)
    assert not [note for note in report.plan.notes if note.what == "lr_scheduler"]
    after, _ = pool.run(own_schedule, str(tmp_path / "again"), False)[0]
    np.testing.assert_allclose(np.diff([*before, *after])[1:], np.diff(before)[-1])
    back = ckpt_tools.convert(tmp_path / "native", tmp_path / "dcp", to="dcp")
    (note,) = [note for note in back.plan.notes if note.what == "lr_scheduler"]
    assert "last_batch_iteration" in note.why and at == 2

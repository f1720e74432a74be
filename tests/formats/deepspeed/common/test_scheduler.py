"""The scheduler of any trainer is where DeepSpeed's ``load_checkpoint`` reads it; where it is not, a note says so."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.format_utils import torch_save_to_dcp

import ckpt_tools
from ckpt_tools.core.notes import Outcome
from ckpt_tools.core.options import ReadOptions
from ckpt_tools.runs.opening import open_checkpoint
from fixtures import launch, models, recipe, zero
from tests.support.sweep import tiered
from tests.support.truth import Truth

Tree = dict[str, Any]

TARGETS = ["zero1-fp32", "zero2-bf16", "zero3-fp16", "universal-1", "universal-3"]
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
RANKS = 2


def written(source: Path, folder: Path, target: str) -> str:
    """The code that loads ``source`` as ``target`` for two ranks."""
    kind, _, dtype = target.partition("-")
    options: Any = {} if kind == "universal" else {"world_size": RANKS, "dtype": DTYPES[dtype]}
    return ckpt_tools.convert(source, folder, to=kind, **options).loading  # type: ignore[arg-type]


def goes_on(code: str, target: str) -> tuple[list[float], list[float], list[str]]:
    """Runs on every rank ``code``, which loads: the rates of two steps, their losses, and the names in the client
    state."""
    flavour = f"zero{target[-1]}-fp32" if target.startswith("universal") else target
    run = zero.Run(recipe.CASES["plain"], zero.FLAVOURS[flavour], seed=2, load_universal="universal" in target)
    try:
        names: dict[str, Any] = {"engine": run.engine}
        exec(code, names)
        client = names["client_state"]
        rates, losses = [run.engine.get_lr()[0]], []
        for _ in range(2):
            losses += run.train(1)
            rates.append(run.engine.get_lr()[0])
        return rates, losses, sorted(client)
    finally:
        run.close()


def resumed(code: str, target: str) -> tuple[list[float], list[float], list[str]]:
    return launch.pool(RANKS).run(goes_on, code, target)[0]


def uninterrupted() -> list[float]:
    """The rates of two steps after those that were made before."""
    schedule = recipe.schedule_of(torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=0.005))
    rates = []
    for _ in range(recipe.STEPS_BEFORE + 3):
        rates.append(schedule.get_last_lr()[0])
        schedule.optimizer.step()
        schedule.step()
    return rates[recipe.STEPS_BEFORE :]


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


@pytest.mark.parametrize(
    "cell",
    tiered([f"{name} {form}" for name in NAMED for form in ("dcp", "torch")], ["scheduler dcp"],
        ["lr_scheduler torch", "lr_schedulers torch", "schedulers dcp"]),
)  # fmt: skip
def test_a_scheduler_is_found_by_its_name(cell, saved, tmp_path):
    name, form = cell.split()
    source = saved(NAMED[name], form)
    report = ckpt_tools.convert(source, tmp_path / "out", to="zero1", world_size=RANKS, strict=True)
    (note,) = [note for note in report.plan.notes if "sched" in note.what]
    assert (note.outcome, note.what) == (Outcome.KEPT, name)
    assert "load_checkpoint gives it to the run's scheduler" in note.why
    assert "load_lr_scheduler_states=False" in note.why
    rates, _, client = resumed(report.loading, "zero1-fp32")
    assert rates == uninterrupted()
    assert name not in client


@pytest.mark.extended
@pytest.mark.parametrize("target", TARGETS)
def test_training_goes_on_as_if_nothing_had_happened(target, saved, checkpoint, tmp_path):
    rates, losses, _ = resumed(written(saved(NAMED["scheduler"]), tmp_path / "out", target), target)
    assert rates == uninterrupted()
    truth = Truth.load(checkpoint("fsdp2", "plain", 2).root).facts["losses"]
    np.testing.assert_allclose(losses, truth[:2], rtol=1e-5 if target.endswith(("fp32", "1", "3")) else 0.05)


def two(state: Tree) -> list[Tree]:
    return [state, dict(state)]


def two_names(app: Tree) -> None:
    app |= {"warmup_scheduler": dict(app["lr_scheduler"]), "scheduler": app.pop("lr_scheduler")}


def of_three_groups(state: Tree) -> Tree:
    return {**state, "base_lrs": [0.1, 0.2, 0.3]}


UNFIT: dict[str, tuple[Callable[[Tree], object], str]] = {
    "none": (lambda app: app.pop("lr_scheduler"), "none is taken from the source"),
    "two of one name": (called("scheduler", two), "it has 2 schedulers"),
    "no state of torch": (called("scheduler", lambda _: {"max_lr": 0.1}), "not the state of one scheduler"),
    "two names": (two_names, "the source has several (warmup_scheduler, scheduler)"),
    "other groups": (called("scheduler", of_three_groups), "it has 3 learning rates for 1 parameter group"),
}


@pytest.mark.parametrize("case", UNFIT)
def test_without_one_that_fits_the_note_says_what_to_pass(case, saved, tmp_path):
    change, why = UNFIT[case]
    notes = ckpt_tools.plan(saved(change, "torch"), tmp_path / "planned", to="zero1").notes
    (note,) = [note for note in notes if note.what == "lr_scheduler"]
    assert why in note.why and "load_lr_scheduler_states=False" in note.why


# The rest of what DeepSpeed's loader takes from a model file

OWN = "optimizer module ds_config ds_version global_steps skipped_steps global_samples dp_world_size mp_world_size"
OWN += " data_sampler random_ltd folding num_experts ds_autoep_layers autoep_layers buffer_names param_shapes"
OWN += " checkpoint_parallel_dimensions"
"""Names that DeepSpeed uses itself."""
FREE = {"sampler", "curriculum"}


@pytest.mark.parametrize("target", tiered(TARGETS, ["zero3-fp16"], ["zero1-fp32", "universal-1"]))
def test_entries_with_names_of_deepspeed_do_not_reach_its_loader(target, saved, tmp_path):
    source = saved(lambda app: app.update(dict.fromkeys((*OWN.split(), *FREE), "the user's")))
    rates, _, client = resumed(written(source, tmp_path / "out", target), target)
    assert rates == uninterrupted()
    assert {*client} >= FREE
    notes = ckpt_tools.plan(source, tmp_path / "planned", to="zero1").notes
    assert {note.what for note in notes if note.outcome is Outcome.DROPPED} == {*OWN.split()}
    assert open_checkpoint(tmp_path / "out", ReadOptions()).manifest.extra["client_state"].keys() >= FREE


@pytest.mark.parametrize("target", tiered(TARGETS, ["zero1-fp32", "zero3-fp16", "universal-3"]))
def test_what_the_source_does_not_have_is_not_there(target, saved, tmp_path):
    """DeepSpeed asks whether a run's data sampler and random-LTD are in the file, and not whether they are None."""
    written(saved(NAMED["lr_scheduler"], "torch"), tmp_path / "out", target)
    for file in (tmp_path / "out").rglob("*model_states.pt"):
        assert not {"data_sampler", "random_ltd"} & torch.load(file, weights_only=False).keys()


@pytest.mark.extended
@pytest.mark.parametrize(
    ("target", "has_schedule"), [("zero1-fp32", True), ("zero2-bf16", False), ("zero3-fp16", True)]
)
def test_without_an_optimizer(target, has_schedule, saved, tmp_path):
    def change(app: Tree) -> None:
        for name in ("optim",) if has_schedule else ("optim", "lr_scheduler"):
            del app[name]

    code = written(saved(change), tmp_path / "out", target)
    assert "load_optimizer_states=False" in code and ("load_lr_scheduler_states=False" in code) is not has_schedule
    _, losses, _ = resumed(code, target)
    assert np.isfinite(losses).all()


def own_schedule(folder: str, saves: bool) -> tuple[list[float], int]:
    """Runs on every rank: three steps under DeepSpeed's own WarmupLR, saved into ``folder``; or three more after it."""
    import deepspeed

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


@pytest.mark.extended
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

"""``prune`` relies on the newest checkpoints only if they hold what the older ones do, and keeps the named best."""

import json
import re
import shutil
import warnings
from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed

import ckpt_tools
from ckpt_tools.cli.main import group
from ckpt_tools.errors import CkptError, IncompleteError
from ckpt_tools.runs.comparing import StepContent, find_missing_state
from ckpt_tools.trainers.all import TRAINERS
from ckpt_tools.trainers.names import has_optimizer_in_path
from tests.support.ranks import for_ranks

Weights = Mapping[str, torch.Tensor]
MODEL: Weights = {"a.weight": torch.ones(8, 4), "a.bias": torch.ones(8), "b.weight": torch.ones(4, 4)}


def saved(run: Path, step: int, weights: Weights = MODEL, *, optimizer: bool = False, **state: Any) -> Path:
    """A folder of transformers' Trainer."""
    folder = run / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    save_file(dict(weights), folder / "model.safetensors")
    if optimizer:
        torch.save(adam(), folder / "optimizer.pt")
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": step, **state}))
    return folder


def reasons(run: Path, **options: Any) -> dict[str, str]:
    report = ckpt_tools.prune(run, keep_last=options.pop("keep_last", 1), **options)
    return {each.name: each.reason for each in report.checkpoints if each.stays}


def there(run: Path) -> list[str]:
    return sorted(path.name for path in run.iterdir())


# Without tensors


def save_dcp(state: dict[str, Any], folder: Path, **options: Any) -> None:
    with warnings.catch_warnings(action="ignore"):
        save_distributed(state, checkpoint_id=folder, no_dist=True, **options)


def no_safetensors(folder: Path) -> None:
    save_file({}, folder / "model.safetensors")
    (folder / "trainer_state.json").write_text("{}")


def no_dcp(folder: Path) -> None:
    save_dcp({"step": 5}, folder)


def no_zero(folder: Path) -> None:
    torch.save({"dp_world_size": 1, "mp_world_size": 1, "module": {}}, folder / "mp_rank_00_model_states.pt")
    torch.save({"optimizer_state_dict": {}}, folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt")


def no_ranks(folder: Path) -> None:
    for rank in range(2):
        for stem in ("model", "optim", "extra_state"):
            torch.save({}, folder / f"{stem}_world_size_2_rank_{rank}.pt")


@pytest.mark.parametrize("empty", [no_safetensors, no_dcp, no_zero, no_ranks])
def test_a_checkpoint_without_tensors_is_not_complete(empty, tmp_path):
    for step in (1, 2, 3):
        saved(tmp_path, step)
    (tmp_path / "checkpoint-4").mkdir()
    empty(tmp_path / "checkpoint-4")
    newest = ckpt_tools.ls(tmp_path).checkpoints[0]
    assert newest.name == "checkpoint-4" and "tensors" in (newest.problem or "")
    ckpt_tools.prune(tmp_path, keep_last=1, yes=True)
    assert there(tmp_path) == ["checkpoint-3", "checkpoint-4"]
    assert ckpt_tools.inspect(f"{tmp_path}@latest").source.endswith("checkpoint-3")


def test_files_of_a_step_that_need_no_tensors_are_complete(tmp_path):
    for epoch in (1, 2):
        torch.save(dict(MODEL), tmp_path / f"model_epoch_{epoch}.pt")
        torch.save({"state": {}, "param_groups": []}, tmp_path / f"optimizer_epoch_{epoch}.pt")
        torch.save({"last_epoch": epoch}, tmp_path / f"scheduler_epoch_{epoch}.pt")
    assert all(each.is_complete for each in ckpt_tools.ls(tmp_path).checkpoints)
    ckpt_tools.prune(tmp_path, keep_last=1, yes=True)
    assert there(tmp_path) == ["model_epoch_2.pt", "optimizer_epoch_2.pt", "scheduler_epoch_2.pt"]


def test_a_dcp_whose_objects_hold_the_tensors_is_complete(tmp_path):
    planner = DefaultSavePlanner(flatten_state_dict=False)
    state = {"model": dict(MODEL)}
    save_dcp(state, tmp_path / "step-1", planner=planner)
    assert ckpt_tools.ls(tmp_path).checkpoints[0].problem is None


# Less than before

ONLY_SOME = {name: tensor for name, tensor in MODEL.items() if name != "b.weight"}
PLACEHOLDERS = {name: torch.ones(0) for name in MODEL}
ADAPTER = {f"base_model.model.{name}.lora_A": torch.ones(8, 1) for name in MODEL}
LESS = {
    "other names": (ADAPTER, r"it lacks 3 weights that checkpoint-[32] has \(a.bias, a.weight, b.weight\)"),
    "fewer names": (ONLY_SOME, r"it lacks 1 weight that checkpoint-[32] has \(b.weight\)"),
    "placeholders": (PLACEHOLDERS, r"its weights have 0 elements, those of checkpoint-[32] 56"),
}


@pytest.mark.parametrize("case", LESS)
def test_a_newest_that_holds_less_is_refused(case, tmp_path):
    weights, words = LESS[case]
    for step in (1, 2, 3):
        saved(tmp_path, step)
    saved(tmp_path, 4, weights)
    before = there(tmp_path)
    for yes in (False, True):
        with pytest.raises(IncompleteError, match=f"checkpoint-4, which is to stay, .*{words}.*allow_less=True"):
            ckpt_tools.prune(tmp_path, keep_last=1, yes=yes)
    with pytest.raises(IncompleteError, match=words):
        ckpt_tools.prune(tmp_path, keep_last=2)
    assert there(tmp_path) == before
    assert list(reasons(tmp_path, keep_last=4)) == ["checkpoint-4", "checkpoint-3", "checkpoint-2", "checkpoint-1"]
    done = CliRunner().invoke(group, ["prune", str(tmp_path), "--keep-last", "1"])
    assert isinstance(done.exception, IncompleteError) or done.exit_code == 4
    ckpt_tools.prune(tmp_path, keep_last=1, allow_less=True, yes=True)
    assert there(tmp_path) == ["checkpoint-4"]


def test_two_that_hold_less_are_compared_with_the_largest(tmp_path):
    saved(tmp_path, 1)
    for step in (2, 3):
        saved(tmp_path, step, ONLY_SOME)
    with pytest.raises(IncompleteError, match=r"checkpoint-3, .* that checkpoint-1 has"):
        ckpt_tools.prune(tmp_path, keep_last=1)


def test_one_of_those_that_stay_cannot_be_opened(tmp_path):
    for step in (1, 2, 3):
        (tmp_path / f"step-{step}").mkdir()
        torch.save(dict(MODEL), tmp_path / f"step-{step}" / "model.pt")
    path = tmp_path / "step-2" / "model.pt"
    path.write_bytes(path.read_bytes().replace(b"_rebuild_tensor_v2", b"_rebuilttensor_v2_"))
    with pytest.raises(CkptError, match=r"step-2, which is to stay, cannot be opened: .* nothing was removed"):
        ckpt_tools.prune(tmp_path, keep_last=2, yes=True)
    assert len(there(tmp_path)) == 3
    ckpt_tools.prune(tmp_path, keep_last=1, yes=True)
    assert there(tmp_path) == ["step-3"]


# As much as before


def test_a_model_saved_alone_leaves_the_newest_optimizer(tmp_path):
    for step in (1, 2, 3):
        saved(tmp_path, step, optimizer=True)
    saved(tmp_path, 4)
    assert reasons(tmp_path) == {
        "checkpoint-4": "the newest complete one",
        "checkpoint-3": "the newest with optimizer state",
    }
    assert list(reasons(tmp_path, allow_less=True)) == ["checkpoint-4"]


def wrapped(weights: Weights) -> Weights:
    return {f"_orig_mod.{name}": tensor for name, tensor in weights.items()}


def halved(weights: Weights) -> Weights:
    return {name: tensor.bfloat16() for name, tensor in weights.items()}


@pytest.mark.parametrize("change", [wrapped, halved])
def test_another_wrapper_or_precision_is_as_much(change, tmp_path):
    saved(tmp_path, 1)
    saved(tmp_path, 2, change(MODEL))
    assert list(reasons(tmp_path)) == ["checkpoint-2"]


@pytest.mark.parametrize("to", ["zero1", "universal", "sharded", "megatron", "safetensors"])
def test_another_format_and_world_size_are_as_much(to, checkpoint, tmp_path):
    made = checkpoint("zero3-bf16", "awkward", 2).checkpoint
    tag = next(path for path in made.iterdir() if path.is_dir())
    shutil.copytree(tag, tmp_path / "run" / "global_step1")
    ckpt_tools.convert(made, tmp_path / "made", to=to, **for_ranks(to, 3))
    inner = [path for path in (tmp_path / "made").iterdir() if path.is_dir() and to != "sharded"]
    shutil.copytree(inner[0] if inner else tmp_path / "made", tmp_path / "run" / "global_step2")
    assert {*reasons(tmp_path / "run")} - {"global_step1"} == {"global_step2"}


def content(*, weights: Mapping[str, int], state: int = 0, size: int = 100, is_read: bool = True) -> StepContent:
    return StepContent("b", weights, state, size, is_read)


@pytest.mark.parametrize(("newer", "elder", "words"), [
    (content(weights={"w": 9}), content(weights={"w": 9}), None),
    (content(weights={}), content(weights={"w": 9}), "holds no weights, and b does"),
    (content(weights={"w": 5}), content(weights={"w": 10}), None),
    (content(weights={"w": 4}), content(weights={"w": 10}), "weights have 4 elements, those of b 10"),
    (content(weights={"w": 9}), content(weights={"w": 9, "tied": 0}), None),
    (content(weights={"w": 9, "tied": 0}), content(weights={"w": 9, "tied": 9}), None),
    (content(weights={"w": 9}), content(weights={"w": 9}, state=18), None),
    (content(weights={"w": 9}, state=9), content(weights={"w": 9}, state=18), None),
    (content(weights={"w": 9}, state=8), content(weights={"w": 9}, state=18), "8 B, that of b 18 B"),
    (content(weights={}, is_read=False), content(weights={}, is_read=False), None),
    (content(weights={}, size=40, is_read=False), content(weights={"w": 9}), "files have 40 B, those of b 100 B"),
])  # fmt: skip
def test_what_is_less(newer, elder, words):
    found = find_missing_state(newer, elder)
    assert (words is None) == (found is None) and (words or "") in (found or "")


# The best


@pytest.mark.parametrize("state", [
    {"best_model_checkpoint": "/another/machine/out/checkpoint-2/"},
    {"best_model_checkpoint": r"C:\out\checkpoint-2"},
    {"best_model_checkpoint": None, "best_global_step": 2},
])  # fmt: skip
def test_the_best_by_the_trainers_state_stays(state, tmp_path):
    saved(tmp_path, 1)
    saved(tmp_path, 2, best_model_checkpoint="out/checkpoint-1")
    saved(tmp_path, 3)
    saved(tmp_path, 4, **state)
    assert reasons(tmp_path)["checkpoint-2"] == "trainer_state.json of checkpoint-4 names it as the best"
    assert len(reasons(tmp_path)) == 2


def test_the_state_of_the_whole_run_is_later(tmp_path):
    for step in (1, 2, 3):
        saved(tmp_path, step, best_model_checkpoint="out/checkpoint-2")
    (tmp_path / "trainer_state.json").write_text('{"global_step": 4, "best_model_checkpoint": "out/checkpoint-1"}')
    assert reasons(tmp_path)["checkpoint-1"] == "trainer_state.json names it as the best"
    (tmp_path / "trainer_state.json").write_text('{"global_step": 2, "best_model_checkpoint": "out/checkpoint-1"}')
    assert [*reasons(tmp_path)] == ["checkpoint-3", "checkpoint-2"]


@pytest.mark.parametrize("best", ["out/checkpoint-9", "", 7])
def test_a_best_that_is_gone_or_none_says_nothing(best, tmp_path):
    for step in (1, 2, 3):
        saved(tmp_path, step, best_model_checkpoint=best)
    assert [*reasons(tmp_path)] == ["checkpoint-3"]


def test_the_best_of_lightning_stays(tmp_path):
    """By a ``ModelCheckpoint`` that monitors a metric; one that monitors nothing calls its last one the best."""
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Linear(2, 1)

        def training_step(self, batch: Any, number: int) -> torch.Tensor:
            self.log("val_loss", abs(float(self.current_epoch) - 1), on_epoch=True)
            loss: torch.Tensor = self.net(batch[0]).square().mean()
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    quiet: Any = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    keep = lightning.pytorch.callbacks.ModelCheckpoint(
        tmp_path / "run", "{epoch}-{step}", "val_loss", save_top_k=-1, save_on_train_epoch_end=True
    )
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(4, 2)), batch_size=2)
    with warnings.catch_warnings(action="ignore"):
        trainer = lightning.Trainer(accelerator="cpu", devices=1, max_epochs=4, callbacks=[keep], **quiet)
        trainer.fit(Module(), data)
    assert reasons(tmp_path / "run") == {
        "epoch=3-step=8.ckpt": "the newest complete one",
        "epoch=1-step=4.ckpt": "epoch=3-step=8.ckpt names it as the best",
    }


WEIGHTS = {"a.weight": torch.ones(4, 4), "b.weight": torch.ones(4, 4), "b.bias": torch.ones(4)}


def adam(kind: Any = torch.optim.AdamW, **options: Any) -> dict[str, Any]:
    """Its parameters are numbered, and two of them have one shape."""
    params = [torch.nn.Parameter(tensor.clone()) for tensor in (WEIGHTS["b.weight"], *WEIGHTS.values())][:3]
    torch.stack([each.sum() for each in params]).sum().backward()  # type: ignore[no-untyped-call]
    optimizer = kind(params, **options)
    optimizer.step()
    state: dict[str, Any] = optimizer.state_dict()
    return state


def named_state() -> dict[str, Any]:
    state = {name: {"exp_avg": torch.ones_like(tensor)} for name, tensor in WEIGHTS.items()}
    return {"state": state, "param_groups": [{"params": list(WEIGHTS), "lr": 0.1}]}


def save(value: object, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(value, path)


def beside(path: str, content: Callable[[], object] = adam) -> Callable[[Path, bool], None]:
    """The Trainer's folder, with an optimizer in a file or folder beside the weights."""

    def lay(folder: Path, has_optimizer: bool) -> None:
        folder.mkdir(parents=True)
        save_file(WEIGHTS, folder / "model.safetensors")
        (folder / "trainer_state.json").write_text("{}")
        save({"last_epoch": 1, "_step_count": 2}, folder / "scheduler.pt")
        if has_optimizer and path.endswith("/"):
            save_dcp({"optimizer": content()}, folder / path)
        elif has_optimizer:
            save(content(), folder / path)

    return lay


def in_one_file(**content: Any) -> Callable[[Path, bool], None]:
    def lay(path: Path, has_optimizer: bool) -> None:
        save({"state_dict": dict(WEIGHTS), "global_step": 1, **(content if has_optimizer else {})}, path)

    return lay


def in_dcp(model: str, optimizer: str = "") -> Callable[[Path, bool], None]:
    """Model and optimizer in one DCP, or each in a folder of its own."""

    def lay(folder: Path, has_optimizer: bool) -> None:
        state = {"optim": named_state()} if has_optimizer else {}
        save_dcp({"model": dict(WEIGHTS), **({} if optimizer else state)}, folder / model)
        if has_optimizer and optimizer:
            save_dcp(state, folder / optimizer)

    return lay


def verl(folder: Path, has_optimizer: bool) -> None:
    items = {"model": dict(WEIGHTS), "extra_state": {}} | ({"optim": adam()} if has_optimizer else {})
    for rank in range(2):
        for item, value in items.items():
            save(value, folder / f"actor/{item}_world_size_2_rank_{rank}.pt")


def deepspeed(folder: Path, has_optimizer: bool) -> None:
    """The Trainer's folder, with one of DeepSpeed in it that is not read, so that sizes are compared."""
    beside("")(folder, False)
    (folder / "trainer_state.json").write_text(json.dumps({"log_history": ["x" * 9999]}))
    if has_optimizer:
        model = {"module": dict(WEIGHTS), "dp_world_size": 1, "mp_world_size": 1}
        save(model, folder / "global_step1" / "mp_rank_00_model_states.pt")
        (folder / "latest").write_text("global_step1")
        name = "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
        save({"optimizer_state_dict": adam()}, folder / "global_step1" / name)


LAYOUTS: dict[str, tuple[str, Callable[[Path, bool], None]]] = {
    "Trainer": ("checkpoint-{}", beside("optimizer.pt")),
    "SGD without state": ("checkpoint-{}", beside("optimizer.pt", lambda: adam(torch.optim.SGD, lr=0.1))),
    "an optimizer that cannot be read": ("checkpoint-{}", beside("optimizer.pt", lambda: Namespace(state=adam()))),
    "accelerate, a second model": ("checkpoint_{}", beside("optimizer_1.bin")),
    "accelerate, a DCP": ("checkpoint_{}", beside("optimizer_0/")),
    "accelerate, two DCPs": ("checkpoint_{}", in_dcp("pytorch_model_fsdp_0", "optimizer_0")),
    "a file of each rank": ("checkpoint-{}", beside("optimizer_rank_0.pt")),
    "DeepSpeed in the Trainer's folder": ("checkpoint-{}", deepspeed),
    "Lightning": ("epoch={0}-step={0}.ckpt", in_one_file(optimizer_states=[adam()])),
    "a file with an optimizer as an object": ("step_{}.pt", in_one_file(optimizer=Namespace(state=adam()))),
    "a file with an optimizer by numbers": ("step_{}.pt", in_one_file(opt=adam())),
    "a DCP": ("step-{}", in_dcp("")),
    "verl": ("global_step_{}", verl),
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_newest_optimizer_stays(layout, tmp_path):
    name, lay = LAYOUTS[layout]
    for step in (1, 2, 3):
        lay(tmp_path / name.format(step), step < 3)
    report = ckpt_tools.prune(tmp_path, keep_last=1)
    newest, second, oldest = (each.reason for each in report.checkpoints)
    assert newest == "the newest complete one"
    unknown = layout == "a file of each rank"
    assert second.startswith("it holds what no trainer writes" if unknown else "the newest with optimizer state")
    assert unknown or oldest == "older than those that stay"
    lay(tmp_path / "later" / name.format(2), True)
    lay(tmp_path / "later" / name.format(3), True)
    assert ckpt_tools.prune(tmp_path / "later", keep_last=1).num_staying == 1 + unknown


@pytest.mark.parametrize("key", ["optimizer_states", "optimizers"])
def test_two_optimizers_are_not_read_and_stay(key, tmp_path):
    """Sizes of files decide, also where the newest is large enough."""
    for step in (1, 2, 3):
        in_one_file(**{key: [adam(), adam()]})(tmp_path / f"step_{step}.pt", step < 3)
    with pytest.raises(IncompleteError, match=r"step_3.pt, which is to stay, holds less .*: its files have"):
        ckpt_tools.prune(tmp_path, keep_last=1, yes=True)
    in_one_file(notes="x" * 9999)(tmp_path / "step_3.pt", True)
    assert [each.stays for each in ckpt_tools.prune(tmp_path, keep_last=1).checkpoints] == [True, True, False]


@pytest.mark.parametrize("name", ["epoch={0}-step={0}.ckpt", "step_{}.pt"])
def test_models_alone_leave_no_second_one(name, tmp_path):
    """Random states, schedulers and averages are no optimizer."""
    others = {"lr_schedulers": [{"last_epoch": 1}], "rng": torch.ones(9), "ema": dict(WEIGHTS), "optimizer_states": []}
    for step in (1, 2, 3):
        in_one_file(**others)(tmp_path / name.format(step), True)
    assert [each.stays for each in ckpt_tools.prune(tmp_path, keep_last=1).checkpoints] == [True, False, False]


def test_each_one_is_asked_until_one_has_an_optimizer(tmp_path):
    """Not only the newest one that would go, and the largest."""
    for step in (1, 2, 3, 4):
        state = {"opt": adam(torch.optim.SGD, lr=0.1)} if step == 2 else {"notes": "x" * 9999} if step == 1 else {}
        in_one_file(**state)(tmp_path / f"step_{step}.pt", True)
    assert [each.stays for each in ckpt_tools.prune(tmp_path, keep_last=1).checkpoints] == [True, False, True, False]


NAMES = """
optimizer.pt optimizer.bin optimizer_0.bin optimizer_12.bin
optimizer_0/.metadata optimizer_1/__0_0.distcp optim/.metadata optimizer/dist_ckpt/__0_0.distcp
optimizer_rank0.bin optimizer_rank_3.pt optim_world_size_2_rank_0.pt optimizer_0.pt optim_0.safetensors
global_step5/zero_pp_rank_0_mp_rank_00_optim_states.pt bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt
expp_rank_0_mp_rank_00_optim_states.pt zero/optimizer_state.pt distrib_optim.pt Optimizer.npz opt_state/d/0f
optimizer.safetensors optimizer/optimizer_pp-0-of-1_dp-0-of-1_tp-0-of-1.pt pytorch_optim-00001.bin
optimizer_state.safetensors
"""
OTHERS = """
model.safetensors scheduler.pt lr_scheduler.pt rng_state.pth random_states_0.pkl optimizer_config.json
model_and_optim/.metadata model_optim_rng.pt optimal.pt options.pt opt-125m/model.safetensors data.pt
trainer_state.json training_args.bin optimizer/config.yaml
"""


def test_names_of_optimizers():
    """Also those of the trainers' records, of all of which an example is here."""
    names, others = NAMES.split(), OTHERS.split()
    forms = [re.compile(trainer.optimizer) for trainer in TRAINERS if trainer.optimizer]
    assert all(any(map(form.fullmatch, names)) for form in forms)
    assert [name for name in names if not has_optimizer_in_path(name)] == []
    assert [name for name in others if has_optimizer_in_path(name)] == []

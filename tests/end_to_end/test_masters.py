"""fp32 masters: those that an optimizer keeps in a slot of its state, as TransformerEngine's ``FusedAdam`` does; and a
note where the model's copy of a weight is more than rounding away from its master."""

import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import get_state_dict

import ckpt_tools
from tests.support.sweep import extended


class FusedAdam(torch.optim.Optimizer):
    """An optimizer with the state of TransformerEngine's ``FusedAdam(master_weights=True)``, which needs a GPU."""

    def __init__(self, params: Iterable[Any], slot: str) -> None:
        self.slot = slot
        super().__init__(params, {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                zeros = {name: torch.zeros_like(param, dtype=torch.float32) for name in ("exp_avg", "exp_avg_sq")}
                state = self.state[param] or {"step": torch.zeros(()), self.slot: param.float(), **zeros}
                self.state[param] = state
                state["step"] += 1
                state["exp_avg"].lerp_(param.grad.float(), 0.1)
                state["exp_avg_sq"].add_(param.grad.float() ** 2)
                state[self.slot].addcdiv_(state["exp_avg"], state["exp_avg_sq"].sqrt() + 1e-8, value=-1e-2)
                param.copy_(state[self.slot])


def job(slot: str, *, trained: bool = True) -> tuple[torch.nn.Module, FusedAdam]:
    torch.manual_seed(trained)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Linear(8, 4)).to(torch.bfloat16)
    optimizer = FusedAdam(model.parameters(), slot)
    if trained:
        model(torch.randn(4, 6).bfloat16()).float().pow(2).mean().backward()
        optimizer.step()
    return model, optimizer


def save_dcp(state: dict[str, Any], path: Path) -> None:
    with warnings.catch_warnings(action="ignore"):
        dcp.save(state, checkpoint_id=path, no_dist=True)


def flattened(optim: dict[str, Any]) -> dict[str, Any]:
    """As torchtitan has it."""
    (group,) = optim["param_groups"]
    state = {f"state.{name}.{slot}": value for name, each in optim["state"].items() for slot, value in each.items()}
    options = {f"param_groups.{n}.{o}": v for n in group["params"] for o, v in group.items() if o != "params"}
    return {**state, **options}


def of_ranks(state: dict[str, Any], folder: Path) -> None:
    folder.mkdir()
    for part, name in (("model", "model"), ("optim", "optim")):
        torch.save(state[part], folder / f"{name}_world_size_1_rank_0.pt")


SAVED: dict[str, Callable[[dict[str, Any], Path], None]] = {
    "dcp": save_dcp,
    "flattened dcp": lambda state, path: save_dcp({**state["model"], "optimizer": flattened(state["optim"])}, path),
    "torch": lambda state, path: torch.save(state, path.with_suffix(".pt")),
    "sharded": of_ranks,
}


def saved(layout: str, slot: str, folder: Path) -> tuple[Path, dict[str, Any]]:
    model, optimizer = get_state_dict(*job(slot))
    state = {"model": model, "optim": optimizer}
    SAVED[layout](state, folder / "src")
    return next(folder.glob("src*")), state


@pytest.mark.parametrize(
    ("layout", "slot"), [*((each, "master_param") for each in SAVED), *extended(("torch", "fp32_param"))]
)
def test_masters_go_where_masters_are(layout, slot, tmp_path):
    source, state = saved(layout, slot, tmp_path)
    masters = {name: each[slot] for name, each in state["optim"]["state"].items()}
    assert ckpt_tools.inspect(source).tensors_by_role["masters"] == len(masters)
    for to in ("zero1", "zero3", "universal"):
        size: dict[str, Any] = {} if to == "universal" else {"world_size": 2}
        ckpt_tools.convert(source, tmp_path / to, to=to, **size)
        found = ckpt_tools.open(tmp_path / to)
        for name, master in masters.items():
            assert torch.equal(found.state(name, "master").torch(), master), (to, name)
            assert torch.equal(found.state(name, "weight").torch(), state["model"][name]), (to, name)
        assert ckpt_tools.verify(source, tmp_path / to).equal and ckpt_tools.diff(source, tmp_path / to).equal
    ckpt_tools.convert(source, tmp_path / "model.safetensors")
    ckpt_tools.convert(source, tmp_path / "bf16.safetensors", weights="model")
    exported, own = load_file(tmp_path / "model.safetensors"), load_file(tmp_path / "bf16.safetensors")
    assert all(torch.equal(exported[name], masters[name]) for name in masters)
    assert all(torch.equal(own[name], state["model"][name]) for name in masters)


@pytest.mark.parametrize("layout", SAVED)
def test_the_slot_is_written_again_under_its_name(layout, tmp_path):
    """A tree of state is written with all that its optimizer had: torch and the job load it."""
    source, state = saved(layout, "master_param", tmp_path)
    ckpt_tools.convert(source, tmp_path / "made.pt", state="all")
    found = torch.load(tmp_path / "made.pt", weights_only=True)
    for name, weight in state["model"].items():
        assert torch.equal(found["model"][name], weight)
        for slot, value in state["optim"]["state"][name].items():
            assert torch.equal(found["optim"]["state"][name][slot], value), (name, slot)
    for path in (source, tmp_path / "made.pt"):
        module, optimizer = job("master_param", trained=False)
        module(torch.ones(1, 6).bfloat16()).sum().backward()
        optimizer.step()
        ckpt_tools.load_into(module, optimizer, path)
        for name, param in module.named_parameters():
            assert torch.equal(param, state["model"][name])
            assert torch.equal(optimizer.state[param]["master_param"], state["optim"]["state"][name]["master_param"])


@pytest.mark.parametrize("master", [torch.zeros(8, 6, dtype=torch.int16), torch.zeros(48)])
def test_what_is_no_copy_in_fp32_is_state(master, tmp_path):
    """Remainders of TransformerEngine are int16."""
    state = {"state": {"w": {"master_param": master}}, "param_groups": [{"params": ["w"]}]}
    torch.save({"model": {"w": torch.ones(8, 6).bfloat16()}, "optimizer": state}, tmp_path / "a.pt")
    roles = ckpt_tools.inspect(tmp_path / "a.pt").tensors_by_role
    assert (roles["masters"], roles["optimizer"]) == (0, 1)


# Copies of weights

NAMES = ("a", "b", "c")


def zero2_run(folder: Path, changes: dict[str, torch.Tensor], *, dtype: torch.dtype = torch.bfloat16) -> Path:
    """A ZeRO-2 run whose masters are random, and whose weights are casts of these plus ``changes``."""
    torch.manual_seed(0)
    masters = {name: torch.randn(64, 80) for name in NAMES}
    weights = {name: (each + changes.get(name, torch.zeros(()))).to(dtype) for name, each in masters.items()}
    slots = {
        name: {"master_param": m, "exp_avg": m, "exp_avg_sq": m, "step": torch.tensor(3.0)}
        for name, m in masters.items()
    }
    groups = [{"params": list(NAMES), "lr": 0.1, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}]
    torch.save({"model": weights, "optim": {"state": slots, "param_groups": groups}}, folder / "run.pt")
    ckpt_tools.convert(folder / "run.pt", folder / "zero2", to="zero2", world_size=2)
    return folder / "zero2"


def changed_model(run: Path, change: Callable[[Any], object]) -> Any:
    """The content of the model's file after the change."""
    path = run / "global_step0" / "mp_rank_00_model_states.pt"
    content = torch.load(path, weights_only=False)
    change(content)
    torch.save(content, path)
    return content


def notes(report: Any) -> list[Any]:
    return [note for note in report.notes if "more than rounding" in note.why]


SET = {"b": torch.tensor(0.5), "c": torch.tensor([0.0] * 79 + [0.25])}


@pytest.mark.parametrize("to", ["safetensors", "dcp", "zero3"])
def test_copies_that_differ_are_named(to, tmp_path):
    source = zero2_run(tmp_path, SET)
    (note,) = notes(ckpt_tools.convert(source, tmp_path / "made", to=to))
    assert note.what == "2 weights of 3" and note.count == 2 and "by up to 0.5" in note.why and "in b" in note.why
    ending = "both are written" if to == "zero3" else "the master is written; weights='model' writes"
    assert ending in note.why
    if to == "safetensors":
        (note,) = notes(ckpt_tools.convert(source, tmp_path / "own", to=to, weights="model"))
        assert note.why.endswith("the model's is written")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rounding_is_no_difference(dtype, tmp_path):
    """To the nearest number, or stochastic: the one beside it."""
    source = zero2_run(tmp_path, {}, dtype=dtype)
    assert not notes(ckpt_tools.convert(source, tmp_path / "made.safetensors"))
    assert not notes(ckpt_tools.verify(source))
    kind = torch.int32 if dtype is torch.float32 else torch.int16
    for ulps, count in ((1, 0), (2, 1)):
        changed_model(source, lambda content: content["module"]["a"].view(kind).add_(1))
        found = notes(ckpt_tools.convert(source, tmp_path / "made.safetensors", overwrite=True))
        assert len(found) == count, ulps


def test_verify_reads_all_and_convert_a_sample(tmp_path):
    torch.manual_seed(0)
    masters = {"w": torch.randn(1 << 17)}
    weights = {"w": masters["w"].bfloat16()}
    weights["w"][-1] = 9
    groups = [{"params": ["w"], "lr": 0.1}]
    state = {"state": {"w": {"master_param": masters["w"], "exp_avg": masters["w"]}}, "param_groups": groups}
    torch.save({"model": weights, "optim": state}, tmp_path / "run.pt")
    assert not notes(ckpt_tools.convert(tmp_path / "run.pt", tmp_path / "made.safetensors"))
    (note,) = notes(ckpt_tools.verify(tmp_path / "run.pt"))
    assert note.what == "1 weight of 1" and note.why.endswith("an export takes the master's")


def test_under_zenflow_the_model_is_newer(tmp_path):
    source = zero2_run(tmp_path, SET)
    config = {"zero_optimization": {"stage": 2, "zenflow": {"topk_ratio": 0.2}}}
    content = changed_model(source, lambda content: content.update(ds_config=config))
    (note,) = notes(ckpt_tools.convert(source, tmp_path / "made.safetensors"))
    assert "the model's is written, as ZenFlow" in note.why
    made = load_file(tmp_path / "made.safetensors")
    assert all(torch.equal(made[name], content["module"][name]) for name in NAMES)
    ckpt_tools.convert(source, tmp_path / "masters.safetensors", weights="master")
    masters = load_file(tmp_path / "masters.safetensors")
    assert torch.equal(masters["b"], ckpt_tools.open(source).state("b", "master").torch())
    (note,) = notes(ckpt_tools.verify(source))
    assert note.why.endswith("an export takes the model's")

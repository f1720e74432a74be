"""Into a job without converting, judged by torch: a StorageReader for ``dcp.load``, and ``load_into``."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import ckpt_tools
from ckpt_tools import load_into, storage_reader
from ckpt_tools.core.values import Opaque
from ckpt_tools.errors import SourceNotFoundError, UsageError
from ckpt_tools.torch import fill as filling
from fixtures import launch, models
from tests.support import into_jobs, moe
from tests.support.refusals import refusal_test
from tests.support.sweep import extended
from tests.support.truth import WEIGHT, Truth, assert_same_bits


def assert_same_run(truth: Truth, loaded: Truth, *, in_full: bool = True) -> None:
    """The bits of weights and state, the groups, the course of the schedule and the next losses."""
    assert_same_bits(truth.best_weights(), loaded.best_weights())
    np.testing.assert_allclose(loaded.facts["losses"], truth.facts["losses"], rtol=1e-6, atol=0)
    if in_full:
        assert_same_bits(_state(truth), _state(loaded))
        assert loaded.facts["groups"] == truth.facts["groups"]
        for fact in ("epoch", "global_step"):
            assert loaded.facts[fact] == truth.facts[fact]


def _state(truth: Truth) -> dict[tuple[str, str], np.ndarray]:
    return {key: tensor for key, tensor in truth.tensors.items() if key[1] not in (WEIGHT, "master")}


# By real processes

READER, IN_PLACE = into_jobs.through_reader, into_jobs.in_place


@pytest.mark.parametrize(
    ("how", "source", "case", "made_by", "target", "ranks"),
    [
        (IN_PLACE, "fsdp2-bf16", "awkward", 3, "fsdp2-bf16", 2),
        (READER, "zero3-fp32", "awkward", 2, "fsdp2", 3),
        *extended(
            (IN_PLACE, "zero1-fp32", "sgd", 3, "fsdp2", 2),
            (IN_PLACE, "zero2-fp32", "empty", 2, "fsdp2", 3),
            (READER, "universal-zero1-fp32", "awkward", 2, "fsdp2", 3),
            (READER, "zero3-fp32", "plain", 2, "fsdp2-tp", 4),
            (IN_PLACE, "fsdp2-tp", "plain", 4, "fsdp2-hsdp", 4),
        ),
    ],
)
def test_a_job_goes_on(how, source, case, made_by, target, ranks, checkpoint, tmp_path):
    made = checkpoint(source, case, made_by)
    launch.pool(ranks).run(how, target, case, str(made.checkpoint), str(tmp_path))
    # DeepSpeed has no state for the empty parameter, of which torch makes some of its own.
    assert_same_run(Truth.load(made.root), Truth.load(tmp_path), in_full=case != "empty")


def test_each_rank_reads_its_own_part(checkpoint):
    made = checkpoint("zero3-fp32", "plain", 2)
    pool = launch.pool(4)
    reads = pool.run(into_jobs.bytes_read, "fsdp2", "plain", str(made.checkpoint))
    tensors = Truth.load(made.root).tensors
    cut = sum(tensor.nbytes for (_, slot), tensor in tensors.items() if slot != WEIGHT and tensor.ndim)
    whole = sum(tensor.nbytes for (_, slot), tensor in tensors.items() if slot == "step") + sum(
        value.nbytes for value in models.keepsake_values().values()
    )
    assert sum(reads) == cut + 4 * whole
    assert max(reads) < 0.3 * cut + whole


def test_pieces_of_any_placement(tmp_path):
    """Where FSDP and tensor parallelism cut one dim, and unevenly, a rank's piece can be several boxes."""
    source = tmp_path / "model.pt"
    tensors = {f"{rows}x{columns}": torch.randn(rows, columns) for rows, columns in ((8, 8), (12, 5), (7, 4), (3, 9))}
    torch.save(tensors, source)
    assert all(launch.pool(4).run(into_jobs.loads_every_placement, str(source)))


# The reader


def quietly(work: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """``work`` without torch's remark that there is one process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return work(*args, **options)


def saved(tree: Any, folder: Path) -> Path:
    quietly(dcp.save, tree, checkpoint_id=str(folder), no_dist=True)
    return folder


def saved_whole(folder: Path) -> Path:
    optim = {
        "state": {"w": {"exp_avg": torch.full((4, 3), 0.5), "step": torch.tensor(7.0)}},
        "param_groups": [{"lr": 0.25, "betas": (0.5, 0.75), "params": ["w", "b"]}],
    }
    model = {"w": torch.arange(12.0).reshape(4, 3), "b": torch.tensor([1, 2, 3])}
    return saved({"app": {"model": model, "optim": optim, "epoch": 3, "rng": (torch.arange(3), "x")}}, folder / "whole")


@pytest.fixture
def whole(tmp_path):
    return saved_whole(tmp_path)


def loaded(state: dict[str, Any], url: Path, **options: Any) -> dict[str, Any]:
    quietly(dcp.load, state, storage_reader=storage_reader(url, **options), no_dist=True)
    return state


def zeros(**options: Any) -> torch.Tensor:
    return torch.zeros(4, 3, **options)


def test_any_prefix_is_found(whole):
    assert loaded({"w": zeros()}, whole)["w"].equal(torch.arange(12.0).reshape(4, 3))
    assert loaded({"net": {"w": zeros()}}, whole)["net"]["w"].equal(torch.arange(12.0).reshape(4, 3))
    assert loaded({"a": {"b": {"w": zeros()}}}, whole)["a"]["b"]["w"].equal(torch.arange(12.0).reshape(4, 3))
    ema = loaded({"ema": {"w": torch.ones(4, 3)}}, whole, job_model_key="ema")
    assert ema["ema"]["w"].equal(torch.arange(12.0).reshape(4, 3))


def test_values_are_cast_to_what_the_job_has(whole):
    state = {"model": {"w": zeros(dtype=torch.bfloat16), "b": torch.zeros(3, dtype=torch.float64)}}
    loaded(state, whole)
    assert state["model"]["w"].equal(torch.arange(12).reshape(4, 3).to(torch.bfloat16))
    assert state["model"]["b"].tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("block", [12, filling.BLOCK_BYTES])
def test_strided_targets_are_filled(block, whole, monkeypatch):
    """Those on a device block by block."""
    monkeypatch.setattr(filling, "BLOCK_BYTES", block)
    assert loaded({"w": torch.zeros(3, 4).t()}, whole)["w"].equal(torch.arange(12.0).reshape(4, 3))


def test_a_flattened_optimizer_serves_groups_and_the_other_way_round(checkpoint, whole):
    flattened = loaded({"optimizer": {"param_groups.w.lr": 0.0, "state.w.step": torch.zeros(())}}, whole)
    assert flattened["optimizer"] == {"param_groups.w.lr": 0.25, "state.w.step": torch.tensor(7.0)}
    made = checkpoint("fsdp2-titan", "awkward", 2)
    grouped = loaded({"optim": {"param_groups": [{"betas": None, "params": None}]}}, made.checkpoint)
    groups = Truth.load(made.root).facts["groups"]
    assert grouped["optim"]["param_groups"][0]["params"] in [group["fqns"] for group in groups]


@pytest.mark.parametrize(("state", "message"), [
    ({"w": zeros(dtype=torch.int64)}, r"float32, which cannot be cast to torch\.int64"),
    ({"model": {"v": torch.zeros(1)}}, r"Missing key in checkpoint state_dict: model\.v"),
    ({"model": {"w": zeros()}, "ema": {"w": torch.ones(4, 3)}}, "job_model_key"),
], ids=["a cast that would lose the kind", "a name that is not there", "two prefixes"])  # fmt: skip
def test_what_the_reader_refuses(state, message, whole):
    with pytest.raises(BaseException, match=message):
        loaded(state, whole)


def test_objects_are_served_and_tensors_inside_them(whole):
    state = loaded({"epoch": 0, "rng": None, "model": {"w": zeros()}}, whole)
    assert state["epoch"] == 3
    assert state["rng"][0].equal(torch.arange(3)) and state["rng"][1] == "x"


class Hostile:
    """Runs a command where it is unpickled. Not ``print`` itself: Ray replaces it for the whole process."""

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, ("print('run')",)


def test_what_only_code_could_make_is_refused_where_it_is_asked_for(tmp_path, capsys):
    bad = saved({"model": {"w": torch.ones(2)}, "bad": Hostile()}, tmp_path / "bad")
    with pytest.raises(BaseException, match=r"builtins\.exec"):
        loaded({"bad": None}, bad)
    model = Model(2)
    assert isinstance(load_into(model, None, bad)["bad"], Opaque)
    assert model.w.tolist() == [1.0, 1.0]
    assert not capsys.readouterr().out


# In place


class Model(nn.Module):
    def __init__(self, *shape: int, **options: Any) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(*shape, **options))


class Both(Model):
    def __init__(self, *shape: int, **options: Any) -> None:
        super().__init__(*(shape or (4, 3)), **options)
        self.register_buffer("b", torch.zeros(3, dtype=torch.int64))


def adam(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), **options)


def trained(folder: Path) -> tuple[nn.Module, torch.optim.Optimizer, Path]:
    """A model of a few steps with Adam, and its state in one file as people save it with DCP."""
    torch.manual_seed(0)
    model, optimizer = fresh(lr=0.125)
    for _ in range(3):
        model(torch.randn(5, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer, saved_run(model, optimizer, folder / "run")


def saved_run(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> Path:
    state = quietly(dcp.state_dict.get_state_dict, model, optimizer)
    return saved({"app": dict(zip(("model", "optim"), state, strict=True))}, folder)


@pytest.fixture
def run(tmp_path):
    return trained(tmp_path)


def fresh(**options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    return model, adam(model, **({"lr": 1.0} | options))


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return one.equal(other) if isinstance(one, torch.Tensor) else one == other


def test_a_plain_model_and_its_optimizer(run):
    trained, optimizer, url = run
    model, other = fresh()
    places = [parameter.data_ptr() for parameter in model.parameters()]
    assert load_into(model, other, url) == {}
    assert same(trained.state_dict(), model.state_dict())
    assert same(optimizer.state_dict(), other.state_dict())
    assert places == [parameter.data_ptr() for parameter in model.parameters()]


def test_how_a_job_computes_and_a_tensor_of_its_rate_stay_its_own(run):
    rate = torch.tensor(1.0)
    model, optimizer = fresh(lr=rate, capturable=False, foreach=False)
    load_into(model, optimizer, run[2])
    (group,) = optimizer.param_groups
    assert group["foreach"] is False
    assert group["lr"] is rate and rate.item() == 0.125


def test_wrapped_models(run):
    model, _ = fresh()
    load_into(torch.compile(model), None, run[2])
    assert same(run[0].state_dict(), model.state_dict())


def test_ties_take_either_name(tmp_path):
    model = nn.ModuleDict({"embed": nn.Embedding(5, 3), "head": nn.Linear(3, 5, bias=False)})
    model["head"].weight = model["embed"].weight
    for name in ("embed.weight", "head.weight"):
        weight = torch.randn(5, 3)
        torch.save({name: weight}, tmp_path / f"{name}.pt")
        load_into(model, None, tmp_path / f"{name}.pt")
        assert model["head"].weight.equal(weight) and model["embed"].weight.equal(weight)


def test_a_dry_run_checks_a_model_without_elements_and_loads_nothing(whole):
    assert load_into(Both(device="meta"), None, whole, dry_run=True) == {}
    model = Both()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert load_into(model, None, whole, dry_run=True) == {}
    assert same(model.state_dict(), before)


def stage(*numbers: int) -> tuple[nn.Module, torch.optim.Optimizer, set[str]]:
    """Some layers of the model of ``run`` by their names there, with the names of the other layers."""
    layers = dict(fresh()[0].named_children())
    model = nn.ModuleDict({name: layer for name, layer in layers.items() if int(name) in numbers})
    return model, adam(model), {*nn.ModuleDict(layers).state_dict()} - {*model.state_dict()}


def test_a_stage_of_a_pipeline_loads_its_own_layers(run):
    trained, optimizer, url = run
    model, other, elsewhere = stage(1, 2)
    load_into(model, other, url, elsewhere=elsewhere)
    state = trained.state_dict()
    assert same(model.state_dict(), {name: state[name] for name in model.state_dict()})
    assert same(list(other.state.values()), list(optimizer.state.values())[2:])


def test_nothing_is_loaded_where_the_optimizer_does_not_fit(run):
    model, _ = fresh()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    said = r"optimizer state not in the checkpoint: 0.weight \(momentum_buffer\).*not in the optimizer"
    with pytest.raises(UsageError, match=said):
        load_into(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), run[2])
    assert same(before, model.state_dict())


def into_whole(model: nn.Module) -> Callable[[Path], object]:
    return lambda folder: load_into(model, None, saved_whole(folder))


def without_optimizer(folder: Path) -> None:
    torch.save({"w": torch.zeros(2)}, folder / "w.pt")
    load_into(model := Model(2), adam(model), folder / "w.pt")


def mixed_groups(folder: Path) -> None:
    model, other = (nn.ModuleDict({"a": Model(2), "b": Model(2)}) for _ in range(2))
    groups = [{"params": [model["a"].w], "lr": 0.5}, {"params": [model["b"].w], "lr": 0.25}]
    load_into(other, adam(other), saved_run(model, torch.optim.Adam(groups), folder / "two"))


def gradients_that_wait(folder: Path) -> None:
    model, optimizer = fresh()
    model(torch.randn(5, 3)).sum().backward()
    load_into(model, optimizer, trained(folder)[2])


class WithoutClosure(torch.optim.Adam):
    def step(self) -> None:  # type: ignore[override]
        super().step()


def without_closure(folder: Path) -> None:
    model, _ = fresh()
    load_into(model, WithoutClosure(model.parameters()), trained(folder)[2])


test_what_is_refused_before_anything_is_loaded = refusal_test(
    ("a missing checkpoint", lambda folder: storage_reader(folder / "none"), SourceNotFoundError, "no file or folder"),
    ("unexpected", into_whole(Model(4, 3)), UsageError, "not in the model: b"),
    ("missing", into_whole(nn.ModuleDict({"x": Both()})), UsageError,
        "not in the checkpoint: x.w, x.b; not in the model: w, b"),
    ("meta", into_whole(Both(device="meta")), UsageError, "still on the meta device: w"),
    ("another shape", into_whole(Both(3, 4)), UsageError,
        r"shape mismatch: w \(checkpoint \[4, 3\], model \[3, 4\]\)"),
    ("no optimizer", without_optimizer, UsageError, "not in the checkpoint: the state of an optimizer"),
    ("mixed groups", mixed_groups, UsageError, "mix different hyperparameters of the checkpoint: group 0"),
    ("gradients", gradients_that_wait, UsageError, r"load before backward\(\)"),
    ("a step without a closure", without_closure, UsageError,
        "WithoutClosure cannot make its state by a step .*step it once before"),
)  # fmt: skip


def test_state_that_a_step_with_a_closure_makes_has_its_keys_without_a_value(tmp_path):
    class Searching(torch.optim.SGD):
        def step(self, closure: Any) -> None:  # type: ignore[override]
            raise AssertionError("no step is tried")

    model, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    found = Searching(other.parameters())
    state = {name: {"direction": torch.ones(2), "last": None, "losses": [1.5, None]} for name in ("weight", "bias")}
    optimizer = {"state": state, "param_groups": [{"lr": 0.1, "params": ["weight", "bias"]}]}
    torch.save({"model": model.state_dict(), "optimizer": optimizer}, tmp_path / "run.pt")
    load_into(other, found, tmp_path / "run.pt")
    assert found.state[other.weight]["direction"].tolist() == [1, 1]
    assert {**found.state[other.bias], "direction": None} == {"direction": None, "last": None, "losses": [1.5, None]}


def test_a_model_of_another_layout_goes_on(tmp_path):
    fused, optimizer = moe.write(tmp_path)
    saved = moe.apart(fused.state_dict())
    model = moe.Apart()
    its = moe.adamw(model)
    ckpt_tools.load_into(model, its, tmp_path / "fused.pt", recipe=tmp_path / "moe.toml")
    assert all(torch.equal(value, saved[name]) for name, value in model.state_dict().items())
    for slot in ("exp_avg", "exp_avg_sq", "step"):
        state = {name: optimizer.state[each][slot] for name, each in fused.named_parameters()}
        wanted = dict.fromkeys(saved, state["gate.weight"]) if slot == "step" else moe.apart(state)
        assert all(torch.equal(its.state[each][slot], wanted[name]) for name, each in model.named_parameters())
    losses = moe.train(fused, optimizer, 3, seed=2)
    np.testing.assert_allclose(moe.train(model, its, 3, seed=2), losses, rtol=1e-5)

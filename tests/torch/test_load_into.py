"""Into a job without converting, judged by torch: a StorageReader for ``dcp.load``, and ``load_into``."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

import ckpt_tools
from ckpt_tools import load_into, storage_reader
from ckpt_tools.core.values import Opaque
from ckpt_tools.errors import UsageError
from ckpt_tools.torch import fill as filling
from fixtures import launch, models, recipe
from fixtures.store import Fixture
from tests.support import into_jobs
from tests.support.truth import WEIGHT, Truth, assert_same_bits

Checkpoint = Callable[[str, str, int], Fixture]


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

JOBS = [
    ("fsdp2", "awkward", 3, "fsdp2", 2),
    ("zero3-fp32", "awkward", 2, "fsdp2", 3),
    ("zero1-fp32", "sgd", 3, "fsdp2", 2),
    ("zero2-fp32", "empty", 2, "fsdp2", 3),
    ("universal-zero1-fp32", "awkward", 2, "fsdp2", 3),
    ("zero3-fp32", "plain", 2, "fsdp2-tp", 4),
    ("fsdp2-tp", "plain", 4, "fsdp2-hsdp", 4),
    ("fsdp2-bf16", "awkward", 3, "fsdp2-bf16", 2),
]
BY_RANKS = sorted(JOBS, key=lambda cell: cell[-1])
"""In an order that starts few pools of processes."""


@pytest.mark.parametrize("how", [into_jobs.through_reader, into_jobs.in_place], ids=["reader", "in-place"])
@pytest.mark.parametrize(("kind", "case", "ranks", "job", "new_ranks"), BY_RANKS, ids=lambda value: str(value))
def test_a_job_goes_on(
    how,
    kind,
    case,
    ranks,
    job,
    new_ranks,
    checkpoint,
    tmp_path,
):
    made = checkpoint(kind, case, ranks)
    launch.pool(new_ranks).run(how, job, case, str(made.checkpoint), str(tmp_path))
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


def read_all(url: Path) -> dict[str, Any]:
    """Everything the reader serves, as torch's own planner rebuilds it."""
    found: dict[str, Any] = {}
    quietly(
        _load_state_dict, found, storage_reader=storage_reader(url), planner=_EmptyStateDictLoadPlanner(), no_dist=True
    )
    return found


def test_torch_rebuilds_the_tree_from_the_reader(checkpoint):
    made = checkpoint("zero2-fp32", "awkward", 2)
    app, truth = read_all(made.checkpoint)["app"], Truth.load(made.root)
    assert_same_bits(truth.best_weights(), {name: as_numpy(tensor) for name, tensor in app["model"].items()})
    assert app["lr_scheduler"] == truth.facts["scheduler"]
    assert app["epoch"] == recipe.CLIENT_STATE["epoch"] and app["tags"] == recipe.CLIENT_STATE["tags"]
    options = [
        {name: value for name, value in group.items() if name != "params"} for group in app["optim"]["param_groups"]
    ]
    assert [listed(group) for group in options] == [group["options"] for group in truth.facts["groups"]]


def as_numpy(tensor: torch.Tensor) -> np.ndarray:
    if tensor.dtype is torch.bfloat16:
        import ml_dtypes

        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def listed(options: dict[str, Any]) -> dict[str, Any]:
    """As JSON knows them."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in options.items()}


@pytest.fixture
def whole(tmp_path):
    """A DCP of a training state by torch in one process."""
    optim = {
        "state": {"w": {"exp_avg": torch.full((4, 3), 0.5), "step": torch.tensor(7.0)}},
        "param_groups": [{"lr": 0.25, "betas": (0.5, 0.75), "params": ["w", "b"]}],
    }
    model = {"w": torch.arange(12.0).reshape(4, 3), "b": torch.tensor([1, 2, 3])}
    tree = {"app": {"model": model, "optim": optim, "epoch": 3, "rng": (torch.arange(3), "x")}}
    quietly(dcp.save, tree, checkpoint_id=str(tmp_path / "whole"), no_dist=True)
    return tmp_path / "whole"


def test_any_prefix_is_found(whole):
    for tree in ({"w": torch.zeros(4, 3)}, {"net": {"w": torch.zeros(4, 3)}}, {"a": {"b": {"w": torch.zeros(4, 3)}}}):
        quietly(dcp.load, tree, storage_reader=storage_reader(whole), no_dist=True)
        found: Any = tree
        while isinstance(found, dict):
            (found,) = found.values()
        assert found.equal(torch.arange(12.0).reshape(4, 3))


def test_values_are_cast_to_what_the_job_has(whole):
    state = {"model": {"w": torch.zeros(4, 3, dtype=torch.bfloat16), "b": torch.zeros(3, dtype=torch.float64)}}
    quietly(dcp.load, state, storage_reader=storage_reader(whole), no_dist=True)
    assert state["model"]["w"].equal(torch.arange(12).reshape(4, 3).to(torch.bfloat16))
    assert state["model"]["b"].tolist() == [1.0, 2.0, 3.0]


def test_a_cast_that_would_lose_the_kind_is_refused(whole):
    with pytest.raises(BaseException, match=r"float32, which cannot be cast to torch\.int64"):
        quietly(
            dcp.load, {"w": torch.zeros(4, 3, dtype=torch.int64)}, storage_reader=storage_reader(whole), no_dist=True
        )


def test_strided_targets_are_filled(whole):
    target = torch.zeros(3, 4).t()
    quietly(dcp.load, {"w": target}, storage_reader=storage_reader(whole), no_dist=True)
    assert target.equal(torch.arange(12.0).reshape(4, 3))


def test_large_targets_are_filled_block_by_block(whole, monkeypatch):
    """As those on a device are."""
    monkeypatch.setattr(filling, "BLOCK_BYTES", 12)
    target = torch.zeros(3, 4).t()
    quietly(dcp.load, {"w": target}, storage_reader=storage_reader(whole), no_dist=True)
    assert target.equal(torch.arange(12.0).reshape(4, 3))


def test_a_flattened_optimizer_serves_groups_and_the_other_way_round(checkpoint, whole):
    flattened: dict[str, Any] = {"optimizer": {"param_groups.w.lr": 0.0, "state.w.step": torch.zeros(())}}
    quietly(dcp.load, flattened, storage_reader=storage_reader(whole), no_dist=True)
    assert flattened["optimizer"] == {"param_groups.w.lr": 0.25, "state.w.step": torch.tensor(7.0)}
    made = checkpoint("fsdp2-titan", "awkward", 2)
    grouped: dict[str, Any] = {"optim": {"param_groups": [{"betas": None, "params": None}]}}
    quietly(dcp.load, grouped, storage_reader=storage_reader(made.checkpoint), no_dist=True)
    groups = Truth.load(made.root).facts["groups"]
    assert grouped["optim"]["param_groups"][0]["params"] in [group["fqns"] for group in groups]


def test_a_name_that_is_not_there(whole):
    with pytest.raises(BaseException, match=r"Missing key in checkpoint state_dict: model\.v"):
        quietly(dcp.load, {"model": {"v": torch.zeros(1)}}, storage_reader=storage_reader(whole), no_dist=True)


def test_two_prefixes_need_a_key(whole):
    state = {"model": {"w": torch.zeros(4, 3)}, "ema": {"w": torch.ones(4, 3)}}
    with pytest.raises(BaseException, match="job_model_key"):
        quietly(dcp.load, state, storage_reader=storage_reader(whole), no_dist=True)
    ema = {"ema": {"w": torch.ones(4, 3)}}
    quietly(dcp.load, ema, storage_reader=storage_reader(whole, job_model_key="ema"), no_dist=True)
    assert ema["ema"]["w"].equal(torch.arange(12.0).reshape(4, 3))


def test_objects_are_served_and_tensors_inside_them(whole):
    state: dict[str, Any] = {"epoch": 0, "rng": None, "model": {"w": torch.zeros(4, 3)}}
    quietly(dcp.load, state, storage_reader=storage_reader(whole), no_dist=True)
    assert state["epoch"] == 3
    assert state["rng"][0].equal(torch.arange(3)) and state["rng"][1] == "x"


class Hostile:
    """Runs a command where it is unpickled. Not ``print`` itself: Ray replaces it for the whole process."""

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, ("print('run')",)


def test_what_only_code_could_make_is_refused_where_it_is_asked_for(tmp_path, capsys):
    tree = {"model": {"w": torch.ones(2)}, "bad": Hostile()}
    quietly(dcp.save, tree, checkpoint_id=str(tmp_path / "bad"), no_dist=True)
    with pytest.raises(BaseException, match=r"builtins\.exec"):
        quietly(dcp.load, {"bad": None}, storage_reader=storage_reader(tmp_path / "bad"), no_dist=True)
    model = Model(2)
    extras = load_into(model, None, tmp_path / "bad")
    assert isinstance(extras["bad"], Opaque)
    assert model.w.tolist() == [1.0, 1.0]
    assert not capsys.readouterr().out


def test_a_missing_checkpoint_is_one_clear_error(tmp_path):
    with pytest.raises(ckpt_tools.CkptError, match="no file or folder"):
        storage_reader(tmp_path / "nothing")


# In place


class Model(nn.Module):
    """One parameter ``w``."""

    def __init__(self, *shape: int, **options: Any) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(*shape, **options))


class Both(Model):
    """The parameter and the buffer of ``whole``."""

    def __init__(self, **options: Any) -> None:
        super().__init__(4, 3, **options)
        self.register_buffer("b", torch.zeros(3, dtype=torch.int64))


def adam(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), **options)


@pytest.fixture
def run(tmp_path):
    """A model of a few steps with Adam, and its state in one file as people save it with DCP."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer = adam(model, lr=0.125)
    for _ in range(3):
        model(torch.randn(5, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    state = quietly(dcp.state_dict.get_state_dict, model, optimizer)
    quietly(
        dcp.save,
        {"app": dict(zip(("model", "optim"), state, strict=True))},
        checkpoint_id=str(tmp_path / "run"),
        no_dist=True,
    )
    return model, optimizer, tmp_path / "run"


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


def test_how_a_job_computes_is_its_own_affair(run):
    model, optimizer = fresh(foreach=False)
    load_into(model, optimizer, run[2])
    assert optimizer.param_groups[0]["foreach"] is False
    assert optimizer.param_groups[0]["lr"] == 0.125


def test_a_learning_rate_that_is_a_tensor_stays_that_tensor(run):
    rate = torch.tensor(1.0)
    model, optimizer = fresh(lr=rate, capturable=False, foreach=False)
    load_into(model, optimizer, run[2])
    assert optimizer.param_groups[0]["lr"] is rate and rate.item() == 0.125


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


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: Model(4, 3), "not in the model: b"),
        (lambda: nn.ModuleDict({"x": Both()}), "not in the checkpoint: x.w, x.b; not in the model: w, b"),
        (lambda: Both(device="meta"), "still on the meta device: w"),
    ],
    ids=["unexpected", "missing", "meta"],
)
def test_models_that_do_not_fit(model, message, whole):
    with pytest.raises(UsageError, match=message):
        load_into(model(), None, whole)


def test_a_dry_run_checks_a_model_without_elements_and_loads_nothing(whole):
    assert load_into(Both(device="meta"), None, whole, dry_run=True) == {}
    model = Both()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert load_into(model, None, whole, dry_run=True) == {}
    assert same(model.state_dict(), before)
    with pytest.raises(UsageError, match=r"^the checkpoint does not fit the model: not in the model: b$"):
        load_into(Model(4, 3).to("meta"), None, whole, dry_run=True)


def test_another_shape(whole):
    model = Both()
    model.w = nn.Parameter(torch.zeros(3, 4))
    with pytest.raises(UsageError, match=r"shape mismatch: w \(checkpoint \[4, 3\], model \[3, 4\]\)"):
        load_into(model, None, whole)


def test_many_problems_are_one_sentence(tmp_path):
    torch.save({f"w{n}": torch.zeros(1) for n in range(9)}, tmp_path / "many.pt")
    with pytest.raises(UsageError, match="not in the checkpoint: w; not in the model: w0, w1, w2, w3, w4 and 4 more"):
        load_into(Model(1), None, tmp_path / "many.pt")


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


def test_what_no_stage_has_is_not_passed_over(run):
    model, optimizer, elsewhere = stage(1, 2)
    with pytest.raises(UsageError, match=r"^the checkpoint does not fit the model: not in the model: 0.bias$"):
        load_into(model, optimizer, run[2], elsewhere=elsewhere - {"0.bias"})


def test_a_tied_weight_may_be_elsewhere_by_either_name(tmp_path):
    """The checkpoint has it by one name, and the stage that holds it knows it by the other."""
    tied = nn.ModuleDict({"embed": nn.Embedding(4, 2), "norm": nn.RMSNorm(2), "head": nn.Linear(2, 4, bias=False)})
    tied["head"].weight = tied["embed"].weight
    torch.save({"model": tied.state_dict()}, tmp_path / "tied.pt")
    for name in ("embed.weight", "head.weight"):
        ends = {"embed.weight", "head.weight"}
        assert load_into(nn.ModuleDict({"norm": nn.RMSNorm(2)}), None, tmp_path / "tied.pt", elsewhere=ends) == {}
        torch.save({"model": {"norm.weight": torch.ones(2), name: torch.ones(4, 2)}}, tmp_path / "one.pt")
        assert load_into(nn.ModuleDict({"norm": nn.RMSNorm(2)}), None, tmp_path / "one.pt", elsewhere=ends) == {}


def test_nothing_is_loaded_where_the_optimizer_does_not_fit(run):
    model, _ = fresh()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(
        UsageError, match=r"optimizer state not in the checkpoint: 0.weight \(momentum_buffer\).*not in the optimizer"
    ):
        load_into(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), run[2])
    assert same(before, model.state_dict())


def test_a_checkpoint_without_an_optimizer(tmp_path):
    torch.save({"w": torch.zeros(2)}, tmp_path / "w.pt")
    model = Model(2)
    with pytest.raises(UsageError, match="not in the checkpoint: the state of an optimizer"):
        load_into(model, adam(model), tmp_path / "w.pt")


def test_groups_that_would_mix_hyperparameters(tmp_path):
    model, other = (nn.ModuleDict({"a": Model(2), "b": Model(2)}) for _ in range(2))
    groups = [{"params": [model["a"].w], "lr": 0.5}, {"params": [model["b"].w], "lr": 0.25}]
    optimizer = torch.optim.Adam(groups)
    state = dict(zip(("model", "optim"), quietly(dcp.state_dict.get_state_dict, model, optimizer), strict=True))
    quietly(dcp.save, state, checkpoint_id=str(tmp_path / "two"), no_dist=True)
    with pytest.raises(UsageError, match="mix different hyperparameters of the checkpoint: group 0"):
        load_into(other, adam(other), tmp_path / "two")


def test_gradients_must_not_wait(run):
    model, optimizer = fresh()
    model(torch.randn(5, 3)).sum().backward()
    with pytest.raises(UsageError, match=r"load before backward\(\)"):
        load_into(model, optimizer, run[2])


def test_a_step_without_a_closure_is_refused_in_words(run):
    class Plain(torch.optim.Adam):
        def step(self) -> None:  # type: ignore[override]
            super().step()

    model, _ = fresh()
    with pytest.raises(UsageError, match=r"Plain cannot make its state by a step .*step it once before"):
        load_into(model, Plain(model.parameters()), run[2])


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


def test_counts_that_are_plain_numbers(tmp_path):
    class Counting(torch.optim.SGD):
        """Keeps its step as an int."""

        def step(self, closure: Any = None) -> None:
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter]["step"] = self.state[parameter].get("step", 0) + 1

    model = Model(2)
    optimizer = Counting(model.parameters(), lr=0.1)
    for _ in range(4):
        optimizer.step()
    state = {
        "model": model.state_dict(),
        "optim": {"state": {"w": {"step": 4}}, "param_groups": [{"lr": 0.5, "params": ["w"]}]},
    }
    quietly(dcp.save, state, checkpoint_id=str(tmp_path / "counting"), no_dist=True)
    other = Model(2)
    fresh_optimizer = Counting(other.parameters(), lr=0.1)
    load_into(other, fresh_optimizer, tmp_path / "counting")
    assert fresh_optimizer.state[other.w]["step"] == 4 and type(fresh_optimizer.state[other.w]["step"]) is int

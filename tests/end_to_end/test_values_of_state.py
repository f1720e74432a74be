"""Optimizer state and ``get_extra_state`` that are lists, dicts, None or other objects, kept in their structure.

Judges are torch's own ``load_state_dict`` and ``dcp.load``, with every optimizer of pytorch_optimizer.
"""

import io
from collections.abc import Callable, Iterable
from copy import copy
from enum import Enum
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import pytorch_optimizer
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner
from torch import nn
from torch.distributed.checkpoint import state_dict as torch_state

import ckpt_tools
from ckpt_tools.cli.main import group
from ckpt_tools.errors import CkptError, LossError, UnsupportedError, UsageError
from tests.support.sweep import tiered

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

OPTIMIZERS = sorted(pytorch_optimizer.get_supported_optimizers())

NOT_RUN = {
    "adahessian", "alig", "sophiah",  # need the graph of the gradients
    "adalomo", "adammini", "lomo", "bsam", "ranger21", "demo",  # other arguments, or a process group
    "adago", "adamuon", "distributedmuon", "muon", "muonclip", "normuon", "spectralsphere",  # groups of their own
    "magma",  # its own load_state_dict refuses what its state_dict returns
}  # fmt: skip

REFUSED = {
    "spam": "there are several optimizers"  # one is the state of its warm-up
}

LOST_IN_DCP = {"scion", "scionlight"}  # an option that is an empty dict

NOT_IN_GET_STATE_DICT = {"emofact", "emolynx", "emonavi", "madgrad"}  # state of no parameter, which torch refuses

CHANGES_ITS_OPTIONS = {"dadaptadan"}  # dcp.save of torch itself cannot be loaded: a float becomes a tensor

NOT_LOADED_INTO = {
    **dict.fromkeys(
        ("asgd", "emofact", "emolynx", "emonavi", "gravity", "madgrad"), "step it once before its state is"
    ),
    **dict.fromkeys(("conda", "scalableshampoo", "scion", "scionlight"), "only code named in the checkpoint"),
    **dict.fromkeys(("dadaptsgd", "sara"), "not in the optimizer"),
}

COUNTS_OUTSIDE_ITS_STATE = {"stablespam"}


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))


def make_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    return pytorch_optimizer.load_optimizer(name)(model.parameters())


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    torch.manual_seed(3)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(torch.ones(2, 4)).pow(2).mean()
        loss.backward()
        return loss

    if type(optimizer).__name__ == "LBFGS":
        optimizer.step(closure)
    else:
        closure()
        optimizer.step()


def bits(value: Any) -> Any:
    """A value whose tensors are their bytes, and whose objects are their attributes."""
    if isinstance(value, torch.Tensor):
        flat = value.detach().contiguous().view(-1)
        return value.dtype, tuple(value.shape), bytes(flat.view(torch.uint8).tolist()) if flat.numel() else b""
    if isinstance(value, dict):
        return type(value), {key: bits(item) for key, item in value.items()}
    if isinstance(value, Iterable) and not isinstance(value, str | bytes):
        return type(value), [bits(item) for item in value]
    return type(value), bits(vars(value)) if is_projector(value) else repr(value)


def is_projector(value: Any) -> bool:
    return type(value).__module__.startswith("pytorch_optimizer") and not isinstance(value, Enum)


def contiguous(value: Any) -> Any:
    """State whose tensors are in row-major order, as they are written: other strides round differently."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone(memory_format=torch.contiguous_format)
    if isinstance(value, dict):
        return {key: contiguous(item) for key, item in value.items()}
    if is_projector(value):
        projector = copy(value)
        vars(projector).update(contiguous(vars(value)))
        return projector
    return [contiguous(item) for item in value] if type(value) is list else value


def resumed(name: str, weights: Any, state: Any) -> Any:
    """The weights after the next step of an optimizer with this state."""
    model = make_model()
    optimizer = make_optimizer(name, model)
    model.load_state_dict(weights)
    optimizer.load_state_dict(contiguous(state))
    step(model, optimizer)
    return bits(model.state_dict())


def trained(name: str, num_steps: int = 2) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = make_model()
    optimizer = make_optimizer(name, model)
    for _ in range(num_steps):
        step(model, optimizer)
    return model, optimizer


def save(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> None:
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)


def numbered(state: dict[str, Any]) -> dict[Any, Any]:
    """The state of each parameter by number, without that of parameters that have none."""
    names = [name for group in state["param_groups"] for name in group["params"]]
    found = {names.index(name) if name in names else name: value for name, value in state["state"].items()}
    return {number: value for number, value in found.items() if value != {}}


IN_TEST = ("adamw", "adafactor", "asgd", "came", "conda", "dadaptadan", "lion", "madgrad", "scion", "shampoo", "soap",
           "spam", "stablespam")  # fmt: skip
IN_EXTENDED = ("adalite", "apollo", "emofact", "galore", "gravity", "prodigy", "sara", "scalableshampoo",
               "schedulefreeadamw", "sm3")  # fmt: skip
"""Of each of the sets above, and of ordinary ones those with slots of other shapes."""


@pytest.mark.parametrize(
    "name", tiered([name for name in OPTIMIZERS if name not in NOT_RUN], test=IN_TEST, extended=IN_EXTENDED)
)
def test_every_optimizer_resumes_or_is_refused_by_name(tmp_path, name):
    model, optimizer = trained(name)
    source = tmp_path / "source.pt"
    save(model, optimizer, source)
    if name in REFUSED:
        with pytest.raises(UnsupportedError, match=REFUSED[name]):
            ckpt_tools.convert(source, tmp_path / "whole.pt", state="all")
        return
    saved = torch.load(source, weights_only=False)
    expected = bits(numbered(saved["optimizer"]))  # before a step changes the objects in it
    after = resumed(name, saved["model"], saved["optimizer"])

    ckpt_tools.convert(source, tmp_path / "whole.pt", state="all", strict=True)
    written = torch.load(tmp_path / "whole.pt", weights_only=False)
    assert bits(numbered(written["optimizer"])) == expected
    assert resumed(name, written["model"], written["optimizer"]) == after

    check_dcp(name, source, tmp_path / "dcp", model, optimizer)
    check_load_into(name, source, saved["optimizer"], after)


def check_dcp(name: str, source: Path, target: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """The code that ``convert`` prints loads every value."""
    if name in LOST_IN_DCP:
        with pytest.raises(LossError, match="norm_kwargs"):
            ckpt_tools.convert(source, target, to="dcp", strict=True)
        return
    ckpt_tools.convert(source, target, to="dcp", strict=True)
    if name in NOT_IN_GET_STATE_DICT | CHANGES_ITS_OPTIONS:
        return
    other, stepped = trained(name, 1)
    weights, optim = torch_state.get_state_dict(other, stepped)
    dcp.load({"app": {"model": weights, "optim": optim}}, checkpoint_id=target, no_dist=True)
    assert bits(optim["state"]) == bits(torch_state.get_state_dict(model, optimizer)[1]["state"])


def check_load_into(name: str, source: Path, saved: Any, after: Any) -> None:
    model, optimizer = trained(name, 0)
    if name in NOT_LOADED_INTO:
        with pytest.raises(CkptError, match=NOT_LOADED_INTO[name]):
            ckpt_tools.load_into(model, optimizer, source)
        return
    ckpt_tools.load_into(model, optimizer, source)
    loaded = optimizer.state_dict()
    assert bits(numbered(loaded)) == bits(numbered(saved))
    if name not in CHANGES_ITS_OPTIONS:
        assert bits(loaded["param_groups"]) == bits(saved["param_groups"])
    if name not in COUNTS_OUTSIDE_ITS_STATE:
        optimizer.load_state_dict(contiguous(loaded))
        step(model, optimizer)
        assert bits(model.state_dict()) == after


QUANTIZED = {
    "step": 3,
    "__bnb_optimizer_quant_state__": {
        "state1": torch.arange(8, dtype=torch.uint8).reshape(2, 4),
        "qmap1": torch.linspace(-1, 1, 256),
        "absmax1": torch.ones(1),
    },
}
"""State of one parameter as bitsandbytes 0.50 saves it (optim/optimizer.py, ``state_dict``)."""

STRUCTURES: dict[str, Any] = {
    "bitsandbytes": QUANTIZED,
    "a dict of numbers": {"exp_avg": torch.ones(2, 4), "blocks": {0: torch.ones(2), 1: torch.zeros(2)}},
    "nothing and empty": {"q": None, "list": [], "dict": {}, "nested": [[torch.ones(1)], [None]]},
    "text": {"exp_avg": torch.ones(2, 4), "kind": "adam", "betas": (0.9, 0.99), "pair": (torch.ones(1), 2)},
}


def save_state(path: Path, slots: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(0)
    groups = [{"lr": 0.1, "params": [0]}]
    state = {"model": {"w": torch.rand(2, 4)}, "optimizer": {"state": {0: slots}, "param_groups": groups}}
    torch.save(state, path)
    return state


@pytest.mark.parametrize("name", list(STRUCTURES))
@pytest.mark.parametrize("between", ["nothing", "rename", "safetensors"])
def test_a_structure_stays_as_it_is(tmp_path, name, between):
    source, whole = tmp_path / "source.pt", tmp_path / "whole.pt"
    save_state(source, STRUCTURES[name])
    if between == "safetensors":
        ckpt_tools.convert(source, tmp_path / "whole.safetensors", state="all", strict=True)
        source = tmp_path / "whole.safetensors"
    rename = ["^w$=weight"] if between == "rename" else []
    ckpt_tools.convert(source, whole, state="all", strict=True, rename=rename)
    state = torch.load(whole, weights_only=True)["optim" if between == "safetensors" else "optimizer"]["state"]
    owner = "weight" if between == "rename" else "w"
    assert bits(state[owner if owner in state else 0]) == bits(STRUCTURES[name])
    assert not ckpt_tools.verify(source, whole, rename=rename).differences


@pytest.mark.parametrize("target", ["zero1", "universal", "megatron"])
def test_a_format_without_a_place_refuses_by_name(tmp_path, target):
    save_state(tmp_path / "source.pt", QUANTIZED)
    said = rf"{target} cannot hold optimizer state .*__bnb_optimizer_quant_state__"
    with pytest.raises(UnsupportedError, match=said):
        ckpt_tools.convert(tmp_path / "source.pt", tmp_path / "out", to=target)  # type: ignore[arg-type]
    report = ckpt_tools.convert(tmp_path / "source.pt", tmp_path / "w.safetensors")
    assert any("__bnb_optimizer_quant_state__" in note.what for note in report.notes)


EXTRA_STATES: dict[str, Callable[[], Any]] = {
    "tensor": lambda: torch.arange(3, dtype=torch.uint8),
    "floats": lambda: torch.linspace(0, 1, 5),
    "stream": lambda: io.BytesIO(b"abc"),
    "dict": lambda: {"scale": torch.ones(2), "n": 3, "history": [torch.zeros(2, 2), None]},
    "nothing": lambda: None,
    "text": lambda: "fp8",
}


class Layer(nn.Linear):
    kind = ""
    received: Any = "none"

    def get_extra_state(self) -> Any:
        return EXTRA_STATES[self.kind]()

    def set_extra_state(self, state: Any) -> None:
        self.received = state


def plain(value: Any) -> Any:
    return bits(value.getvalue() if isinstance(value, io.BytesIO) else value)


def layered(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(*(layers or (Layer(3, 2), nn.Linear(2, 2))))


@pytest.mark.parametrize(
    ("kind", "state"),
    tiered(
        product(EXTRA_STATES, ("all", "model")),
        test=["tensor-all", "floats-model", "stream-all", "dict-all", "dict-model", "nothing-model", "text-all"],
    ),
)
def test_what_get_extra_state_returned_is_set_again(tmp_path, kind, state, monkeypatch):
    monkeypatch.setattr(Layer, "kind", kind)
    torch.manual_seed(0)
    model, source, whole = layered(), tmp_path / "source.pt", tmp_path / "whole.safetensors"
    torch.save({"model": model.state_dict(), "step": 1}, source)
    expected = plain(EXTRA_STATES[kind]())
    options: dict[str, Any] = {"state": state, "strict": state == "all"}

    ckpt_tools.convert(source, tmp_path / "out.pt", **options)
    written = torch.load(tmp_path / "out.pt", weights_only=False)
    other = layered()
    other.load_state_dict(written["model"] if state == "all" else written)
    assert plain(other[0].received) == expected

    ckpt_tools.convert(source, tmp_path / "dcp", to="dcp", **options)
    weights = layered().state_dict()
    dcp.load({"app": {"model": weights}} if state == "all" else weights, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert plain(weights["0._extra_state"]) == expected

    ckpt_tools.convert(source, whole, state="all", strict=True)
    assert ckpt_tools.verify(source, whole).equal
    for path in (source, tmp_path / "out.pt", tmp_path / "dcp", whole):
        other = layered()
        ckpt_tools.load_into(other, None, path)
        assert plain(other[0].received) == expected
        assert torch.equal(other[0].weight, model[0].weight)

    report = ckpt_tools.convert(source, tmp_path / "out.safetensors")
    is_tensor = isinstance(EXTRA_STATES[kind](), torch.Tensor)
    assert is_tensor or any(note.what == "0._extra_state" and note.is_loss for note in report.notes)


@pytest.mark.parametrize("kind", ["tensor", "dict"])
@pytest.mark.parametrize("is_alone", [False, True])
def test_an_extra_state_is_left_out_with_the_tensors_in_it(tmp_path, kind, is_alone, monkeypatch):
    monkeypatch.setattr(Layer, "kind", kind)
    state = layered().state_dict()
    torch.save(state if is_alone else {"model": state, "step": 1}, tmp_path / "source.pt")
    for target in ("out.pt", "out.safetensors", "dcp"):
        to: Any = {"to": "dcp"} if target == "dcp" else {}
        ckpt_tools.convert(tmp_path / "source.pt", tmp_path / target, state="all", exclude=["*_extra_state"], **to)
        assert set(ckpt_tools.open(tmp_path / target)) == {"0.weight", "0.bias", "1.weight", "1.bias"}


def test_a_missing_extra_state_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(Layer, "kind", "dict")
    without, within = layered(nn.Linear(3, 2)), layered(Layer(3, 2))
    for saved, model, place in ((without, within, "checkpoint"), (within, without, "model")):
        torch.save(saved.state_dict(), tmp_path / "a.pt")
        with pytest.raises(UsageError, match=rf"not in the {place}: 0\._extra_state"):
            ckpt_tools.load_into(model, None, tmp_path / "a.pt")


def test_state_of_no_parameter_stays_in_the_optimizer(tmp_path):
    state = save_state(tmp_path / "source.pt", {"exp_avg": torch.ones(2, 4)})
    state["optimizer"]["state"]["k"] = torch.tensor([2])
    state["model"]["version"] = 3
    torch.save(state, tmp_path / "source.pt")
    ckpt_tools.convert(tmp_path / "source.pt", tmp_path / "whole.pt", state="all", strict=True)
    written = torch.load(tmp_path / "whole.pt", weights_only=True)
    assert written["optimizer"]["state"]["k"].tolist() == [2]
    assert written["model"]["version"] == 3


def test_a_recipe_refuses_state_that_it_cannot_map(tmp_path):
    save_state(tmp_path / "source.pt", QUANTIZED)
    (tmp_path / "r.toml").write_text('[[map]]\nleft = "w"\nright = "v"\n')
    with pytest.raises(CkptError, match="a recipe, an adapter or another model's layout cannot hold optimizer state"):
        ckpt_tools.convert(tmp_path / "source.pt", tmp_path / "out.pt", state="all", recipe=tmp_path / "r.toml")


def test_inspect_lists_what_is_no_tensor(tmp_path, monkeypatch):
    monkeypatch.setattr(Layer, "kind", "dict")
    state = save_state(tmp_path / "source.pt", {"shapes": [torch.ones(2), None], "skipped": None})
    state["model"]["_extra_state"] = Layer(3, 2).get_extra_state()
    torch.save(state, tmp_path / "source.pt")
    values = ckpt_tools.inspect(tmp_path / "source.pt").to_json()["values"]
    assert values["w (shapes)"] == [{"$tensor": "float32 [2]"}, None]
    assert {"_extra_state", "w (skipped)"} <= values.keys()
    shown = CliRunner().invoke(group, ["inspect", str(tmp_path / "source.pt")]).stdout
    assert "no tensors" in shown and "w (shapes)" in shown

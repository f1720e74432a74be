"""``--recipe`` in every command: there and back, verified, resumed, and refused before anything is written."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import ckpt_tools
from ckpt_tools.conversion.convert import prepare_conversion
from ckpt_tools.core.options import ConvertRequest
from ckpt_tools.errors import CkptError, SourceNotFoundError, UsageError
from ckpt_tools.transfer.journal import fingerprint_plan
from ckpt_tools.transfer.workers import WorkerPool
from tests.support import moe
from tests.support.ranks import for_ranks
from tests.support.trees import assert_same_tree


@dataclass(frozen=True)
class Made:
    folder: Path
    model: moe.Fused
    optimizer: torch.optim.AdamW

    source = property(lambda self: self.folder / "fused.pt")
    recipe = property(lambda self: self.folder / "moe.toml")

    @property
    def weights(self) -> dict[str, Tensor]:
        return moe.apart(self.model.state_dict())

    def state(self, slot: str) -> dict[str, Tensor]:
        """A slot of the optimizer as the right side has it."""
        return moe.apart({name: self.optimizer.state[each][slot] for name, each in self.model.named_parameters()})


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("moe")
    return Made(folder, *moe.write(folder))


def test_weights_are_those_of_slices(made, tmp_path):
    report = ckpt_tools.convert(made.source, tmp_path / "out", to="safetensors", recipe=made.recipe)
    assert_same_tree(load_file(tmp_path / "out" / "model.safetensors"), made.weights)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "tinymoe"
    assert report.num_tensors == len(made.weights)
    assert report.plan.recipe == ckpt_tools.UsedRecipe("moe", False, "fused", "apart")


def test_optimizer_state_follows(made, tmp_path):
    """torch's own AdamW takes the file, and computes what slices give."""
    ckpt_tools.convert(made.source, tmp_path / "out.pt", state="all", recipe=made.recipe)
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    assert_same_tree(found["model"], made.weights)
    model = moe.Apart()
    model.load_state_dict(found["model"])
    optimizer = moe.adamw(model)
    kept = found["optimizer"]["state"]
    for slot in ("exp_avg", "exp_avg_sq"):
        assert_same_tree({name: kept[name][slot] for name in kept}, made.state(slot))
    state = {number: kept[name] for number, (name, _) in enumerate(model.named_parameters())}
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
    assert_next_losses(model, optimizer)


def assert_next_losses(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """The losses that the fused model goes on with; experts apart add in another order."""
    torch.manual_seed(0)
    fused = moe.Fused()
    first = moe.adamw(fused)
    moe.train(fused, first, 2, seed=1)
    wanted = moe.train(fused, first, 3, seed=2)
    np.testing.assert_allclose(moe.train(model, optimizer, 3, seed=2), wanted, rtol=1e-5)


@pytest.mark.parametrize("to", ["dcp", "zero3", "universal", "sharded", "safetensors"])
def test_there_and_back(to, made, tmp_path):
    there, back = tmp_path / "there", tmp_path / "back.pt"
    state: dict[str, Any] = {"state": "all"} if to == "safetensors" else {}
    ckpt_tools.convert(made.source, there, to=to, recipe=made.recipe, **for_ranks(to, 2), **state)
    assert ckpt_tools.verify(made.source, there, recipe=made.recipe, **state).equal
    taken = {"recipe": made.recipe, "inverse": True, "config": made.folder}
    ckpt_tools.convert(there, back, state="all", **taken)
    assert ckpt_tools.verify(there, back, state="all", **taken).equal
    assert ckpt_tools.diff(made.source, back).equal
    assert ckpt_tools.diff(made.source, there, recipe=made.recipe, state="model").equal
    assert ckpt_tools.diff(there, made.source, state="model", **taken).equal
    found = torch.load(back, weights_only=True)["model"]
    assert_same_tree(found, dict(made.model.state_dict()))


def test_a_difference_is_found(made, tmp_path):
    wrong = {name: value.clone() for name, value in made.weights.items()}
    wrong["experts.1.w3.weight"][0, 0] += 1
    save_file(wrong, tmp_path / "wrong.safetensors")
    for verb in (ckpt_tools.verify, ckpt_tools.diff):
        report = verb(made.source, tmp_path / "wrong.safetensors", recipe=made.recipe, state="model")
        assert [each.key.fqn for each in report.differences] == ["experts.1.w3.weight"]


def test_a_check_says_where_each_tensor_is_from(made, tmp_path):
    found = ckpt_tools.check_recipe(made.recipe, made.source, state="all")
    assert {each.name: each.shape for each in found.tensors if each.slot == "exp_avg"} == {
        name: tuple(value.shape) for name, value in made.weights.items()
    }
    sources = {each.name: each.sources for each in found.tensors if each.slot == "weight"}
    assert sources["experts.2.w3.weight"] == ("experts.gate_up",)
    assert sources["router.weight"] == ("gate.weight",)
    ckpt_tools.convert(made.source, tmp_path / "dcp", to="dcp", recipe=made.recipe)
    weights = ckpt_tools.check_recipe(made.recipe, tmp_path / "dcp", inverse=True).tensors
    (fused,) = (each for each in weights if each.name == "experts.gate_up")
    assert {*fused.sources} == {f"experts.{n}.{part}.weight" for part in ("w1", "w3") for n in range(3)}
    assert {each.slot for each in weights} == {"weight"}


def test_a_check_takes_names_as_a_conversion_does(made, tmp_path):
    """Of the weights alone a wrapper's prefix is taken off; in a whole state it stays."""
    torch.save({f"module.{name}": value for name, value in made.model.state_dict().items()}, tmp_path / "wrapped.pt")
    (tmp_path / "r.toml").write_text(moe.RECIPE.replace("{name...}", "").replace("{prefix...}", ""))
    given: dict[str, Any] = {"recipe": tmp_path / "r.toml", "config": made.folder, "src": tmp_path / "wrapped.pt"}
    assert "router.weight" in {each.name for each in ckpt_tools.check_recipe(**given).tensors}
    with pytest.raises(UsageError, match=r"matches no tensor; the nearest name is module\.gate\.weight"):
        ckpt_tools.check_recipe(state="all", **given)


SWAPPED = ("(gate:F up:F)", "(up:F gate:F)")


def test_two_recipes_of_the_same_names_are_two_plans(made, tmp_path):
    def of(text: str) -> str:
        (tmp_path / "r.toml").write_text(text)
        request = ConvertRequest(src=made.source, dst=tmp_path / "out", to="dcp", recipe=tmp_path / "r.toml")
        prepared = prepare_conversion(request, WorkerPool.choose_for_urls("threads", None, 1, request.src, request.dst))
        return fingerprint_plan(prepared.plan, prepared.laid_out.source.store)

    assert of(moe.RECIPE) == of(f"# the same in other words\n{moe.RECIPE}")
    assert of(moe.RECIPE) != of(moe.RECIPE.replace(*SWAPPED))


@pytest.mark.parametrize("where", ["beside", "above", "named"])
def test_sizes_are_in_the_configuration(where, made, tmp_path):
    """Beside the file, above the folder or where ``config`` says; a wrong one is refused."""
    source, out = tmp_path / "run" / "weights", tmp_path / "out"
    source.mkdir(parents=True)
    save_file(dict(made.model.state_dict()), source / "model.safetensors")
    folder = {"beside": source, "above": source.parent, "named": tmp_path}[where]
    given = {"recipe": made.recipe, **({"config": folder} if where == "named" else {})}
    (folder / "config.json").write_text(json.dumps({"model_type": "tinymoe", "hidden_size": moe.HIDDEN + 1}))
    with pytest.raises(UsageError, match=r"experts\.gate_up has the shape \[3, 10, 4\]"):
        ckpt_tools.convert(source, out, to="dcp", **given)
    (folder / "config.json").write_text(json.dumps({"model_type": "tinymoe", "hidden_size": moe.HIDDEN}))
    ckpt_tools.convert(source, out, to="dcp", **given)
    assert ckpt_tools.verify(source, out, **given).equal


VERBS: dict[str, Callable[..., object]] = {
    "convert": lambda src, dst, **more: ckpt_tools.convert(src, dst / "out", to="dcp", **more),
    "plan": lambda src, dst, **more: ckpt_tools.plan(src, dst / "out", to="dcp", **more),
    "consolidate": lambda src, dst, **more: ckpt_tools.consolidate(src, dst / "out", **more),
    "verify": lambda src, dst, **more: ckpt_tools.verify(src, src, **more),
    "diff": lambda src, dst, **more: ckpt_tools.diff(src, src, **more),
    "check": lambda src, dst, **more: ckpt_tools.check_recipe(src=src, **more),
    "load_into": lambda src, dst, **more: ckpt_tools.load_into(moe.Apart(), None, src, **more),
}

REFUSED: list[tuple[str, dict[str, Any], type[CkptError], str]] = [
    ("", {"recipe": "no.toml"}, SourceNotFoundError, "no.toml"),
    (moe.RECIPE, {"inverse": True}, UsageError, "the other way"),
    (moe.RECIPE, {"config": "nowhere"}, SourceNotFoundError, "nowhere"),
]


@pytest.mark.parametrize(("text", "options", "error", "said"), REFUSED)
@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_refuses_in_the_same_words(verb, text, options, error, said, made, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.toml").write_text(text)
    with pytest.raises(error, match=said) as caught:
        VERBS[verb](made.source, tmp_path, **{"recipe": tmp_path / "r.toml", **options})
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["r.toml"]


def test_what_a_recipe_does_not_know_is_left_out_by_its_name(tmp_path):
    (tmp_path / "r.toml").write_text('[[map]]\nleft = "a.{n}.w"\nright = "b.{n}.w"\n')
    kept = {f"a.{number}.w": torch.full((2,), float(number)) for number in range(2)}
    save_file(kept | {"value_head.[1].w": torch.ones(3)}, tmp_path / "source.safetensors")
    options: dict[str, Any] = {"recipe": tmp_path / "r.toml"}
    with pytest.raises(UsageError, match=r"has no line for value_head.*or leave the tensors out with exclude="):
        ckpt_tools.convert(tmp_path / "source.safetensors", tmp_path / "out.safetensors", **options)
    options["exclude"] = ["value_head.*", "b.1.w"]
    report = ckpt_tools.convert(tmp_path / "source.safetensors", tmp_path / "out.safetensors", **options)
    assert {*load_file(tmp_path / "out.safetensors")} == {"b.0.w"}
    assert [note.why for note in report.notes if note.what == "1 tensor"] == ["not selected"]
    assert ckpt_tools.verify(tmp_path / "source.safetensors", tmp_path / "out.safetensors", **options).equal

"""Bad recipes, and those that do not fit a checkpoint: one sentence, a documented exit code, nothing is written."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.numpy import save_file
from torch.distributed import checkpoint as dcp

from ckpt_tools.cli.main import main

pytestmark = [pytest.mark.quick, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]

USAGE, NOT_FOUND, FORMAT, DIFFERENT = 2, 3, 4, 6

HEAD = 'about = "a"\nleft = "a"\nright = "b"\n'
"""The start of a recipe with nothing wrong."""

RENAME = '[[map]]\nleft = "w"\nright = "v"\n'


def line(left: str, right: str, more: str = "") -> str:
    """A ``[[map]]``: each side is a quoted name, or an inline table of names and axes."""
    return f"[[map]]\nleft = {left}\nright = {right}\n{more}\n"


def axes(**sides: str) -> str:
    return line(f'{{ w = "{sides["w"]}" }}', f'{{ v = "{sides["v"]}" }}')


def halves(*shape: int) -> dict[str, NDArray[Any]]:
    return {"w": np.zeros(shape, np.float32)}


def refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: list[str], code: int, words: tuple[str, ...]
) -> None:
    """The command ends with one sentence that has ``words`` in it and the exit code, and writes nothing."""
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    said = capsys.readouterr().err
    assert ended.value.code == code, said
    assert said.startswith("Error: ") and said.count("\n") == 1, said
    assert "unexpected; run again" not in said, said
    assert [word for word in words if word not in said] == [], said
    assert sorted(tmp_path.rglob("*")) == before


# The file

FILES: dict[str, tuple[str, tuple[str, ...]]] = {
    "not TOML": ("left = \n", ("line 1",)),
    "an unknown key": (f'{HEAD}sourc = "x"\n{RENAME}', ("sourc", "source")),
    "no map": (HEAD, ("map",)),
    "a map without right": (f'{HEAD}[[map]]\nleft = "w"\n', ("right",)),
    "a name that is a number": (HEAD + line("1", '"v"'), ("number 1", "1 is")),
    "a side without names": (HEAD + line("{}", '"v"'), ("number 1", "{}")),
    "axes that are a number": (HEAD + line("{ w = 2 }", '{ v = "H" }'), ("w",)),
    "axes on one side alone": (HEAD + line('{ w = "H" }', '"v"'), ("w",)),
    "optional that is a text": (f'{HEAD}{RENAME}optional = "yes"\n', ("optional",)),
    "others that is unknown": (f'{HEAD}others = "keep"\n{RENAME}', ("others", "keep", "same")),
    "drop of an unknown side": (f'{HEAD}drop = {{ lft = ["x"] }}\n{RENAME}', ("lft", "left")),
    "drop that is a text": (f'{HEAD}drop = "x"\n{RENAME}', ("drop",)),
    "tied of a number": (f"{HEAD}tied = {{ head = 1 }}\n{RENAME}", ("tied",)),
    "add of a text": (f'{HEAD}{RENAME}add = "one"\n', ("add",)),
    "an unknown dtype": (f'{HEAD}{RENAME}dtype = {{ right = "float33" }}\n', ("float33", "float32")),
    "sizes of a list": (f"{HEAD}[sizes]\nA = [1]\n{RENAME}", ("A",)),
    "sizes that are a text": (f'{HEAD}sizes = "A"\n{RENAME}', ("sizes",)),
    "a size that is no name": (f'{HEAD}[sizes]\n"a b" = "1"\n{RENAME}', ("a b",)),
}

NAMES: dict[str, tuple[str, tuple[str, ...]]] = {
    "an open brace": (HEAD + line('"a.{layer"', '"b.{layer}"'), ("a.{layer",)),
    "an empty variable": (HEAD + line('"a.{}"', '"b.{}"'), ("a.{}",)),
    "a variable with a space": (HEAD + line('"a.{the layer}"', '"b.{the layer}"'), ("the layer",)),
    "an empty name": (HEAD + line('""', '"b"'), ("number 1", "''")),
    "a variable on one side alone": (HEAD + line('"a.{layer}.w"', '"b.w"'), ("layer",)),
    "a variable that is not an axis": (HEAD + line('{ "a.{expert}.w" = "H" }', '{ "b.w" = "H" }'), ("expert",)),
    "a variable that is no ASCII": (HEAD + line('{ "w.{e\u212a}" = "H" }', '{ v = "{eK} H" }'), ("is not a name",)),
    "a variable of the name of the config": (HEAD + line('{ "w.{config}" = "H" }', '{ v = "{config} H" }'),
        ("config",)),
    "a variable in name and shape": (HEAD + line('{ "w.{expert}" = "{expert} H" }', '{ v = "{expert} H" }'),
        ("w.{expert}", "{expert}")),
    "variables without text between": (HEAD + line('"a.{b}{c}"', '"{b}.{c}"'), ("a.{b}{c}",)),
    "many long variables": (HEAD + line('"{a...}.{b...}.{c...}.w"', '"{a...}.{b...}.{c...}.v"'), ("{a...}.{b...}",)),
    "a variable that one of two names lacks": (HEAD + line('{ "a.{layer}" = "(g:F u:F)" }',
        '{ "b.g" = "g", "b.{layer}.u" = "u" }'), ("{layer}",)),
    "two names and no axes": (HEAD + line('{ "a" = "H", "b" = "F" }', '"c"'), ("c",)),
}  # fmt: skip

AXES: dict[str, tuple[str, tuple[str, ...]]] = {
    "a closing parenthesis alone": (HEAD + axes(w="gate:F)", v="gate"), ("gate:F)",)),
    "no axes": (HEAD + axes(w="", v="H"), ("w",)),
    "a field on one side alone": (HEAD + axes(w="(gate:F up:F) H", v="gate H"), ("up",)),
    "an axis on one side alone": (HEAD + axes(w="H F", v="H"), ("F",)),
    "a sign that is not known": (HEAD + axes(w="gate$F", v="gate$F"), ("gate$F",)),
    "a record without a factor": (HEAD + axes(w="*F", v="F"), ("*F",)),
    "a field without a size": (HEAD + axes(w="(gate: up:F)", v="gate"), ("gate:",)),
    "an empty record": (HEAD + axes(w="()", v="H"), ("()",)),
    "a field of no rows": (HEAD + axes(w="(gate:0 up:F)", v="(up:F gate:0)"), ("gate",)),
    "a shape of thousands of parentheses": (HEAD + axes(w="(" * 1500 + "F" + ")" * 1500, v="F"), ("nested",)),
}

SIZES: dict[str, tuple[str, tuple[str, ...]]] = {
    "a size of an unknown variable": (f'{HEAD}[sizes]\nA = "Q / 2"\n{axes(w="A", v="A")}', ("Q",)),
    "a size divided by zero": (f'{HEAD}[sizes]\nA = "2 / 0"\n{axes(w="A", v="A")}', ("2 / 0",)),
    "a size that does not divide": (f'{HEAD}[sizes]\nA = "7 / 2"\n{axes(w="A", v="A")}', ("7 / 2",)),
    "a size of 4,000 digits": (f'{HEAD}[sizes]\nA = "{"9" * 4000}"\n{axes(w="A", v="A")}', ("A", "too large")),
    "a size below zero": (f'{HEAD}[sizes]\nA = "2 - 7"\n{axes(w="A", v="A")}', ("A",)),
    "a size that is code": (f'{HEAD}[sizes]\nA = "__import__(1)"\n{axes(w="A", v="A")}', ("__import__(1)",)),
    "a size of text in the config": (f'{HEAD}[sizes]\nA = "config.act"\n{axes(w="A", v="A")}', ("act",)),
    "a size that the shape does not have": (f'{HEAD}[sizes]\nA = "config.heads"\n{axes(w="A", v="A")}',
        ("w", "4", "8")),
}  # fmt: skip


@pytest.mark.parametrize("case", [*FILES, *NAMES, *AXES, *SIZES])
def test_a_bad_recipe(case, tmp_path, capsys):
    text, words = (FILES | NAMES | AXES | SIZES)[case]
    save_file(halves(8), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "x", "act": "gelu", "tie": True, "heads": 4}))
    recipe = tmp_path / "mine.toml"
    recipe.write_text(text)
    words = words if case in {*SIZES, "a field of no rows"} else (*words, "mine.toml")
    refused(capsys, tmp_path, convert(tmp_path, recipe), USAGE, words)


def convert(folder: Path, recipe: object, *more: str) -> list[str]:
    words = ["convert", str(folder / "model.safetensors"), str(folder / "out")]
    return [*words, "--to", "safetensors", "--recipe", f"{recipe}", *more]


# A checkpoint that it does not fit

EXPERTS = (
    HEAD
    + """
[[map]]
left  = { "experts.gate_up" = "{expert} (gate:F up:F) H" }
right = { "experts.{expert}.gate.weight" = "gate H", "experts.{expert}.up.weight" = "up H" }
"""
)


def experts(*numbers: object, **changed: NDArray[Any] | None) -> dict[str, NDArray[Any]]:
    names = [f"experts.{number}.{part}.weight" for number in numbers for part in ("gate", "up")]
    made: dict[str, NDArray[Any] | None] = {name: np.ones((3, 2), np.float32) for name in names}
    return {name: array for name, array in (made | changed).items() if array is not None}


@dataclass(frozen=True, slots=True)
class Misfit:
    recipe: str
    tensors: Mapping[str, NDArray[Any]]
    words: tuple[str, ...]
    code: int = USAGE
    inverse: bool = False
    config: Mapping[str, Any] = field(default_factory=dict)


def of(*names: str, shape: tuple[int, ...] = (4,), dtype: str = "float32") -> dict[str, NDArray[Any]]:
    return {name: np.ones(shape, dtype) for name in names}


LAYERS = HEAD + line('"a.{layer}.w"', '"b.{layer}.v"')
MISFITS: dict[str, Misfit] = {
    "a pattern that matches nothing": Misfit(LAYERS + line('"a.{layer}.bias"', '"b.{layer}.bias"'), of("a.0.w"),
        ("a.{layer}.bias", "a.0.w")),
    "a name that no line has": Misfit(LAYERS, of("a.0.w", "a.0.scale"), ("a.0.scale",)),
    "no name that a line has": Misfit(LAYERS, of("x", "y"), ("a.{layer}.w",)),
    "the other direction": Misfit(LAYERS, of("b.0.v", "b.1.v"), ("--inverse",)),
    "two lines for one tensor": Misfit(LAYERS + line('"a.{layer}.{kind}"', '"c.{layer}.{kind}"'),
        of("a.0.w", "a.0.bias"), ("a.0.w",)),
    "two tensors for one name": Misfit(HEAD + line('"a.{layer}.w"', '"b.{layer}"') + line('"c.{layer}.w"',
        '"b.{layer}"'), of("a.0.w", "c.0.w"), ("b.0", "a.0.w", "c.0.w")),
    "a name that is kept and made": Misfit('others = "same"\n' + HEAD + RENAME, of("w", "v"), ("v", "w")),
    "too few axes": Misfit(HEAD + axes(w="H", v="H"), of("w", shape=(4, 2)), ("w", "[4, 2]")),
    "axes of a scalar": Misfit(HEAD + axes(w="H", v="H"), of("w", shape=()), ("w",)),
    "rows that do not halve": Misfit(HEAD + line('{ w = "(gate:F up:F) H" }', '{ g = "gate H", u = "up H" }'),
        of("w", shape=(7, 2)), ("w", "7")),
    "a scale that is below zero": Misfit(HEAD + axes(w="(a:F-9 b:F)", v="(b:F a:F-9)"), of("w", shape=(4,)),
        ("w", "4", "F-9")),
    "a size that shapes do not tell": Misfit(HEAD + axes(w="F*F*(a:1)", v="a"), of("w"), ("w", "F")),
    "padding without end": Misfit(f'{HEAD}[sizes]\nP = "{10**30}"\n' + axes(w="V", v="(V:V pad:P)"), of("w"),
        ("P", "too large")),
    "sizes that two tensors say otherwise": Misfit(HEAD + line('{ g = "gate:F H", u = "up:F H" }',
        '{ w = "(gate:F up:F) H" }'), of("g", shape=(3, 2)) | of("u", shape=(4, 2)), ("u", "[4, 2]", "F = 3")),
    "a config that says otherwise": Misfit(f'{HEAD}[sizes]\nH = "config.hidden_size"\n{axes(w="H", v="H")}', of("w"),
        ("w", "[4]", "[5]", "H = 5; [sizes] binds H"), config={"hidden_size": 5}),
    "a size that nothing tells": Misfit(f'{HEAD}[sizes]\nA = "config.heads"\n' + line('{ w = "A*(re:D im:D)" }',
        '{ v = "(re:A*D im:A*D)" }'), of("w", shape=(8,)), ("w", "A", "config.json")),
    "a missing expert": Misfit(EXPERTS, experts(0, 1, 3), ("experts.2.gate.weight",), code=FORMAT, inverse=True),
    "the experts of the first rank": Misfit(
        'others = "same"\n' + HEAD + '[sizes]\nexpert = "config.num_experts"\n' + EXPERTS.removeprefix(HEAD),
        experts(0, 1, 2, 3),
        ("experts.4.gate.weight", "8"),
        code=FORMAT,
        inverse=True,
        config={"num_experts": 8},
    ),
    "an expert of a number that is much larger": Misfit(EXPERTS, experts(0, 99999999999),
        ("experts.1.gate.weight", "100,000,000,000"), code=FORMAT, inverse=True),
    "more experts in the config than can be counted": Misfit(
        HEAD + '[sizes]\nexpert = "config.num_experts"\n' + EXPERTS.removeprefix(HEAD),
        experts(0, 1),
        ("experts.2.gate.weight",),
        code=FORMAT,
        inverse=True,
        config={"num_experts": 10**12},
    ),
    "two names of one line for one tensor": Misfit(HEAD + line('{ "w.{a}" = "H", "w.0" = "G" }',
        '{ v = "{a} H", u = "G" }'), of("w.0", "w.1"), ("w.0", "w.{a}")),
    "experts without elements": Misfit(EXPERTS, of("experts.gate_up", shape=(9, 2, 0)), ("experts.gate_up", "H")),
    "a number added to whole numbers": Misfit(f"{HEAD}{RENAME}add = 1\n", of("w", dtype="int32"), ("w", "int32"),
        code=FORMAT),
    "a dtype that no cast leads to": Misfit(f'{HEAD}{RENAME}dtype = {{ right = "int8" }}\n', of("w"),
        ("float32", "int8"), code=FORMAT),
    "an expert with a zero in front": Misfit(EXPERTS, experts(0, "01"), ("experts.01.gate.weight",), inverse=True),
    "experts of two shapes": Misfit(EXPERTS, experts(0, 1, **{"experts.1.up.weight": np.ones((4, 2), np.float32)}),
        ("experts.1.up.weight",), inverse=True),
    "fused experts of another rank": Misfit(EXPERTS, of("experts.gate_up", shape=(6, 2)),
        ("experts.gate_up", "[6, 2]")),
    "scales of quantized weights": Misfit(HEAD + line('{ w = "(q:Q k:Q) H" }', '{ q = "q H", k = "k H" }'),
        of("w", shape=(4, 2), dtype="uint8") | of("w.weight_scale_inv", shape=(1, 1)),
        ("w is quantized", "--dequantize"), code=FORMAT),
    "tied weights that differ": Misfit(f'{HEAD}tied = {{ "head" = "v" }}\n{RENAME}' + line('"h"', '"head"'), of("w")
        | {"h": np.zeros(4, np.float32)}, ("head", "v"), code=DIFFERENT, config={"tie_word_embeddings": True}),
}  # fmt: skip


@pytest.mark.parametrize("case", MISFITS)
def test_a_recipe_that_does_not_fit(case, tmp_path, capsys):
    misfit = MISFITS[case]
    save_file(dict(misfit.tensors), tmp_path / "model.safetensors")
    if misfit.config:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "x", **misfit.config}))
    (tmp_path / "mine.toml").write_text(misfit.recipe)
    more = ["--inverse"] if misfit.inverse else []
    refused(capsys, tmp_path, convert(tmp_path, tmp_path / "mine.toml", *more), misfit.code, misfit.words)


# Optimizer state that cannot follow

SPLIT = 'others = "same"\n' + HEAD + line('{ "w" = "(gate:F up:F) H" }', '{ "g" = "gate H", "u" = "up H" }')


def adam(shape: tuple[int, ...], step: float = 2.0, **more: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"exp_avg": torch.ones(shape), "exp_avg_sq": torch.ones(shape), "step": torch.tensor(step), **more}


def group(*names: str, **values: Any) -> dict[str, Any]:
    return {"params": list(names), "lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0, **values}


@dataclass(frozen=True, slots=True)
class Stateful:
    """A training state with these parameters, their state, and parameter groups."""

    state: Mapping[str, Mapping[str, torch.Tensor]]
    groups: list[dict[str, Any]]
    words: tuple[str, ...]
    inverse: bool = True
    code: int = FORMAT


PART, WHOLE = (3, 2), (6, 2)
STATES: dict[str, Stateful] = {
    "steps that differ": Stateful({"g": adam(PART, 2.0), "u": adam(PART, 3.0)}, [group("g", "u")], ("g", "u", "step"),
        code=DIFFERENT),
    "groups that differ": Stateful({"g": adam(PART), "u": adam(PART)}, [group("g"), group("u", weight_decay=0.1)],
        ("g", "u", "group")),
    "moments of one part alone": Stateful({"g": adam(PART), "u": {}}, [group("g", "u")], ("u", "exp_avg")),
    "Adafactor's rows": Stateful({"w": {"exp_avg_sq_row": torch.ones(6), "exp_avg_sq_col": torch.ones(2),
        "step": torch.tensor(2.0)}}, [group("w")], ("w", "exp_avg_sq_row"), inverse=False),
    "preconditioners of square weights, known by another weight": Stateful({"g": {"exp_avg": torch.ones(2, 2),
        "Q": torch.eye(2)}, "u": {"exp_avg": torch.ones(2, 2), "Q": torch.eye(2)},
        "other": {"exp_avg": torch.ones(3, 2), "Q": torch.eye(3)}}, [group("g", "u", "other")], ("Q of other", "g")),
}  # fmt: skip


@pytest.mark.parametrize("case", STATES)
def test_state_that_cannot_follow(case, tmp_path, capsys):
    it = STATES[case]
    shapes = {name: tuple(state["exp_avg"].shape) for name, state in it.state.items() if "exp_avg" in state}
    model = {name: torch.ones(shapes.get(name, PART if it.inverse else WHOLE)) for name in it.state}
    tree = {"model": model, "optim": {"state": {k: v for k, v in it.state.items() if v}, "param_groups": it.groups}}
    dcp.save(tree, checkpoint_id=tmp_path / "source", no_dist=True)
    (tmp_path / "mine.toml").write_text(SPLIT)
    arguments = ["convert", str(tmp_path / "source"), str(tmp_path / "out"), "--to", "dcp"]
    arguments += ["--recipe", str(tmp_path / "mine.toml"), *(["--inverse"] if it.inverse else [])]
    refused(capsys, tmp_path, arguments, it.code, it.words)


# The option


OPTIONS: dict[str, tuple[str, bytes | None, int, tuple[str, ...]]] = {
    "an unknown name": ("vit_tim", None, USAGE, ("vit_tim", "vit_timm")),
    "an empty name": ("", None, USAGE, ("--recipe",)),
    "a file that does not exist": ("{}/no.toml", None, NOT_FOUND, ("no.toml",)),
    "a folder": ("{}/folder", None, USAGE, ("folder", "folder")),
    "UTF-16": ("{}/mine.toml", b"\xff\xfel\x00", USAGE, ("mine.toml",)),
    "an empty file": ("{}/mine.toml", b"", USAGE, ("mine.toml",)),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_what_is_no_recipe(case, tmp_path, capsys):
    name, content, code, words = OPTIONS[case]
    save_file(halves(8), tmp_path / "model.safetensors")
    (tmp_path / "folder").mkdir()
    if content is not None:
        (tmp_path / "mine.toml").write_bytes(content)
    refused(capsys, tmp_path, convert(tmp_path, name.format(tmp_path)), code, words)

"""Every pair of options that the help of a command allows is given once, on layouts in turn: it works, or is refused
with exit code 2 and a sentence that names an option of the two; both, if each works alone."""

import itertools
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from safetensors.torch import save_file

import ckpt_tools
from ckpt_tools.cli.main import group
from tests.support.commands import run_command

pytestmark = pytest.mark.extended

NAMES = ("model.embed_tokens", "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.up_proj")
LAYOUTS = ("dcp", "zero2", "hub")
RECIPE = """
[[map]]
left = { "model.{any...}" = "..." }
right = { "backbone.{any...}" = "..." }
"""

VALUES: dict[str, tuple[str, ...]] = {
    "to": ("dcp", "torch", "zero3"), "world_size": ("2",), "from_": (), "tag": ("global_step0",),
    "model_key": ("model",), "optim_key": ("optim",), "param_order": ("order.txt",),
    "storage_options": ("endpoint_url=http://localhost:1",), "state": ("model", "all"), "dtype": ("bf16",),
    "weights": ("model", "master"), "buffers": ("*.up_proj.weight",), "include": ("*up_proj*", "model.*"),
    "drop": ("*q_proj*",), "fill": ("head.pt",),
    "exclude": ("*q_proj*",), "rename": ("q_proj=query",), "key_map": ("map.json",), "strip": ("auto", "model"),
    "recipe": ("recipe.toml",), "max_shard_size": ("1KB",), "config": ("config",), "like": ("hub",),
    "memory": ("300MB",), "workers": ("1",), "runner": ("threads",), "address": ("localhost:1",),
    "progress": ("none",), "log_format": ("json",), "adapter_name": ("default",), "optimizer_file": ("optimizer.pt",),
    "io": ("direct", "buffered"), "part": ("1/1", "2/2"), "quantize": ("int8", "fp8"), "keep": ("*q_proj*",),
}  # fmt: skip
"""By parameter; flags have none, and ``from_`` takes the format of the layout."""

COMMANDS = {"convert": ["SRC", "OUT"], "merge-lora": ["SRC", "adapter", "OUT"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pairs")
    torch.manual_seed(0)
    model = {f"{name}.weight": torch.randn(8, 8) for name in NAMES}
    state = {number: {"exp_avg": torch.ones(8, 8), "step": torch.tensor(1.0)} for number in range(3)}
    groups = [{"params": [0, 1, 2], "lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0}]
    torch.save({"model": model, "optimizer": {"state": state, "param_groups": groups}}, folder / "whole.pt")
    torch.save({"state": state, "param_groups": groups}, folder / "optimizer.pt")
    torch.save({"head.weight": torch.ones(2, 8)}, folder / "head.pt")
    (folder / "order.txt").write_text("".join(f"{name}\n" for name in model))
    (folder / "map.json").write_text(json.dumps({"model.embed_tokens.weight": "tokens.weight"}))
    (folder / "recipe.toml").write_text(RECIPE)
    (folder / "config").mkdir()
    (folder / "config" / "config.json").write_text('{"model_type": "llama", "vocab_size": 8}')
    ckpt_tools.convert(folder / "whole.pt", folder / "dcp", to="dcp")
    ckpt_tools.convert(folder / "whole.pt", folder / "zero2", to="zero2", tag="global_step0")
    ckpt_tools.convert(folder / "whole.pt", folder / "hub", to="safetensors", config=folder / "config")
    (folder / "adapter").mkdir()
    matrices = {f"{NAMES[1]}.lora_{part}.weight": torch.ones(2, 8).reshape(shape) for part, shape in SHAPES.items()}
    save_file(matrices, folder / "adapter" / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 2, "target_modules": ["q_proj"]}
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps(settings))
    return folder


SHAPES = {"A": (2, 8), "B": (8, 2)}


def options_of(command: str) -> list[click.Option]:
    found = [each for each in group.commands[command].params if isinstance(each, click.Option)]
    return [each for each in found if each.name != "help"]


def words(option: click.Option, layout: str, turn: int) -> list[str]:
    """The option as it is typed; of several values, they take turns."""
    if option.is_flag:
        return [option.opts[0]]
    values = (layout if layout != "hub" else "safetensors",) if option.name == "from_" else VALUES[str(option.name)]
    return [option.opts[0], values[turn % len(values)]]


def run(folder: Path, command: str, layout: str, given: list[list[str]]) -> tuple[int, str]:
    """The exit code, and all that is printed."""
    out = folder / "out"
    places = [{"SRC": layout, "OUT": "out"}.get(place, place) for place in COMMANDS[command]]
    typed = [word for each in given for word in each]
    to = [] if "--to" in typed else ["--to", "safetensors"]
    done = run_command(command, *places, *to, *typed)
    shutil.rmtree(out, ignore_errors=True)
    for beside in (*folder.glob("out*"), *folder.glob(".out*")):
        beside.unlink() if beside.is_file() else shutil.rmtree(beside)
    return done.code, done.out + done.err


def faults(folder: Path, command: str, every: int) -> Iterator[tuple[Any, ...]]:
    options = options_of(command)
    alone = {
        (layout, *(typed := words(option, layout, turn))): run(folder, command, layout, [typed])[0]
        for layout in LAYOUTS
        for option in options
        for turn in range(len(VALUES.get(str(option.name), ())) or 1)
    }
    yield from ((key, code) for key, code in alone.items() if code not in (0, 1 if "--strict" in key else 0, 2))
    for number, (one, other) in enumerate(itertools.combinations(options, 2)):
        if number % every:
            continue
        layout = LAYOUTS[number % len(LAYOUTS)]
        given = [words(one, layout, number), words(other, layout, number // 3)]
        code, said = run(folder, command, layout, given)
        # What is written is named by its format.
        names = [any(word in said for word in (each if each[0] == "--to" else each[:1])) for each in given]
        are_fine = all(alone[(layout, *each)] == 0 for each in given)
        is_strict = ["--strict"] in given and code == 1 and "with --strict nothing may be lost" in said
        if code and not is_strict and (code != 2 or not (all(names) if are_fine else any(names))):
            yield layout, given, code, said


@pytest.mark.parametrize("command", ["convert", pytest.param("merge-lora", marks=pytest.mark.soak)])
def test_every_pair(command, folder, monkeypatch, request):
    """Of ``convert`` every second one, and all in ``make soak``."""
    monkeypatch.chdir(folder)
    assert list(faults(folder, command, 1 if request.config.getoption("--soak") else 2)) == []

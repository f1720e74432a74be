"""Both commands before their work begins: options are checked without torch, no value may be empty, and names of
tensors can be changed. And the network of the documentation."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from PIL import Image
from safetensors.torch import save_file
from torch import nn

from inference import demo
from inference.batch import __main__ as batch
from inference.serving import __main__ as serve
from tests.inference.commands import predicted, rows_of
from tests.inference.conftest import running_service
from tests.support.empty_values import check_refused, lines_with_one_empty_value

ROOT = Path(__file__).parents[2]

# --- empty values

COMMANDS = {"batch/__main__.py": batch.main, "demo.py": demo.main, "serving/__main__.py": serve.main}
LINES = [
    pytest.param(command, label, words, id=f"{name}{label}")
    for name, command in COMMANDS.items()
    for label, words in lines_with_one_empty_value(command)
]


@pytest.mark.parametrize(("command", "label", "words"), LINES)
def test_an_empty_value_is_refused(command, label, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check_refused(command, label, words)


# --- without torch

HEAVY = ("torch", "torchvision", "PIL", "fastapi", "uvicorn", "pyarrow", "sklearn", "rich")

PROGRAM = """
import importlib, json, os, sys

def run(command, words):
    try:
        importlib.import_module(f"inference.{command}.__main__").main(words)
    except SystemExit as ended:
        found = [name for name in %r if sys.modules.get(name)]
        print(json.dumps([ended.code, found]), flush=True)

for command, *words in json.load(sys.stdin):
    sys.stdout.flush()
    if os.fork() == 0:
        run(command, words)
        os._exit(0)
    os.wait()
"""


def test_options_are_checked_before_torch_is_imported(forms, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path)
    Path("there.jsonl").touch()
    codes = {
        "batch --help": 0,
        "batch --model MODEL --input=digits --output=x.jsonl --unknown": 2,
        "batch --model MODEL --input=fashion-mnist --output=x.jsonl": 2,
        "batch --model none.pt --input=digits --output=x.jsonl": 3,
        "batch --model MODEL --input=digits --output=there.jsonl": 8,
        "serving --help": 0,
        "serving MODEL --port=99999": 2,
        "serving none.pt": 3,
        "serving MODEL --host=no-such-host.invalid": 5,
    }
    lines = [line.replace("MODEL", str(forms / "model.pt")).split() for line in codes]
    program = [sys.executable, "-c", PROGRAM % (HEAVY,)]
    done = subprocess.run(program, input=json.dumps(lines), capture_output=True, text=True, check=False, timeout=600)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert found == [[code, []] for code in codes.values()], done.stderr
    assert "Traceback" not in done.stderr


# --- names of tensors

RENAMED = ("--rename=^net[.]=", "--exclude=ema.*")

RECIPE = """
drop = {left = ["ema.{name...}"]}
[[map]]
left = "net.{name...}"
right = "{name...}"
"""


@pytest.fixture(scope="module")
def wrapped(weights, tmp_path_factory):
    """The weights as attribute of another module, beside a second copy."""
    file = tmp_path_factory.mktemp("wrapped") / "model.safetensors"
    save_file({f"{prefix}.{name}": value.clone() for name, value in weights.items() for prefix in ("net", "ema")}, file)
    return file


def test_predict_renames(wrapped, forms, image_folder, tmp_path):
    bare, back = tmp_path / "bare.toml", tmp_path / "back.toml"
    bare.write_text(RECIPE)
    swapped = RECIPE.replace("left =", "third =").replace("right =", "left =").replace("third =", "right =")
    back.write_text(swapped)
    expected = predicted(forms / "model.safetensors", image_folder / "000.png", tmp_path / "x.jsonl")
    for options in (RENAMED, (f"--recipe={bare}",), (f"--recipe={back}", "--inverse")):
        found = predicted(wrapped, image_folder / "000.png", tmp_path / "x.jsonl", "--overwrite", *options)
        assert found == expected


# --- the network of docs/inference_networks.md, as it is printed there

SECTION = (ROOT / "docs" / "inference_networks.md").read_text().partition("**A network of your own**")[2]
MODULE, CLIENT = re.findall(r"```python\n(.*?)```", SECTION, re.DOTALL)
SAVE, PREDICT, SERVE, CURL = re.findall(r"^\$ (.*)$", SECTION, re.MULTILINE)


@pytest.mark.extended
def test_the_network_of_the_page_is_predicted_with_and_served(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.syspath_prepend(str(tmp_path))
    assert len(MODULE.splitlines()) <= 25
    Path("segmenter.py").write_text(MODULE)
    pixels = np.random.default_rng(0).integers(256, size=(48, 64, 3), dtype=np.uint8)
    Image.fromarray(pixels).save("photo.png")
    exec(SAVE.partition("'")[2].rstrip("'"))
    done = CliRunner().invoke(batch.main, shlex.split(PREDICT.replace("ckpt-tools predict", "")))
    assert done.exit_code == 0, done.stderr
    (row,) = rows_of(Path("answer.jsonl"))
    network = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 2, 1))
    network.load_state_dict(torch.load("net.pt"))
    with torch.no_grad():
        image = torch.from_numpy(pixels.astype(np.float32).transpose(2, 0, 1) / 255)
        scores = network(torch.stack([image] * 8))[0]
    assert row["outputs"] == {"foreground": float((scores.argmax(0) == 1).numpy().mean())}

    words = shlex.split(SERVE.replace("ckpt-tools serve", "").replace("--port 8000", ""))
    with running_service(tmp_path / "service", None, *words) as service:
        address = service.url.removeprefix("http://")
        told = subprocess.run(CURL.replace("127.0.0.1:8000", address), shell=True, capture_output=True, check=True)
        assert json.loads(told.stdout) == row["outputs"]
        exec(CLIENT.replace("127.0.0.1:8000", address))
    assert capsys.readouterr().out == "(1, 2, 48, 64)\n"

"""Runs the network of docs/inference_networks.md as it is printed there."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from tests.inference.conftest import running_service

ROOT = Path(__file__).parents[2]
SECTION = (ROOT / "docs" / "inference_networks.md").read_text().partition("**A network of your own**")[2]
MODULE, CLIENT = re.findall(r"```python\n(.*?)```", SECTION, re.DOTALL)
COMMANDS = re.findall(r"^\$ (.*)$", SECTION, re.MULTILINE)


def ran(command: str) -> subprocess.CompletedProcess[str]:
    """A line of the page."""
    return subprocess.run(command, shell=True, capture_output=True, text=True, check=False)


@pytest.mark.extended
def test_the_network_of_the_page_is_predicted_with_and_served(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    save, predict, serve, curl = COMMANDS
    assert len(MODULE.splitlines()) <= 25
    Path("segmenter.py").write_text(MODULE)
    pixels = np.random.default_rng(0).integers(256, size=(48, 64, 3), dtype=np.uint8)
    Image.fromarray(pixels).save("photo.png")
    monkeypatch.syspath_prepend(str(tmp_path))
    exec(save.partition("'")[2].rstrip("'"))
    done = ran(predict.replace("ckpt-tools predict", f"{sys.executable} -m inference.batch"))
    assert done.returncode == 0, done.stderr
    (row,) = [json.loads(line) for line in Path("answer.jsonl").read_text().splitlines()]

    network = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 2, 1))
    network.load_state_dict(torch.load("net.pt"))
    with torch.no_grad():
        image = torch.from_numpy(pixels.astype(np.float32).transpose(2, 0, 1) / 255)
        scores = network(torch.stack([image] * 8))[0]
    assert row["outputs"] == {"foreground": float((scores.argmax(0) == 1).numpy().mean())}

    words = serve.replace("ckpt-tools serve", "").replace("--port 8000", "").replace("'", "").split()
    with running_service(tmp_path / "service", None, "--model", *words) as service:
        address = service.url.removeprefix("http://")
        assert json.loads(ran(curl.replace("127.0.0.1:8000", address)).stdout) == row["outputs"]
        exec(CLIENT.replace("127.0.0.1:8000", address))
    assert capsys.readouterr().out == "(1, 2, 48, 64)\n"

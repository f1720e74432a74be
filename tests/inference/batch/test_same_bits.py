"""An image gets the same bits by every way: training's evaluation, each format, the batch command, Ray, the service."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from fastapi.testclient import TestClient

import ckpt_tools
from inference.batch.__main__ import main
from inference.serving import __main__ as serve
from tests.training.predictions import all_logits
from training.loop import evaluation
from training.models.image_models import build_model

FORMATS: tuple[ckpt_tools.WrittenFormat, ...] = ("dcp", "zero1", "zero2", "zero3")
CONSOLIDATED = ("model.safetensors", "model.pt")
OTHERS = ("model.pt", "zero1", "zero2")
COMPANY = (slice(0, 1), slice(3, 40), slice(17, 18), slice(0, 31))


@pytest.fixture(scope="module")
def expected(weights, digits):
    """As training evaluates."""
    model = build_model()
    model.load_state_dict(weights)
    return torch.softmax(all_logits(evaluation.plain_logits(model), digits.pixels), dim=1).tolist()


@pytest.fixture(scope="module")
def sources(forms, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharded")
    for name in FORMATS:
        ckpt_tools.convert(forms / "model.pt", folder / name, to=name, world_size=3)
    return {name: forms / name for name in CONSOLIDATED} | {name: folder / name for name in FORMATS}


def batch(source: Path, out: Path) -> list[list[float]]:
    words = ["--model", str(source), "--input=digits", f"--output={out}", "--threads=1", "--quiet"]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, result.stderr
    return [json.loads(line)["probabilities"] for line in out.read_text().splitlines()]


@pytest.mark.parametrize(
    "name", ["model.safetensors", "dcp", "zero3", *(pytest.param(name, marks=pytest.mark.extended) for name in OTHERS)]
)
def test_the_batch_command(name, sources, expected, tmp_path):
    assert batch(sources[name], tmp_path / "x.jsonl") == expected


@pytest.mark.extended
def test_the_batch_command_on_ray(sources, tmp_path):
    """The same file, byte for byte. A process of its own, which starts and ends its cluster."""
    batch(sources["dcp"], tmp_path / "here.jsonl")
    command = [sys.executable, "-m", "inference.batch", "--model", sources["dcp"], "--input=digits", "--runner=ray"]
    command += ["--workers=1", "--threads=1", "--quiet", f"--output={tmp_path / 'ray.jsonl'}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "ray.jsonl").read_bytes() == (tmp_path / "here.jsonl").read_bytes()


@pytest.mark.parametrize("name", ["dcp", pytest.param("zero3", marks=pytest.mark.extended)])
def test_the_service(name, sources, expected, digits):
    with TestClient(serve.create_app(sources[name]), base_url="http://127.0.0.1") as client:
        for part in COMPANY:
            pixels = digits.pixels[part].numpy()
            for answer in (in_json(client, pixels), in_binary(client, pixels)):
                assert answer.tolist() == expected[part]


def in_json(client: TestClient, pixels: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    data = {"name": "image", "datatype": "UINT8", "shape": list(pixels.shape), "data": pixels.ravel().tolist()}
    answer = client.post("/v2/models/model/infer", json={"inputs": [data]})
    assert answer.status_code == 200, answer.text
    found = next(each for each in answer.json()["outputs"] if each["name"] == "probabilities")
    return np.array(found["data"]).reshape(found["shape"])


def in_binary(client: TestClient, pixels: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    size = {"binary_data_size": pixels.nbytes}
    given = {"name": "image", "datatype": "UINT8", "shape": list(pixels.shape), "parameters": size}
    wanted = {"name": "probabilities", "parameters": {"binary_data": True}}
    head = json.dumps({"inputs": [given], "outputs": [wanted]}).encode()
    headers = {"Inference-Header-Content-Length": str(len(head)), "Content-Type": "application/octet-stream"}
    answer = client.post("/v2/models/model/infer", content=head + pixels.tobytes(), headers=headers)
    assert answer.status_code == 200, answer.text
    start = int(answer.headers["Inference-Header-Content-Length"])
    return np.frombuffer(answer.content[start:], np.float32).reshape(len(pixels), -1).astype(float)

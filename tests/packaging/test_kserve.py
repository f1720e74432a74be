"""KServe's clients use the service. They want versions of other packages than the tests', so they are installed from
the package index into an environment of their own: with ``--soak`` alone."""

import json
import subprocess
from pathlib import Path

import numpy as np
import torch

from inference.models.predictor import load_predictor
from tests.inference.conftest import running_service
from tests.packaging.environments import empty
from training.data.datasets import load_dataset
from training.models.image_models import build_model

SCRIPT = Path(__file__).with_name("kserve_client.py")


def test_kserves_clients_get_the_predictors_bits(tmp_path):
    model = tmp_path / "model.pt"
    torch.manual_seed(1)
    made = build_model()
    torch.nn.init.normal_(made.heads[0].weight)
    torch.save(made.state_dict(), model)
    pixels = load_dataset("digits", "held-out", None).pixels[:35]
    np.save(tmp_path / "pixels.npy", pixels.numpy())
    environment = empty(tmp_path, with_pip=True)
    pip = [environment.python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "kserve"]
    done = subprocess.run(pip, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    with running_service(tmp_path / "run", None, f"--model=m={model}", "--grpc-port=0") as service:
        printed = environment.run_python(SCRIPT, service.url, service.grpc, tmp_path / "pixels.npy")
    assert printed.returncode == 0, printed.stderr
    found = json.loads(printed.stdout.splitlines()[-1])
    truth = load_predictor(model).predict(list(pixels))
    expected = {
        "id": "7",
        "label": [each.label for each in truth],
        "probabilities": np.array([each.probabilities for each in truth], np.float32).tobytes().hex(),
    }
    assert found["http"]["wrong"].startswith("the input image has the shape [35, 5, 28]; it must be [-1, 28, 28]")
    for ways in (found["http"], found["grpc"]):
        assert (ways["ready"], ways["models"]) == ([True, True], [True, False])
        assert ways["json"] == ways["binary"] == expected

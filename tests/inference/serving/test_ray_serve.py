"""The service on a Ray cluster is the same service: the same answers, one model, and an end that loses no request."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import tempfile
import time
from pathlib import Path

import httpx
import pytest
from safetensors.torch import save_file

from inference.models.predictor import load_predictor
from tests.inference.conftest import running_service
from tests.inference.serving.test_serve import read_to_end, wait_until

pytestmark = pytest.mark.extended

NUM_CONNECTIONS = 24


@pytest.fixture(scope="module")
def model_file(forms, tmp_path_factory):
    """A file that a test replaces."""
    return Path(shutil.copy(forms / "model.safetensors", tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def service(model_file, tmp_path_factory):
    """The last test ends it. Ray's sockets want a short path."""
    options = [f"--model=m={model_file}", "--runner=ray", "--replicas=2", "--watch=0.2", "--quiet-time=0.5"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", tempfile.gettempdir())
        with running_service(tmp_path_factory.mktemp("ray"), None, *options) as service:
            yield service


def asked(pixels: list[int]) -> dict[str, object]:
    return {"inputs": [{"name": "image", "shape": [1, 28, 28], "datatype": "UINT8", "data": pixels}]}


def test_replicas_answer_with_the_predictors_bits(service, forms, digits):
    predictor, url = load_predictor(forms / "model.safetensors"), f"{service.url}/v2/models/m"
    for number in range(NUM_CONNECTIONS):
        image = digits.pixels[number]
        given = asked(image.flatten().tolist())
        answer = httpx.post(f"{url}/infer", json=given, headers={"X-Request-Id": f"n{number}"}, timeout=120)
        assert answer.status_code == 200, answer.text
        assert answer.headers.get_list("x-request-id") == [f"n{number}"]
        (expected,) = predictor.predict([image])
        assert tuple(answer.json()["outputs"][1]["data"]) == expected.probabilities
    assert httpx.get(url, timeout=120).json()["parameters"]["digest"] == predictor.identity.digest


def test_the_figures_are_those_of_all_replicas(service):
    def counted() -> dict[str, float]:
        lines = httpx.get(f"{service.url}/metrics", timeout=120).text.splitlines()
        found = [line for line in lines if line.startswith("nv_inference_request_success{")]
        return {line.partition('worker="')[2].partition('"')[0]: float(line.split()[-1]) for line in found}

    wait_until(lambda: counted().keys() == {"0", "1"} and sum(counted().values()) == NUM_CONNECTIONS)
    assert min(counted().values()) > 0


@pytest.mark.parametrize("verb", ["load", "unload"])
def test_models_do_not_change(verb, service):
    answer = httpx.post(f"{service.url}/v2/repository/models/m/{verb}", timeout=120)
    assert (answer.status_code, answer.json()) == (
        400,
        {"error": "models cannot be loaded and unloaded: the service has no --model-control explicit"},
    )


def test_a_new_checkpoint_is_rolled_out_and_no_request_is_lost(service, model_file, forms, weights, digits):
    """A damaged file comes first, which leaves the replicas as they are."""
    old, given = load_predictor(forms / "model.safetensors"), asked(digits.pixels[0].flatten().tolist())
    model_file.write_bytes(b"damaged")
    wait_until(lambda: "m: the new checkpoint cannot be loaded, the old one keeps" in service.log.read_text())
    save_file({name: tensor * 0.9 for name, tensor in weights.items()}, model_file)
    new = load_predictor(model_file)
    rows = {
        version: predictor.predict([digits.pixels[0]])[0].probabilities
        for version, predictor in (("1", old), ("2", new))
    }
    answers, end = [], time.monotonic() + 240
    while time.monotonic() < end and f"m: serves {model_file}" not in service.log.read_text():
        answers.append(httpx.post(f"{service.url}/v2/models/m/infer", json=given, timeout=120))
    answers += [httpx.post(f"{service.url}/v2/models/m/infer", json=given, timeout=120) for _ in range(8)]
    assert {answer.status_code for answer in answers} == {200}
    found = [(answer.json()["model_version"], tuple(answer.json()["outputs"][1]["data"])) for answer in answers]
    assert set(found) == set(rows.items())
    assert {version for version, _ in found[-8:]} == {"2"}
    metadata = httpx.get(f"{service.url}/v2/models/m", timeout=120).json()
    assert (metadata["versions"], metadata["parameters"]["digest"]) == (["2"], new.identity.digest)


def test_a_request_that_was_taken_is_answered_at_the_end(service, digits):
    """The half of it that came before the signal is in a replica."""
    body = json.dumps(asked(digits.pixels[0].flatten().tolist())).encode()
    head = f"POST /v2/models/m/infer HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(body)}"
    with socket.create_connection(("127.0.0.1", service.port), timeout=120) as slow:
        slow.sendall(f"{head}\r\n\r\n".encode() + body[:99])
        wait_until(lambda: "in_flight" in httpx.get(f"{service.url}/metrics", timeout=120).text)
        time.sleep(1)
        service.process.send_signal(signal.SIGTERM)
        time.sleep(2)
        slow.sendall(body[99:])
        answer = read_to_end(slow)
    assert answer.startswith(b"HTTP/1.1 200"), answer
    assert service.process.wait(120) == 143
    assert service.log.read_text().splitlines()[-1] == "stopped by SIGTERM"

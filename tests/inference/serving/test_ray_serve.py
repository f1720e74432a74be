"""The service on a Ray cluster is the same service: the same answers, one model, and an end that loses no request."""

from __future__ import annotations

import json
import signal
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from inference.models.predictor import load_predictor
from tests.inference.conftest import Service, running_service
from tests.inference.serving.test_serve import read_to_end, run_serve, wait_until
from training.data.datasets import LabelledImages

NUM_CONNECTIONS = 24


@pytest.fixture(scope="module")
def service(forms: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """The last test ends it. Ray's sockets want a short path."""
    model = f"--model=m={forms / 'model.safetensors'}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", tempfile.gettempdir())
        with running_service(tmp_path_factory.mktemp("ray"), None, model, "--runner=ray", "--replicas=2") as service:
            yield service


def asked(pixels: list[int]) -> dict[str, object]:
    return {"inputs": [{"name": "image", "shape": [1, 28, 28], "datatype": "UINT8", "data": pixels}]}


def test_replicas_answer_with_the_predictors_bits(service: Service, forms: Path, digits: LabelledImages) -> None:
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


def test_the_figures_are_those_of_all_replicas(service: Service) -> None:
    def counted() -> dict[str, float]:
        lines = httpx.get(f"{service.url}/metrics", timeout=120).text.splitlines()
        found = [line for line in lines if line.startswith("nv_inference_request_success{")]
        return {line.partition('worker="')[2].partition('"')[0]: float(line.split()[-1]) for line in found}

    wait_until(lambda: counted().keys() == {"0", "1"} and sum(counted().values()) == NUM_CONNECTIONS)
    assert min(counted().values()) > 0


@pytest.mark.parametrize("verb", ["load", "unload"])
def test_models_do_not_change(verb: str, service: Service) -> None:
    answer = httpx.post(f"{service.url}/v2/repository/models/m/{verb}", timeout=120)
    assert (answer.status_code, answer.json()) == (
        400,
        {"error": "models cannot be loaded and unloaded: the service has no --model-control explicit"},
    )


def test_a_request_that_was_taken_is_answered_at_the_end(service: Service, digits: LabelledImages) -> None:
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


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--runner=ray", "--grpc-port=0"], "--grpc-port does not go with --runner ray: Ray's proxy speaks HTTP"),
        (["--runner=ray", "--watch=5"], "--watch does not go with --runner ray"),
        (["--runner=ray", "--drain=5"], "--drain does not go with --runner ray"),
        (["--runner=ray", "--model-control=explicit"], "--model-control does not go with --runner ray"),
        (["--runner=ray", "--access-log"], "--access-log does not go with --runner ray"),
        (["--runner=ray", "--replicas=0"], "there has to be at least one replica"),
        (["--runner=ray", "--replicas=2", "--max-replicas=3"], "--replicas is a fixed number"),
        (["--runner=ray", "--min-replicas=2"], "--min-replicas needs --max-replicas"),
        (["--runner=ray", "--min-replicas=3", "--max-replicas=2"], "--max-replicas may not be below --min-replicas"),
        (["--replicas=2"], "--replicas, --min-replicas and --max-replicas are for --runner ray"),
    ],
)
def test_options_that_do_not_fit_are_refused(words: list[str], sentence: str, forms: Path) -> None:
    done = run_serve(forms / "model.safetensors", *words)
    assert (done.returncode, sentence in done.stderr, done.stderr.count("\n")) == (2, True, 1), done.stderr

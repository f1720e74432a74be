"""On a Ray cluster the batch command writes the same file, and the service is the same service: the same answers, one
model, and an end that loses no request."""

import json
import re
import shutil
import signal
import socket
import tempfile
import time
from pathlib import Path

import httpx
import pytest
from safetensors.torch import save_file

import ckpt_tools
from inference.models.predictor import load_predictor
from tests.inference.commands import predicted
from tests.inference.conftest import NO_TLS, running_service
from tests.inference.serving.helpers import image_request, read_to_end, wait_until
from tests.support.ray_cluster import cluster

__all__ = ["cluster"]  # a fixture

pytestmark = pytest.mark.extended

NUM_CONNECTIONS = 24


@pytest.fixture(scope="module")
def dcp(forms, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharded") / "dcp"
    ckpt_tools.convert(forms / "model.pt", folder, to="dcp", world_size=3)
    return folder


ON_RAY = ("--runner=ray", "--workers=1", "--threads=1", "--architecture=ours")


# Ray Data itself uses what it deprecates.
@pytest.mark.filterwarnings("ignore:.* is deprecated:DeprecationWarning")
def test_the_batch_command_writes_the_same_file(dcp, cluster, tmp_path):
    """Byte for byte, with the workers of a cluster that is there."""
    for name, options in (("here", ON_RAY[2:]), ("ray", ON_RAY)):
        predicted(dcp, "digits", tmp_path / f"{name}.jsonl", *options)
    assert (tmp_path / "ray.jsonl").read_bytes() == (tmp_path / "here.jsonl").read_bytes()


@pytest.fixture(scope="module")
def model_file(forms, tmp_path_factory):
    """A file that a test replaces."""
    return Path(shutil.copy(forms / "model.safetensors", tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def service(model_file, tmp_path_factory):
    """On a cluster of its own. The last test ends it. Ray's sockets want a short path."""
    options = [f"--model=m={model_file}", "--runner=ray", "--replicas=2", "--watch=0.2", "--quiet-time=0.5"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", tempfile.gettempdir())
        with running_service(tmp_path_factory.mktemp("ray"), None, *options, "--architecture=ours") as service:
            yield service


@pytest.fixture(scope="module")
def client(service):
    """Each request has a connection of its own, so that all replicas get some."""
    limits = httpx.Limits(max_keepalive_connections=0)
    with httpx.Client(base_url=service.url, timeout=120, verify=NO_TLS, limits=limits) as client:
        yield client


INFER = "/v2/models/m/infer"


@pytest.fixture(scope="module")
def given(digits):
    return image_request(digits.pixels[:1].numpy())


def test_replicas_answer_with_the_predictors_bits(client, forms, digits):
    predictor = load_predictor(forms / "model.safetensors")
    for number in range(NUM_CONNECTIONS):
        asked, request_id = image_request(digits.pixels[number : number + 1].numpy()), f"n{number}"
        answer = client.post(INFER, json=asked, headers={"X-Request-Id": request_id})
        assert answer.status_code == 200, answer.text
        assert answer.headers.get_list("x-request-id") == [request_id]
        (expected,) = predictor.predict([digits.pixels[number]])
        assert tuple(answer.json()["outputs"][1]["data"]) == expected.probabilities
    assert client.get("/v2/models/m").json()["parameters"]["digest"] == predictor.identity.digest
    lines = client.get("/metrics").text.splitlines()
    counts = [line for line in lines if line.startswith("nv_inference_count{")]
    assert len({re.search(r'worker="(\d)"', line)[1] for line in counts}) == 2  # type: ignore[index]
    (statistics,) = client.get("/v2/models/m/stats").json()["model_stats"]
    assert sum(float(line.split()[-1]) for line in counts) == statistics["inference_count"] == NUM_CONNECTIONS


def test_a_new_checkpoint_is_rolled_out_and_no_request_is_lost(
    service, client, model_file, forms, weights, digits, given
):
    """A damaged file comes first, which leaves the replicas as they are."""
    old = load_predictor(forms / "model.safetensors")
    model_file.write_bytes(b"damaged")
    wait_until(lambda: "m: the new checkpoint cannot be loaded, the old one keeps" in service.log.read_text())
    save_file({name: tensor * 0.9 for name, tensor in weights.items()}, model_file)
    new = load_predictor(model_file, architecture="ours")
    rows = {
        version: predictor.predict([digits.pixels[0]])[0].probabilities
        for version, predictor in (("1", old), ("2", new))
    }
    answers, end = [], time.monotonic() + 240
    while time.monotonic() < end and f"m: serves {model_file}" not in service.log.read_text():
        answers.append(client.post(INFER, json=given))
    answers += [client.post(INFER, json=given) for _ in range(8)]
    assert {answer.status_code for answer in answers} == {200}
    found = [(answer.json()["model_version"], tuple(answer.json()["outputs"][1]["data"])) for answer in answers]
    assert set(found) == set(rows.items())
    assert {version for version, _ in found[-8:]} == {"2"}
    metadata = client.get("/v2/models/m").json()
    assert (metadata["versions"], metadata["parameters"]["digest"]) == (["2"], new.identity.digest)


def test_a_request_that_was_taken_is_answered_at_the_end(service, client, given):
    """The half of it that came before the signal is in a replica."""
    body = json.dumps(given).encode()
    head = f"POST {INFER} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(body)}"
    with socket.create_connection(("127.0.0.1", service.port), timeout=120) as slow:
        slow.sendall(f"{head}\r\n\r\n".encode() + body[:99])
        wait_until(lambda: "in_flight" in client.get("/metrics").text)
        time.sleep(1)
        service.process.send_signal(signal.SIGTERM)
        time.sleep(2)
        slow.sendall(body[99:])
        answer = read_to_end(slow)
    assert answer.startswith(b"HTTP/1.1 200"), answer
    assert service.process.wait(120) == 143
    assert service.log.read_text().splitlines()[-1] == "stopped by SIGTERM"

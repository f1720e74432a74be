"""The service in operation, with TLS and tokens: who may ask and who may change models, what it writes down, how it
renews itself, what it says while its models are started again, and how it ends."""

import http.client
import json
import signal
import ssl
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import psutil
import pytest
from fastapi.testclient import TestClient

from inference.serving.grpc.requests import SERVICE
from inference.serving.http.app import create_app
from inference.serving.settings import ServiceSettings
from tests.inference.conftest import Service, models_of, running_service
from tests.inference.serving.helpers import (
    call,
    infer_message,
    refusal,
    repository_of,
    served,
    wait_until,
    write_certificate,
)
from tests.inference.serving.test_repository import write_checkpoint

ASKING, CHANGING = {"Authorization": "Bearer ask"}, {"Authorization": "Bearer change"}
OFF = "models cannot be loaded and unloaded: the service has no --model-control explicit"
KILLED = "the process of the models was ended by SIGKILL; it is started again"
Code = grpc.StatusCode
ONE = infer_message(np.zeros((1, 28, 28), np.uint8))


@dataclass(frozen=True)
class Guarded:
    """A service, the folder of the run that it watches, what trusts it, and the lines of its access log."""

    service: Service
    folder: Path
    trusted: ssl.SSLContext
    certificate: bytes
    logged: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.service.process.stdout is not None
        self.logged.extend(map(json.loads, self.service.process.stdout))

    def entry(self, request_id: str) -> dict[str, Any]:
        """The line of a request."""
        wait_until(lambda: any(each["request_id"] == request_id for each in self.logged))
        return next(each for each in self.logged if each["request_id"] == request_id)


@pytest.fixture(scope="module")
def guarded(weights, small_models, tmp_path_factory):
    folder = write_certificate(tmp_path_factory.mktemp("guarded"))
    write_checkpoint(folder / "run", weights, 1)
    (folder / "ask").write_text("ask\n")
    (folder / "change").write_text("change")
    text = f'[m]\nurl = "{folder / "run"}@latest"\narchitecture = "ours"\n'
    (folder / "models.toml").write_text(f'{text}[ours]\nurl = "{small_models / "ours/model.pt"}"\nexact = "full"\n')
    models = [f"--models={folder / 'models.toml'}"]
    options = [f"--token={folder / 'ask'}", f"--control-token={folder / 'change'}", "--model-control=explicit"]
    options += [f"--certfile={folder / 'cert.pem'}", f"--keyfile={folder / 'key.pem'}", "--access-log", "--drain=2"]
    options += ["--watch=0.2", "--quiet-time=0.2", "--allow-host=Allowed.example", "--grpc-port=0"]
    with running_service(folder / "service", None, *models, *options, scheme="https") as service:
        trusted = ssl.create_default_context(cafile=str(folder / "cert.pem"))
        yield Guarded(service, folder / "run", trusted, (folder / "cert.pem").read_bytes())


@pytest.fixture(scope="module")
def stranger(guarded):
    """A client without a token."""
    url = f"https://localhost:{guarded.service.port}"
    with httpx.Client(base_url=url, timeout=60, verify=guarded.trusted) as client:
        yield client


@pytest.fixture(scope="module")
def client(guarded):
    url = f"https://localhost:{guarded.service.port}"
    with httpx.Client(base_url=url, timeout=60, verify=guarded.trusted, headers=ASKING) as client:
        yield client


@pytest.fixture(scope="module")
def channel(guarded):
    credentials = grpc.ssl_channel_credentials(guarded.certificate)
    with grpc.secure_channel(f"localhost:{guarded.service.grpc.rpartition(':')[2]}", credentials) as channel:
        yield channel


# --- who may ask


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer other"}, {"Authorization": "ask"}, CHANGING])
@pytest.mark.parametrize("path", ["/v2", "/metrics", "/v2/models/m", "/openapi.json", "/none"])
def test_without_the_token_nothing_is_told(stranger, path, headers):
    answer = stranger.get(path, headers=headers)
    assert (answer.status_code, answer.headers["WWW-Authenticate"]) == (401, "Bearer")


@pytest.mark.parametrize("path", ["/", "/healthz", "/v2/health/live", "/v2/health/ready"])
def test_a_probe_and_the_page_need_no_token(stranger, path):
    assert stranger.get(path).status_code == 200


@pytest.mark.parametrize("origin", [None, "http://evil.example", "null", "", "{own}"])
def test_a_page_of_another_site_may_not_ask(client, origin):
    headers = {} if origin is None else {"Origin": origin.format(own=str(client.base_url).rstrip("/"))}
    status = 200 if origin in (None, "{own}") else 403
    assert client.post("/v2/repository/index", headers=headers).status_code == status


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("evil.example", 403),
        ("127.0.0.1.evil.example", 403),
        ("localhost", 200),
        ("page.localhost", 200),
        ("[::1]:8000", 200),
        ("allowed.example", 200),
    ],
)
def test_a_service_on_loopback_has_no_other_name(client, host, status):
    """A page in a browser can give its own name the address of this machine: its origin is then the host it asks."""
    answer = client.get("/v2", headers={"Host": host, "Origin": f"http://{host}"})
    assert answer.status_code == status
    assert "--allow-host" in answer.text or status == 200


# --- who may change models


@pytest.mark.parametrize("verb", ["load", "unload", "unload%0A", "%75nload"])
@pytest.mark.parametrize("headers", [{}, ASKING, {"Authorization": "change"}, {"Authorization": "Bearer \xff"}])
def test_without_the_control_token_no_model_changes(stranger, client, verb, headers):
    given = {key: value.encode("latin-1") for key, value in headers.items()}
    answer = stranger.post(f"/v2/repository/models/m/{verb}", headers=given)  # type: ignore[arg-type]
    assert (answer.status_code, answer.headers["WWW-Authenticate"]) == (401, "Bearer")
    assert answer.json() == {"error": "the request needs the token of --control-token, as Authorization: Bearer TOKEN"}
    assert client.get("/v2/models/m/versions/1/ready").status_code == 200


def test_the_control_token_changes_models_and_does_nothing_else(stranger, client):
    def states() -> list[str]:
        return [each["state"] for each in client.post("/v2/repository/index").json()]

    def change(verb: str, name: str = "ours") -> int:
        return stranger.post(f"/v2/repository/models/{name}/{verb}", headers=CHANGING).status_code

    assert stranger.post("/v2/repository/index", headers=CHANGING).status_code == 401
    assert states() == ["READY", "READY"]
    assert change("unload") == 200
    assert states() == ["READY", "UNAVAILABLE"]
    assert (change("load", "none"), change("load")) == (404, 200)
    assert "model_repository" in client.get("/v2").json()["extensions"]


def test_grpc_has_the_same_tokens(channel):
    asking, changing = [("authorization", "Bearer ask")], [("authorization", "Bearer change")]
    for verb in ("Unload", "Load"):
        for metadata in ([], asking):
            given = {"model_name": "ours"}
            code, sentence = refusal(channel, f"RepositoryModel{verb}", given, metadata=metadata)
            assert (code, "--control-token" in sentence) == (Code.UNAUTHENTICATED, True)
        assert call(channel, f"RepositoryModel{verb}", given, metadata=changing).model_name == "ours"
    assert call(channel, "ServerReady").ready
    found = refusal(channel, "ServerMetadata", None)
    assert found == (Code.UNAUTHENTICATED, "the request needs the token, as Authorization: Bearer TOKEN")
    for metadata in (changing, [("authorization", "x")]):
        assert refusal(channel, "ModelInfer", ONE, metadata=metadata)[0] is Code.UNAUTHENTICATED
    assert call(channel, "ModelInfer", ONE, metadata=asking).model_name == "m"


def test_by_default_no_model_changes_and_the_index_can_be_read(forms):
    repository = repository_of(forms / "model.pt")
    with served(repository, ServiceSettings()) as channel:
        assert "model_repository" not in call(channel, "ServerMetadata").extensions
        for verb in ("Load", "Unload"):
            found = refusal(channel, f"RepositoryModel{verb}", {"model_name": "m"})
            assert found == (Code.INVALID_ARGUMENT, OFF)
        assert [each.state for each in call(channel, "RepositoryIndex").models] == ["READY"]
    with TestClient(create_app(repository), base_url="http://127.0.0.1") as client:
        assert "model_repository" not in client.get("/v2").json()["extensions"]
        for verb in ("load", "unload"):
            answer = client.post(f"/v2/repository/models/m/{verb}")
            assert (answer.status_code, answer.json()) == (400, {"error": OFF})
        assert [each["state"] for each in client.post("/v2/repository/index").json()] == ["READY"]


# --- ids and the log


@pytest.mark.parametrize(("given", "is_kept"), [("my-id.7", True), ("a b", False), ("x" * 200, False), (None, False)])
def test_a_request_has_an_id(client, given, is_kept):
    answer = client.get("/v2", headers={} if given is None else {"X-Request-Id": given})
    assert (answer.headers["X-Request-Id"] == given) == is_kept
    assert 1 <= len(answer.headers["X-Request-Id"]) <= 128


def test_each_request_is_a_line_of_json(guarded, client, channel):
    client.post("/v2/models/m/infer", content=b"x", headers={"X-Request-Id": "over-http"})
    entry = guarded.entry("over-http")
    assert (entry["method"], entry["path"], entry["status"]) == ("POST", "/v2/models/m/infer", 400)
    assert (entry["model"], entry["bytes_in"], entry["client"]) == ("m", 1, "127.0.0.1")
    assert entry["seconds"] > 0
    metadata = [("authorization", "Bearer ask"), ("x-request-id", "over-grpc")]
    version = call(channel, "ModelInfer", ONE, metadata=metadata).model_version
    entry = guarded.entry("over-grpc")
    assert (entry["path"], entry["status"], entry["model"]) == (f"/{SERVICE}/ModelInfer", "OK", "m")
    assert (entry["method"], entry["client"], entry["version"]) == ("gRPC", "127.0.0.1", version)
    assert entry["bytes_in"] > 784 and entry["bytes_out"] > 48
    assert "Bearer" not in json.dumps(guarded.logged)


# --- renewal and the end: in this order


def test_it_answers_503_until_its_models_are_loaded_again(guarded, client, image_folder):
    """After an end of their process in the middle of a stream."""
    files = {"image": ("a.png", (image_folder / "000.png").read_bytes())}
    before = client.post("/predict?model=m", files=files).json()
    (models,) = models_of(psutil.Process(guarded.service.process.pid))
    asked = {"text_input": "a", "max_tokens": 1_000_000}
    with client.stream("POST", "/v2/models/ours/generate_stream", json=asked) as answer:
        lines = answer.iter_lines()
        assert "text_output" in next(lines)
        models.kill()
        *_, last = filter(None, lines)
    assert json.loads(last.removeprefix("data: ")) == {"error": KILLED}
    statuses, ready = set[int](), set[int]()

    def is_answered() -> bool:
        answer = client.post("/predict?model=m", files=files)
        statuses.add(answer.status_code)
        if answer.status_code == 503:
            assert answer.headers["Retry-After"] == "1"
            ready.add(client.get("/v2/health/ready").status_code)
        return answer.status_code == 200 and answer.json() == before

    wait_until(is_answered)
    assert (statuses, 503 in ready) == ({503, 200}, True)
    wait_until(lambda: client.get("/v2/health/ready").status_code == 200)
    entry = client.post("/v2/repository/index").json()[0]
    assert (entry["version"], entry["state"], entry["reason"]) == ("2", "READY", "")
    assert guarded.service.log.read_text() == f"{KILLED}\n"


def test_a_new_checkpoint_of_the_run_is_served(guarded, client, weights):
    before = client.get("/v2/models/m").json()
    assert before["parameters"]["source"] == "run/step-1"
    write_checkpoint(guarded.folder, weights, 2)
    wait_until(lambda: client.get("/v2/models/m").json()["versions"] == ["3"])
    after = client.get("/v2/models/m").json()
    assert after["parameters"]["source"] == "run/step-2"
    assert after["parameters"]["digest"] != before["parameters"]["digest"]
    assert guarded.service.log.read_text().splitlines()[1:] == [f"m: serves {guarded.folder / 'step-2'}"]


@pytest.mark.extended
def test_it_is_not_ready_while_it_ends(guarded, client, stranger):
    """It goes on for two seconds. A connection is closed with its answer."""
    kept = http.client.HTTPSConnection("localhost", guarded.service.port, timeout=60, context=guarded.trusted)
    kept.request("GET", "/v2/health/live")
    before = kept.getresponse()
    assert (before.status, before.getheader("Connection"), before.read()) == (200, None, b'{"live":true}')
    guarded.service.process.send_signal(signal.SIGTERM)
    wait_until(lambda: stranger.get("/v2/health/ready").status_code == 503)
    connection = kept.sock
    kept.request("GET", "/v2/health/live")
    last = kept.getresponse()
    assert (last.status, last.headers.get_all("Connection"), last.read()) == (200, ["close"], b'{"live":true}')
    assert kept.sock is None and connection is not None
    for refused in (client.get("/v2", headers={"Authorization": "Bearer x"}), client.get("/none")):
        assert refused.headers.get_list("Connection") == ["close"]
    assert client.get("/v2").status_code == 200
    assert guarded.service.process.wait(60) == 143
    assert guarded.service.log.read_text().endswith("stopped by SIGTERM\n")

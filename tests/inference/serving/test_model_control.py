"""Tokens and TLS, over HTTP and gRPC. Loads and unloads are off by default, and may need a token of their own."""

from __future__ import annotations

import json
import signal
import socket
import ssl

import grpc
import httpx
import numpy as np
import pytest

from inference.models.predictor import load_predictor
from inference.serving.grpc.requests import METHODS, SERVICE
from inference.serving.repository import Repository, Source
from inference.serving.settings import Settings
from tests.inference.conftest import running_service
from tests.inference.serving.grpc.test_grpc import a_request, call, refusal, served
from tests.inference.serving.test_operations import LARGE, sent
from tests.inference.serving.test_operations import certificate as certificate
from tests.inference.serving.test_serve import run_serve

ASKING, CHANGING = {"Authorization": "Bearer ask"}, {"Authorization": "Bearer change"}
VERBS = ("load", "unload")
OFF = "models cannot be loaded and unloaded: the service has no --model-control explicit"
Code = grpc.StatusCode
ONE = a_request(np.zeros((1, 28, 28), np.uint8), model="model")


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokens")
    (folder / "ask").write_text("ask")
    (folder / "change").write_text("change")
    return folder


@pytest.fixture(scope="module")
def service(forms, tokens, certificate, tmp_path_factory):
    options = [f"--token={tokens / 'ask'}", f"--control-token={tokens / 'change'}", "--model-control=explicit"]
    options += [f"--certfile={certificate / 'cert.pem'}", f"--keyfile={certificate / 'key.pem'}", "--access-log"]
    folder = tmp_path_factory.mktemp("run")
    with running_service(folder, forms / "model.pt", "--grpc-port=0", *options, scheme="https") as service:
        yield service


@pytest.fixture(scope="module")
def trusted(certificate):
    return ssl.create_default_context(cafile=str(certificate / "cert.pem"))


@pytest.fixture(scope="module")
def client(service, trusted):
    with httpx.Client(base_url=f"https://localhost:{service.port}", verify=trusted, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def channel(service, certificate):
    credentials = grpc.ssl_channel_credentials((certificate / "cert.pem").read_bytes())
    with grpc.secure_channel(f"localhost:{service.grpc.rpartition(':')[2]}", credentials) as channel:
        yield channel


def change(client: httpx.Client, verb: str, headers: dict[str, str], name: str = "model") -> httpx.Response:
    return client.post(f"/v2/repository/models/{name}/{verb}", headers=headers)


@pytest.mark.parametrize("verb", [*VERBS, "unload%0A", "%75nload"])
@pytest.mark.parametrize("headers", [{}, ASKING, {"Authorization": "change"}, {"Authorization": "Bearer \xff"}])
def test_without_the_control_token_no_model_changes(client, verb, headers):
    answer = change(client, verb, {key: value.encode("latin-1") for key, value in headers.items()})  # type: ignore[misc]
    assert (answer.status_code, answer.headers["WWW-Authenticate"]) == (401, "Bearer")
    assert answer.json() == {"error": "the request needs the token of --control-token, as Authorization: Bearer TOKEN"}
    ready = client.get("/v2/models/model/versions/1/ready", headers=ASKING)
    assert ready.status_code == 200


def test_the_control_token_changes_models_and_does_nothing_else(client):
    index = "/v2/repository/index"
    assert client.post(index, headers=CHANGING).status_code == 401
    assert [each["state"] for each in client.post(index, headers=ASKING).json()] == ["READY"]
    assert change(client, "unload", CHANGING).status_code == 200
    assert [each["state"] for each in client.post(index, headers=ASKING).json()] == ["UNAVAILABLE"]
    assert change(client, "load", CHANGING, "none").status_code == 404
    assert change(client, "load", CHANGING).status_code == 200
    assert "model_repository" in client.get("/v2", headers=ASKING).json()["extensions"]


def test_grpc_has_the_same_tokens(channel):
    asking, changing = [("authorization", "Bearer ask")], [("authorization", "Bearer change")]
    for verb in ("Unload", "Load"):
        message = METHODS[f"RepositoryModel{verb}"].request(model_name="model")
        for metadata in ([], asking):
            code, sentence = refusal(channel, f"RepositoryModel{verb}", message, metadata=metadata)
            assert (code, "--control-token" in sentence) == (Code.UNAUTHENTICATED, True)
        assert call(channel, f"RepositoryModel{verb}", message, metadata=changing).model_name == "model"
    assert call(channel, "ServerReady").ready
    found = refusal(channel, "ServerMetadata", None)
    assert found == (Code.UNAUTHENTICATED, "the request needs the token, as Authorization: Bearer TOKEN")
    for metadata in (changing, [("authorization", "x")]):
        assert refusal(channel, "ModelInfer", ONE, metadata=metadata)[0] is Code.UNAUTHENTICATED
    assert call(channel, "ModelInfer", ONE, metadata=asking).model_name == "model"


@pytest.mark.parametrize("size", [700, 10**6])
def test_a_large_head_over_https_is_cut_off(service, trusted, size):
    plain = socket.create_connection(("127.0.0.1", service.port), timeout=60)
    with trusted.wrap_socket(plain, server_hostname="localhost") as connection:
        assert sent(connection, LARGE["one header"], size) == b""


def test_a_call_is_a_line_of_the_log_and_a_signal_is_the_end(service, channel):
    """The last test of this service."""
    metadata = [("authorization", "Bearer ask"), ("x-request-id", "looked-for")]
    version = call(channel, "ModelInfer", ONE, metadata=metadata).model_version
    assert service.process.stdout is not None
    for line in service.process.stdout:
        entry = json.loads(line)
        if entry["request_id"] == "looked-for":
            break
    assert (entry["path"], entry["status"], entry["model"]) == (f"/{SERVICE}/ModelInfer", "OK", "model")
    assert (entry["method"], entry["client"], entry["version"]) == ("gRPC", "127.0.0.1", version)
    assert entry["bytes_in"] > 784 and entry["bytes_out"] > 48
    service.process.send_signal(signal.SIGTERM)
    assert service.process.wait(60) == 143


def test_by_default_no_model_changes_and_the_index_can_be_read(forms):
    from fastapi.testclient import TestClient

    from inference.serving.http.app import create_app

    repository = Repository(
        [Source("m", str(forms / "model.pt"))], lambda source: load_predictor(source.url, name=source.name)
    )
    repository.load_all()
    with served(repository, Settings()) as channel:
        assert "model_repository" not in call(channel, "ServerMetadata").extensions
        for verb in ("Load", "Unload"):
            message = METHODS[f"RepositoryModel{verb}"].request(model_name="m")
            assert refusal(channel, f"RepositoryModel{verb}", message) == (Code.INVALID_ARGUMENT, OFF)
        assert [each.state for each in call(channel, "RepositoryIndex").models] == ["READY"]
    with TestClient(create_app(repository), base_url="http://127.0.0.1") as client:
        assert "model_repository" not in client.get("/v2").json()["extensions"]
        for verb in VERBS:
            answer = client.post(f"/v2/repository/models/m/{verb}")
            assert (answer.status_code, answer.json()) == (400, {"error": OFF})
        assert [each["state"] for each in client.post("/v2/repository/index").json()] == ["READY"]


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        (["--control-token={tokens}/change"], 2, "--control-token needs --model-control explicit"),
        (
            ["--model-control=explicit", "--token={tokens}/ask", "--control-token={tokens}/ask"],
            2,
            "--control-token and --token have the same word",
        ),
        (["--model-control=explicit", "--control-token={tokens}/none"], 3, "--control-token: there is no file"),
        (["--model-control=poll"], 2, "is not one of 'none', 'explicit'"),
    ],
)
def test_options_that_do_not_fit_are_refused(words, code, sentence, tokens, forms):
    done = run_serve(forms / "model.pt", *(word.format(tokens=tokens) for word in words))
    assert (done.returncode, sentence in done.stderr) == (code, True), done.stderr

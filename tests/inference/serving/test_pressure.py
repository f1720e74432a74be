"""A model that is slow or fails, a queue that is full, and clients that leave, over HTTP and gRPC: the service tells
them, and goes on."""

import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from io import BytesIO
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
from PIL import Image

from inference.serving.grpc import server as grpc_server
from inference.serving.grpc.requests import SERVICE
from inference.serving.http.app import create_app
from inference.serving.repository import ModelRepository, NamedSource
from inference.serving.settings import ServiceSettings
from tests.inference.conftest import NO_TLS
from tests.inference.serving.helpers import (
    Loader,
    image_request,
    infer_message,
    listened,
    plain_uvicorn_of,
    read_to_end,
    refusal,
    served,
    wait_until,
)

QUEUE = 3
ONE = np.zeros((1, 28, 28), np.uint8)
FULL = f"{QUEUE} inputs wait for the model, which is the limit; try again"
LATE = "the model did not answer within 0.05 seconds"
FAILED = "the model failed on this request; the log of the service says why"
SETTINGS = ServiceSettings(timeout=20, has_model_control=True)
Code = grpc.StatusCode


def png(side: int) -> bytes:
    file = BytesIO()
    Image.new("L", (side, side), 7).save(file, "png")
    return file.getvalue()


def counted(repository: ModelRepository, name: str, **labels: str) -> float | None:
    return repository.metrics.registry.get_sample_value(name, {"model": "m", "version": "1", **labels})


def num_failed(repository: ModelRepository, reason: str) -> float | None:
    return counted(repository, "nv_inference_request_failure_total", reason=reason)


@pytest.fixture(scope="module")
def loader(predictor):
    return Loader(predictor)


@pytest.fixture
def repository(loader):
    """Its model answers when ``loader.may_answer``; ``loader.has_begun`` says that it was asked."""
    repository = ModelRepository([NamedSource("m", "nowhere")], loader, max_waiting=QUEUE)
    repository.load_all()
    loader.may_answer.clear()
    loader.has_begun.clear()
    yield repository
    loader.may_answer.set()


@contextmanager
def over_http(repository: ModelRepository, settings: ServiceSettings = SETTINGS) -> Iterator[httpx.Client]:
    with (
        plain_uvicorn_of(create_app(repository, settings)) as url,
        httpx.Client(base_url=url, timeout=60, verify=NO_TLS) as client,
    ):
        yield client


@pytest.fixture
def client(repository, loader):
    with over_http(repository) as client:
        yield client
        loader.may_answer.set()


def ask(client: httpx.Client, many: int = 1, **parameters: object) -> httpx.Response:
    request = image_request(np.zeros((many, 28, 28), np.uint8))
    return client.post("/v2/models/m/infer", json={**request, "parameters": parameters})


def test_a_full_queue_sends_the_client_away_and_loses_nobody(client, repository, loader):
    version = repository.get_version("m")
    with ThreadPoolExecutor(QUEUE + 1) as pool:
        first = pool.submit(ask, client)
        wait_until(loader.has_begun.is_set)
        others = [pool.submit(ask, client) for _ in range(QUEUE)]
        wait_until(lambda: version.batcher.num_waiting == QUEUE)
        refused = ask(client)
        with served(repository, SETTINGS) as channel:
            send = channel.unary_unary(f"/{SERVICE}/ModelInfer")
            with pytest.raises(grpc.RpcError) as caught:
                send(infer_message(ONE).SerializeToString(), timeout=60)
        loader.may_answer.set()
        assert {each.result().status_code for each in (first, *others)} == {200}
    assert (refused.status_code, refused.headers["Retry-After"]) == (503, "1")
    assert refused.json() == {"error": FULL}
    assert (caught.value.code(), caught.value.details()) == (Code.UNAVAILABLE, FULL)
    assert dict(caught.value.trailing_metadata())["grpc-retry-pushback-ms"] == "1000"
    assert num_failed(repository, "REJECTED") == 2


def test_a_deadline_is_kept_and_frees_the_queue(client, repository, loader):
    """That of a client, of a call, and that of the settings."""
    version, request = repository.get_version("m"), infer_message(ONE)
    answer = ask(client, timeout=50_000)
    assert (answer.status_code, answer.json()["error"]) == (504, LATE)
    request.parameters["timeout"].int64_param = 50_000
    with served(repository, SETTINGS) as channel:
        assert refusal(channel, "ModelInfer", request) == (Code.DEADLINE_EXCEEDED, LATE)
        assert refusal(channel, "ModelInfer", infer_message(ONE), timeout=0.3)[0] is Code.DEADLINE_EXCEEDED
        wait_until(lambda: version.num_users == 0 and version.batcher.num_waiting == 0)
    with over_http(repository, ServiceSettings(timeout=0.05)) as hasty:
        answer = hasty.post("/predict", files={"image": ("a.png", png(28))})
        assert (answer.status_code, answer.json()["detail"]) == (504, LATE)
        loader.may_answer.set()


def test_what_a_client_that_left_asked_for_is_dropped(client, repository, loader):
    version = repository.get_version("m")
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(ask, client)
        wait_until(loader.has_begun.is_set)
        content = httpx.Request("POST", "http://x", json=image_request(ONE)).content
        with socket.create_connection(("127.0.0.1", client.base_url.port), timeout=60) as leaving:
            head = f"POST /v2/models/m/infer HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
            leaving.sendall(head.encode() + content)
            wait_until(lambda: version.batcher.num_waiting == 1)
        wait_until(lambda: version.batcher.num_waiting == 0)
        wait_until(lambda: num_failed(repository, "CANCELED") == 1)
        with served(repository, SETTINGS) as channel:
            call = channel.unary_unary(f"/{SERVICE}/ModelInfer").future(infer_message(ONE).SerializeToString())
            wait_until(lambda: version.batcher.num_waiting == 1)
            call.cancel()
            wait_until(lambda: version.batcher.num_waiting == 0 and num_failed(repository, "CANCELED") == 2)
        loader.may_answer.set()
        assert first.result().status_code == 200
    assert counted(repository, "nv_inference_count_total") == 1


def test_a_model_that_fails_is_the_services_error_without_a_traceback(client, repository, loader, monkeypatch):
    def fail(items: list[Any]) -> object:
        raise RuntimeError("the path /secret/model is broken")

    monkeypatch.setattr(repository.get_version("m").batcher, "process_batch", fail)
    answer = ask(client)
    assert (answer.status_code, answer.json()) == (500, {"error": FAILED})
    with served(repository, SETTINGS) as channel:
        assert refusal(channel, "ModelInfer", infer_message(ONE)) == (Code.INTERNAL, FAILED)
    assert num_failed(repository, "BACKEND") == 2


def test_a_load_that_fails_names_no_path(client, loader, monkeypatch):
    monkeypatch.setattr(loader, "fails", True)
    answer = client.post("/v2/repository/models/m/load")
    assert answer.status_code == 400
    assert answer.json()["error"] == "the model m cannot be loaded; the log of the service says why"
    loader.may_answer.set()
    assert ask(client).status_code == 200


def test_a_request_that_does_not_come_is_refused(repository):
    def nothing() -> Iterator[bytes]:
        time.sleep(20)
        yield b""

    settings = ServiceSettings(body_seconds=0.3)
    with over_http(repository, settings) as client:
        with socket.create_connection(("127.0.0.1", client.base_url.port), timeout=60) as slow:
            slow.sendall(b"POST /v2/models/m/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{")
            answer = read_to_end(slow)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b'{"error":"the request took too long to arrive"}' in answer
    with served(repository, settings) as channel, pytest.raises(grpc.RpcError) as caught:
        channel.stream_unary(f"/{SERVICE}/ModelInfer")(nothing(), timeout=15)
    late = (Code.DEADLINE_EXCEEDED, "the request took too long to arrive")
    assert (caught.value.code(), caught.value.details()) == late


def test_somebody_who_says_nothing_to_grpc_is_cut_off(repository, monkeypatch):
    monkeypatch.setattr(grpc_server, "HEAD_SECONDS", 0.3)
    with listened(repository, SETTINGS) as address:
        host, _, port = address.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=60) as silent:
            while silent.recv(4096):
                pass

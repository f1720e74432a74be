"""A model that is slow or fails, a queue that is full, and clients that leave: the service tells them, and goes on."""

from __future__ import annotations

import socket
from concurrent.futures import Future, ThreadPoolExecutor
from io import BytesIO

import httpx
import psutil
import pytest
from PIL import Image
from torch import Tensor

from inference.models.predictor import load_predictor
from inference.serving.http.app import create_app
from inference.serving.repository import Repository, Source
from inference.serving.settings import Settings
from tests.inference.conftest import Service
from tests.inference.serving.test_repository import Loader
from tests.inference.serving.test_serve import plain_uvicorn_of, wait_until

QUEUE = 8


@pytest.fixture(scope="module")
def loader(forms):
    return Loader(load_predictor(forms / "model.pt"))


@pytest.fixture
def repository(loader):
    """Its model answers when ``loader.may_answer``; ``loader.has_begun`` says that it was asked."""
    repository = Repository([Source("m", "nowhere")], loader, max_waiting=QUEUE)
    repository.load_all()
    loader.may_answer.clear()
    loader.has_begun.clear()
    yield repository
    loader.may_answer.set()


@pytest.fixture
def url(repository, loader):
    with plain_uvicorn_of(create_app(repository, Settings(timeout=20, has_model_control=True))) as url:
        yield url
        loader.may_answer.set()


def rows(many: int) -> dict[str, object]:
    return {"inputs": [{"name": "image", "shape": [many, 28, 28], "datatype": "UINT8", "data": [0] * 784 * many}]}


def ask(url: str, many: int = 1, **parameters: object) -> httpx.Response:
    return httpx.post(f"{url}/v2/models/m/infer", json={**rows(many), "parameters": parameters}, timeout=60)


def test_a_full_queue_sends_the_client_away_and_loses_nobody(url, repository, loader):
    version = repository.version("m")
    with ThreadPoolExecutor(QUEUE + 1) as pool:
        first = pool.submit(ask, url)
        wait_until(loader.has_begun.is_set)
        others = [pool.submit(ask, url) for _ in range(QUEUE)]
        wait_until(lambda: version.batcher.num_waiting == QUEUE)
        refused = ask(url)
        loader.may_answer.set()
        assert {each.result().status_code for each in (first, *others)} == {200}
    assert (refused.status_code, refused.headers["Retry-After"]) == (503, "1")
    assert refused.json() == {"error": f"{QUEUE} inputs wait for the model, which is the limit; try again"}
    assert version.statistics.failures["REJECTED"] == 1


def test_a_request_of_more_rows_than_may_wait_is_refused(url):
    answer = ask(url, QUEUE + 1)
    assert (answer.status_code, "has 9 rows; a request may have 8" in answer.json()["error"]) == (400, True)


def test_a_deadline_of_the_client_is_kept(url, repository):
    answer = ask(url, timeout=50_000)
    assert (answer.status_code, answer.json()["error"]) == (504, "the model did not answer within 0.05 seconds")
    assert repository.version("m").num_users == 0


def test_what_a_client_that_left_asked_for_is_dropped(url, repository, loader):
    version = repository.version("m")
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(ask, url)
        wait_until(loader.has_begun.is_set)
        content = httpx.Request("POST", url, json=rows(1)).content
        with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=60) as leaving:
            head = f"POST /v2/models/m/infer HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
            leaving.sendall(head.encode() + content)
            wait_until(lambda: version.batcher.num_waiting == 1)
        wait_until(lambda: version.batcher.num_waiting == 0)
        wait_until(lambda: version.statistics.failures["CANCELED"] == 1)
        loader.may_answer.set()
        assert first.result().status_code == 200
    assert version.statistics.inferences == 1


def test_a_model_that_fails_is_the_services_error_without_a_traceback(url, repository, loader, monkeypatch):
    def fail(items: list[Tensor]) -> object:
        raise RuntimeError("the path /secret/model is broken")

    monkeypatch.setattr(repository.version("m").batcher, "work", fail)
    answer = ask(url)
    assert (answer.status_code, answer.json()) == (
        500,
        {"error": "the model failed on this request; the log of the service says why"},
    )
    assert repository.version("m").statistics.failures["BACKEND"] == 1


def test_a_load_that_fails_names_no_path(url, loader):
    loader.fails = True
    try:
        answer = httpx.post(f"{url}/v2/repository/models/m/load", timeout=60)
    finally:
        loader.fails = False
    assert answer.status_code == 400
    assert answer.json()["error"] == "the model m cannot be loaded; the log of the service says why"
    loader.may_answer.set()
    assert ask(url).status_code == 200


def png(side: int) -> bytes:
    file = BytesIO()
    Image.new("L", (side, side), 7).save(file, "png")
    return file.getvalue()


def posted(service: Service, data: bytes) -> httpx.Response:
    return service.http.post("/predict?model=m", files={"image": ("a.png", data)})


def test_images_that_unpack_to_much_neither_stall_others_nor_fill_the_memory(service):
    """A small image is answered while large ones that came before it wait, which it would not be if it had to wait for
    them. How long a large one takes does not matter: they come again until five small ones have overtaken some."""
    small, large, refused = png(100), png(4096), png(7995)
    assert len(large) < 2**17
    with ThreadPoolExecutor(30) as pool:
        expected = posted(service, small).json()
        before, most, overtaking = tree_bytes(service.process.pid), 0, 0
        bombs = [pool.submit(posted, service, refused) for _ in range(10)]
        for _ in range(20):
            slow = [pool.submit(posted, service, large) for _ in range(10)]
            # The request for their number is one too.
            wait_until(lambda slow=slow: num_waiting(slow) < 10 or (in_flight(service) > 10 and not num_waiting(bombs)))
            while num_waiting(slow):
                assert posted(service, small).json() == expected
                overtaking += num_waiting(slow) > 2
                most = max(most, tree_bytes(service.process.pid))
            assert {each.result().status_code for each in slow} == {200}
            if overtaking >= 5:
                break
        assert overtaking >= 5
        # One of 4096 x 4096 in grey, and what its decoder needs; ten at once would be 160 MB.
        assert most - before < 100 * 2**20
        for each in bombs:
            detail = each.result().json()["detail"]
            assert detail == "a.png has 7995x7995 pixels, more than 16777216 in all"


def num_waiting(requests: list[Future[httpx.Response]]) -> int:
    return sum(not each.done() for each in requests)


def in_flight(service: Service) -> float:
    """The requests over HTTP that the service has taken and not answered."""
    lines = service.http.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("ckpt_tools_http_requests_in_flight"))


def tree_bytes(pid: int) -> int:
    process = psutil.Process(pid)
    return sum(each.memory_info().rss for each in (process, *process.children(recursive=True)))

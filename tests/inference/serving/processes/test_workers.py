"""Several processes behind one port are one service: the same answers, the same models, one truth, one end."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import numpy as np
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families
from safetensors.torch import save_file
from torch import Tensor

from inference.models.predictor import load_predictor
from inference.serving.grpc.messages import MESSAGES, SERVICE
from tests.inference.conftest import Service, running_service
from tests.inference.serving.test_serve import (
    BEGINNING,
    END,
    is_listening,
    read_to_end,
    request_head,
    run_serve,
    unread_bytes,
    wait_until,
)
from training.data import LabelledImages

NUM_CONNECTIONS = 24
"""The kernel draws a worker for each: all meet the same one of two once in eight million times."""

BODY = {"inputs": [{"name": "image", "shape": [1, 28, 28], "datatype": "UINT8", "data": [7] * 784}]}


@pytest.fixture(scope="module")
def kinds(weights: dict[str, Tensor], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("kinds")
    kinds = (folder / "one.safetensors", folder / "two.safetensors")
    name = next(name for name in weights if name.endswith("head.bias"))
    save_file(weights, kinds[0])
    save_file({**weights, name: weights[name].flip(0) + 1}, kinds[1])
    return kinds


@pytest.fixture(scope="module")
def digests(kinds: tuple[Path, Path]) -> tuple[str, ...]:
    return tuple(load_predictor(kind).identity.digest for kind in kinds)


@pytest.fixture(scope="module")
def model(kinds: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("served") / "model.safetensors"
    put(file, kinds[0].read_bytes())
    return file


@pytest.fixture(scope="module")
def service(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """The tests of it change it one after another, and the last one ends it."""
    options = ["--workers=2", "--grpc-port=0", "--threads=1"]
    with running_service(tmp_path_factory.mktemp("workers"), None, f"--model=m={model}", *options) as service:
        yield service


def put(file: Path, data: bytes) -> None:
    beside = file.with_suffix(".new")
    beside.write_bytes(data)
    beside.rename(file)


def workers_of(service: Service) -> list[psutil.Process]:
    return psutil.Process(service.process.pid).children()


def everywhere(service: Service, path: str = "/v2/models/m") -> list[httpx.Response]:
    return [httpx.get(f"{service.url}{path}", timeout=60) for _ in range(NUM_CONNECTIONS)]


def seen(service: Service) -> set[tuple[str, str]]:
    """The versions and digests that connections of their own meet."""
    return {(each["versions"][0], each["parameters"]["digest"]) for each in (r.json() for r in everywhere(service))}


def metrics_of(service: Service) -> list[tuple[str, dict[str, str], float]]:
    families = text_string_to_metric_families(httpx.get(f"{service.url}/metrics", timeout=60).text)
    return [(each.name.removesuffix("_total"), each.labels, each.value) for one in families for each in one.samples]


def change(service: Service, verb: str) -> httpx.Response:
    return httpx.post(f"{service.url}/v2/repository/models/m/{verb}", timeout=120)


def test_one_scrape_has_what_all_workers_have_counted(service: Service, digits: LabelledImages, model: Path) -> None:
    answers = [httpx.post(f"{service.url}/v2/models/m/infer", json=BODY, timeout=60) for _ in range(NUM_CONNECTIONS)]
    assert {answer.status_code for answer in answers} == {200}
    expected = load_predictor(model).predict([digits.pixels[0] * 0 + 7])[0].probabilities
    assert {tuple(answer.json()["outputs"][1]["data"]) for answer in answers} == {expected}
    for _ in range(2):
        samples = metrics_of(service)
        counted = {labels["worker"]: value for name, labels, value in samples if name == "nv_inference_request_success"}
        assert counted.keys() == {"0", "1"} and min(counted.values()) > 0
        assert sum(counted.values()) == NUM_CONNECTIONS
    (stats,) = httpx.get(f"{service.url}/v2/models/m/stats").json()["model_stats"]
    assert stats["inference_stats"]["success"]["count"] == stats["inference_count"] == NUM_CONNECTIONS
    resident = {labels["worker"] for name, labels, _ in samples if name == "process_resident_memory_bytes"}
    assert resident == {"0", "1"}


def test_both_workers_serve_grpc(service: Service) -> None:
    request = MESSAGES["ModelInferRequest"](model_name="m", raw_input_contents=[bytes(784)])
    request.inputs.add(name="image", shape=[1, 28, 28], datatype="UINT8")
    found = set()
    for _ in range(NUM_CONNECTIONS):
        with grpc.insecure_channel(service.grpc, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
            infer = channel.unary_unary(f"/{SERVICE}/ModelInfer")
            response = MESSAGES["ModelInferResponse"].FromString(infer(request.SerializeToString(), timeout=60))
            found.add(tuple(np.frombuffer(response.raw_output_contents[1], np.float32)))
    assert len(found) == 1
    samples = metrics_of(service)
    counted = {labels["worker"]: value for name, labels, value in samples if name == "ckpt_tools_grpc_responses"}
    assert counted.keys() == {"0", "1"} and sum(counted.values()) == NUM_CONNECTIONS


def test_a_load_is_answered_when_all_workers_have_the_new_model(
    service: Service, model: Path, kinds: tuple[Path, Path], digests: tuple[str, ...]
) -> None:
    assert seen(service) == {("1", digests[0])}
    put(model, kinds[1].read_bytes())
    assert change(service, "load").status_code == 200
    assert seen(service) == {("2", digests[1])}


def test_a_load_that_fails_changes_no_worker(
    service: Service, model: Path, kinds: tuple[Path, Path], digests: tuple[str, ...]
) -> None:
    put(model, b"damaged")
    answer = change(service, "load")
    assert answer.status_code == 400 and "cannot be loaded" in answer.json()["error"]
    assert seen(service) == {("2", digests[1])}
    for _ in range(NUM_CONNECTIONS):
        (entry,) = httpx.post(f"{service.url}/v2/repository/index").json()
        assert (entry["state"], entry["version"]) == ("READY", "2")
        assert entry["reason"].startswith("the last load failed")
    put(model, kinds[1].read_bytes())


def test_an_unload_reaches_all_workers_and_one_that_is_started_later(
    service: Service, digests: tuple[str, ...]
) -> None:
    assert change(service, "unload").status_code == 200
    assert {answer.status_code for answer in everywhere(service)} == {404}
    replaced(service)
    assert {answer.status_code for answer in everywhere(service)} == {404}
    assert {answer.status_code for answer in everywhere(service, "/v2/health/ready")} == {200}
    assert change(service, "load").status_code == 200
    assert seen(service) == {("3", digests[1])}


def replaced(service: Service) -> int:
    """Kill a worker, and wait until there is another which answers."""
    before = workers_of(service)
    before[0].kill()
    wait_until(lambda: before[0] not in workers_of(service) and len(workers_of(service)) == 2)
    wait_until(lambda: count_of_workers(service) == 2)
    return before[0].pid


def count_of_workers(service: Service) -> int:
    """A connection in the queue of a worker that was killed is reset."""
    try:
        text = httpx.get(f"{service.url}/metrics", timeout=60).text
    except httpx.TransportError:
        return 0
    return text.count("\nprocess_cpu_seconds_total{")


def test_a_worker_that_ends_is_started_again_and_serves_what_the_others_serve(
    service: Service, model: Path, kinds: tuple[Path, Path], digests: tuple[str, ...]
) -> None:
    """Meanwhile the file has other weights, which nobody has asked for yet: all have them, or none."""
    put(model, kinds[0].read_bytes())
    replaced(service)
    assert seen(service) == {("4", digests[0])}
    lines = service.log.read_text().splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("m cannot be loaded: ")
    assert lines[1] == "worker 0: ended by SIGKILL; it is started again"
    assert lines[2] == "worker 0: ended by SIGKILL; it is started again in 1 s" or lines[2].startswith("worker 1: ")


def test_a_signal_to_all_processes_ends_the_service_after_the_requests_in_flight(
    service: Service, image_folder: Path
) -> None:
    """As a terminal or an init system sends it. The last test of this service."""
    body = BEGINNING + (image_folder / "000.png").read_bytes() + END
    halves = [socket.create_connection(("127.0.0.1", service.port), timeout=60) for _ in range(8)]
    for half in halves:
        half.sendall(request_head(f"Content-Length: {len(body)}") + body[:100])
    wait_until(lambda: all(unread_bytes(half) == 0 for half in halves))
    before = service.log.read_text()
    workers = workers_of(service)
    for process in [*workers, service.process]:
        process.send_signal(signal.SIGTERM)
    wait_until(lambda: not is_listening(service.port))
    for half in halves:
        half.sendall(body[100:])
    answers = Counter(read_to_end(half)[:13] for half in halves)
    for half in halves:
        half.close()
    assert answers == {b"HTTP/1.1 200 ": len(halves)}
    assert service.process.wait(60) == 143
    assert service.log.read_text() == f"{before}stopped by SIGTERM\n"
    assert not any(worker.is_running() for worker in workers)


def test_the_workers_end_with_the_service_that_is_killed(forms: Path, tmp_path: Path) -> None:
    with running_service(tmp_path / "killed", forms / "model.pt", "--workers=2", "--threads=1") as service:
        workers = workers_of(service)
        assert len(workers) == 2
        service.process.kill()
        _, alive = psutil.wait_procs(workers, timeout=60)
        assert alive == []
        assert not is_listening(service.port)


@pytest.mark.parametrize(
    ("args", "code", "sentence"),
    [
        (["--workers=0"], 2, "error: --workers is a number from 1, not 0\n"),
        (["--workers=2", "--port=0", "none.pt"], 3, "error: there is no file or folder none.pt\n"),
        (["--workers=2", "--port=0", "--device=tpu9"], 2, "error: --device tpu9 is not a device of torch\n"),
    ],
)
def test_what_stops_the_start_is_one_sentence(args: list[str], code: int, sentence: str, forms: Path) -> None:
    done = run_serve(*args, *([] if "none.pt" in args else [forms / "model.pt"]))
    assert (done.returncode, done.stdout, done.stderr) == (code, "", sentence)


LOOP = """
import os, sys
from ckpt_tools.errors import CkptError
from inference import supervisor
from inference.serving.processes.messages import Begin, Loaded, Serving

supervisor.MAX_RESTARTS = 2
reading, writing = os.pipe()


def announce():
    print("serving")
    os.write(writing, b"all may end")


def work(number, pipe, others, wanted):
    pipe.send(Loaded(("digest",)))
    assert pipe.recv() == Begin((1,))
    pipe.send(Serving())
    if number:
        pipe.recv()
    os.read(reading, 1)
    os._exit(9)


try:
    supervisor.Supervisor(work, 2, ["m"], drain=0, announce=announce, tell=print).run()
except CkptError as error:
    print(error)
"""


def test_workers_that_end_again_and_again_end_the_service() -> None:
    done = subprocess.run([sys.executable, "-c", LOOP], capture_output=True, text=True, check=False, timeout=120)
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        "serving",
        "worker 0: ended with code 9; it is started again",
        "worker 0: ended with code 9; it is started again in 1 s",
        "workers ended 3 times within 60 seconds, at last worker 0: ended with code 9; the service ends",
    ]

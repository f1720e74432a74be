"""The service under 64 clients, beside other servers of the same model and beside a loop that calls it on batches.

Each server runs the whole time and is asked in turn, for some seconds, an image at a time. The loop calls the model on
batches that are ready, as large as the service's, with as many threads. Processor time is of the server alone, with
its processes; on a busy machine it says more than the rate does.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.demo_model import BATCH, SIDE
from benchmarks.load import request, written
from benchmarks.machine import ROOT
from benchmarks.servers import SERVERS
from benchmarks.turns import take_turns

JSON, BINARY, LOOP = "ours, JSON", "ours, binary", "bare loop"
NUM_CLIENTS, NUM_IMAGES = 64, 64
START_SECONDS = 300.0
INFER = "/v2/models/model/infer"


@dataclass(frozen=True, slots=True)
class Turn:
    """Some seconds under load. ``resident_bytes`` are proportional shares of all processes of the server."""

    rate: float
    p50: float
    p99: float
    cpu_per_answer: float
    resident_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Server:
    """A running server, and the file of its requests."""

    port: int
    process: subprocess.Popen[bytes]
    requests: Path

    def turn(self, seconds: float) -> Turn:
        before = _cpu_seconds(self.process.pid)
        words = [str(self.port), str(self.requests), str(NUM_CLIENTS), str(seconds)]
        command = [sys.executable, "-m", "benchmarks.load", *words]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{self.requests.name}: {done.stderr.strip().splitlines()[-1]}")
        used, found = _cpu_seconds(self.process.pid) - before, json.loads(done.stdout)
        if len(set(found["answers"].values())) < 2:
            raise SystemExit("a server gives the same answer to every image")
        resident = sum(each.memory_full_info().pss for each in _tree(self.process.pid))
        rate = len(found["seconds"]) / (found["ended"] - found["began"])
        return Turn(rate, *_percentiles(found["seconds"]), used / found["asked"], resident)


def _percentiles(seconds: Sequence[float]) -> tuple[float, float]:
    """The 50th and the 99th."""
    ordered = sorted(seconds)
    return ordered[len(ordered) // 2], ordered[int(0.99 * len(ordered))]


def _tree(pid: int) -> list[Any]:
    import psutil

    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def _cpu_seconds(pid: int) -> float:
    return sum(sum(each.cpu_times()[:2]) for each in _tree(pid))


def images() -> Any:
    import numpy as np

    return np.random.default_rng(0).integers(0, 256, (NUM_IMAGES, SIDE * SIDE), np.uint8)


IMAGE = {"name": "image", "shape": [1, SIDE, SIDE], "datatype": "UINT8"}


def as_json(image: Any) -> bytes:
    return _json_request(INFER, {"inputs": [IMAGE | {"data": image.tolist()}]})


def as_binary(image: Any) -> bytes:
    given = IMAGE | {"parameters": {"binary_data_size": SIDE**2}}
    head = json.dumps({"inputs": [given], "parameters": {"binary_data_output": True}}).encode()
    length = {"Inference-Header-Content-Length": str(len(head))}
    return request(INFER, head + image.tobytes(), "application/octet-stream", **length)


def for_peers(image: Any) -> bytes:
    return _json_request("/predict", {"image": image.tolist()})


def for_bentoml(image: Any) -> bytes:
    """Its clients send batches, even if they are of one image."""
    return _json_request("/predict", {"image": [image.tolist()]})


def _json_request(path: str, content: object) -> bytes:
    return request(path, json.dumps(content).encode(), "application/json")


def missing() -> list[str]:
    """Peers that are not installed."""
    return [who for who in SERVERS if find_spec(who.lower()) is None]


@contextmanager
def _running(command: Sequence[str], port: int, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=output, stderr=output, env=os.environ | {"PYTHONPATH": str(ROOT)}
        )
    try:
        deadline = time.monotonic() + START_SECONDS
        while not _is_open(port):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"{command[1:4]} does not start: {log.read_text()[-300:]}")
            time.sleep(0.2)
        yield process
    finally:
        for each in reversed(_tree(process.pid)):
            each.kill()
        process.wait()


def _is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


def take_turns_serving(folder: Path, rounds: int, seconds: float, threads: int) -> dict[str, list[Turn]]:
    """``folder`` has ``model.safetensors``. The first round fills caches and does not count."""
    ways = {JSON: as_json, BINARY: as_binary, **dict.fromkeys(SERVERS, for_peers), "BentoML": for_bentoml}
    files = {who: written([make(each) for each in images()], folder / who) for who, make in ways.items()}
    model = str(folder / "model.safetensors")
    with ExitStack() as stack:

        def start(name: str, command: Sequence[str], port: int) -> subprocess.Popen[bytes]:
            return stack.enter_context(_running([sys.executable, "-m", *command], port, folder / f"{name}.log"))

        port = _free_port()
        options = ["--model", f"model={model}", "--port", str(port), "--threads", str(threads)]
        ours = start("ours", ["inference.serving", *options], port)
        running = {JSON: Server(port, ours, files[JSON]), BINARY: Server(port, ours, files[BINARY])}
        for who in SERVERS.keys() - set(missing()):
            port = _free_port()
            process = start(who, ["benchmarks.servers", who, model, str(port), str(threads)], port)
            running[who] = Server(port, process, files[who])
        asked: dict[str, Loop | Server] = {LOOP: Loop(model, threads), **running}
        return take_turns({who: partial(each.turn, seconds) for who, each in asked.items()}, rounds)


class Loop:
    """Calls the model on one batch, repeatedly."""

    def __init__(self, model: str, threads: int) -> None:
        import torch

        from inference.models.predictor import load_predictor
        from training.data import datasets as data
        from training.loop import evaluation

        torch.set_num_threads(threads)
        task: Any = load_predictor(model).task
        self.forward = evaluation.plain_logits(task.model)
        self.batch = data.to_input(torch.from_numpy(images()[:BATCH]).view(-1, SIDE, SIDE))

    def turn(self, seconds: float) -> Turn:
        taken: list[float] = []
        began, used = time.perf_counter(), time.process_time()
        while (now := time.perf_counter()) < began + seconds:
            self.forward(self.batch)
            taken.append(time.perf_counter() - now)
        wall, used, many = time.perf_counter() - began, time.process_time() - used, BATCH * len(taken)
        return Turn(many / wall, *_percentiles(taken), used / many)

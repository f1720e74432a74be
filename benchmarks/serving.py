"""The service under clients, beside other servers of the same model and beside a loop that calls it on batches.

Each server runs the whole time and is asked in turn, for some seconds, an image at a time. The clients are those of
`wrk`, which has to be installed (Debian's package of that name): a client written in Python takes more of a processor
than the service that it asks. The loop calls the model on batches that are ready, as large as the service's, with as
many threads. Processor time is of the server alone, with its processes; on a busy machine it says more than the rate
does.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from benchmarks.demo_model import BATCH, SIDE
from benchmarks.machine import ROOT
from benchmarks.servers import SERVERS
from benchmarks.turns import take_turns

JSON, BINARY, PNG, LOOP, ROW = "ours, JSON", "ours, binary", "ours, PNG", "bare loop", "bare loop, one row"
EIGHT, ONE = "ours, JSON, 8 clients", "ours, JSON, 1 client"
NUM_CLIENTS, NUM_IMAGES = 64, 64
WARM_UP_SECONDS = 1.0
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
class Requests:
    """Requests that clients send in turn."""

    path: str
    bodies: Sequence[bytes]
    headers: Mapping[str, str] = field(default_factory=dict)

    def script(self) -> str:
        """Them as a script of wrk."""
        bodies = ",".join('"' + "".join(f"\\{byte:03d}" for byte in body) + '"' for body in self.bodies)
        lines = [f"local bodies, n = {{{bodies}}}, 0", 'wrk.method = "POST"']
        lines += [f"wrk.headers[{json.dumps(name)}] = {json.dumps(value)}" for name, value in self.headers.items()]
        return "\n".join(
            [
                *lines,
                f'request = function() n = n % #bodies + 1 return wrk.format(nil, "{self.path}", nil, bodies[n]) end',
            ]
        )

    def answer(self, port: int, number: int) -> bytes:
        url = f"http://127.0.0.1:{port}{self.path}"
        with urlopen(Request(url, self.bodies[number], dict(self.headers)), timeout=60) as answer:
            found: bytes = answer.read()
        return found


@dataclass(frozen=True, slots=True)
class Server:
    """A running server, and what clients ask it."""

    port: int
    process: subprocess.Popen[bytes]
    requests: Requests
    script: Path
    num_clients: int = NUM_CLIENTS

    def check(self) -> None:
        """Raises SystemExit if it gives the same answer to every image."""
        if len({self.requests.answer(self.port, number) for number in range(8)}) < 2:
            raise SystemExit("a server gives the same answer to every image")

    def turn(self, seconds: float) -> Turn:
        self._load(WARM_UP_SECONDS)
        before = _cpu_seconds(self.process.pid)
        found = self._load(seconds)
        used = _cpu_seconds(self.process.pid) - before
        resident = sum(each.memory_full_info().pss for each in _tree(self.process.pid))
        return Turn(found.rate, found.p50, found.p99, used / found.many, resident)

    def _load(self, seconds: float) -> Loaded:
        url = f"http://127.0.0.1:{self.port}"
        duration = f"-d{max(1, round(seconds))}s"
        command = [
            "wrk",
            "-t1",
            f"-c{self.num_clients}",
            duration,
            "--timeout=60s",
            "--latency",
            "-s",
            str(self.script),
        ]
        done = subprocess.run([*command, url], capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"wrk failed: {done.stderr.strip()}")
        return Loaded.of(done.stdout)


@dataclass(frozen=True, slots=True)
class Loaded:
    """The result of a run of wrk. Durations in seconds."""

    many: int
    rate: float
    p50: float
    p99: float

    @classmethod
    def of(cls, said: str) -> Loaded:
        """Raises SystemExit if an answer was not a success, or none came."""
        if trouble := re.search(r"(Non-2xx|Socket errors).*", said):
            raise SystemExit(f"not every request was answered: {trouble[0]}")
        many, rate = re.search(r"(\d+) requests in", said), re.search(r"Requests/sec:\s*([\d.]+)", said)
        if many is None or rate is None or not int(many[1]):
            raise SystemExit(f"wrk counted no request: {said[:200]}")
        p50, p99 = (_seconds(said, part) for part in ("50%", "99%"))
        return cls(int(many[1]), float(rate[1]), p50, p99)


UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0}


def _seconds(said: str, part: str) -> float:
    found = re.search(rf"{part}\s+([\d.]+)(us|ms|s|m)\b", said)
    if found is None:
        raise SystemExit(f"wrk does not say the {part} of its latencies")
    return float(found[1]) * UNITS[found[2]]


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
    return json.dumps({"inputs": [IMAGE | {"data": image.tolist()}]}).encode()


BINARY_HEAD = json.dumps(
    {"inputs": [IMAGE | {"parameters": {"binary_data_size": SIDE**2}}], "parameters": {"binary_data_output": True}}
).encode()


def as_form(image: Any) -> bytes:
    from PIL import Image

    file = BytesIO()
    Image.fromarray(image.reshape(SIDE, SIDE)).save(file, "png")
    head = b'--X\r\nContent-Disposition: form-data; name="image"; filename="a.png"\r\nContent-Type: image/png\r\n\r\n'
    return head + file.getvalue() + b"\r\n--X--\r\n"


def requests_of() -> dict[str, Requests]:
    """The requests of each contestant."""
    given, json_type = images(), {"Content-Type": "application/json"}
    binary_type = {"Content-Type": "application/octet-stream", "Inference-Header-Content-Length": str(len(BINARY_HEAD))}
    form_type = {"Content-Type": "multipart/form-data; boundary=X"}
    # BentoML's clients send batches, even if they are of one image.
    for_peers = [(who, [image.tolist()] if who == "BentoML" else image.tolist()) for who in SERVERS for image in given]
    peers = {
        who: Requests(
            "/predict", [json.dumps({"image": image}).encode() for name, image in for_peers if name == who], json_type
        )
        for who in SERVERS
    }
    return {
        JSON: Requests(INFER, [as_json(each) for each in given], json_type),
        BINARY: Requests(INFER, [BINARY_HEAD + each.tobytes() for each in given], binary_type),
        PNG: Requests("/predict", [as_form(each) for each in given], form_type),
        **peers,
    }


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
    if shutil.which("wrk") is None:
        raise SystemExit("the service is measured with wrk, which is not installed")
    ways, scripts = requests_of(), dict[str, Path]()
    for number, (who, requests) in enumerate(ways.items()):
        scripts[who] = folder / f"{number}.lua"
        scripts[who].write_text(requests.script())
    model = str(folder / "model.safetensors")
    with ExitStack() as stack:

        def start(name: str, command: Sequence[str], port: int) -> subprocess.Popen[bytes]:
            return stack.enter_context(_running([sys.executable, "-m", *command], port, folder / f"{name}.log"))

        port = _free_port()
        options = ["--model", f"model={model}", "--port", str(port), "--threads", str(threads)]
        ours = start("ours", ["inference.serving", *options], port)
        running = {who: Server(port, ours, ways[who], scripts[who]) for who in (JSON, BINARY, PNG)}
        running |= {who: Server(port, ours, ways[JSON], scripts[JSON], many) for who, many in ((EIGHT, 8), (ONE, 1))}
        for who in SERVERS.keys() - set(missing()):
            port = _free_port()
            process = start(who, ["benchmarks.servers", who, model, str(port), str(threads)], port)
            running[who] = Server(port, process, ways[who], scripts[who])
        for each in running.values():
            each.check()
        loops = {LOOP: Loop(model, threads, BATCH), ROW: Loop(model, threads, 1)}
        turns = {who: partial(each.turn, seconds) for who, each in loops.items()}
        return take_turns(turns | {who: partial(each.turn, seconds) for who, each in running.items()}, rounds)


class Loop:
    """Calls the model on one batch of ``size`` images, repeatedly."""

    def __init__(self, model: str, threads: int, size: int) -> None:
        import torch

        from inference.models.predictor import load_predictor
        from training.data import datasets as data
        from training.loop import evaluation

        torch.set_num_threads(threads)
        task: Any = load_predictor(model).task
        self.forward = evaluation.plain_logits(task.model)
        self.batch = data.to_input(torch.from_numpy(images()[:size]).view(-1, SIDE, SIDE))

    def turn(self, seconds: float) -> Turn:
        taken: list[float] = []
        began, used = time.perf_counter(), time.process_time()
        while (now := time.perf_counter()) < began + seconds:
            self.forward(self.batch)
            taken.append(time.perf_counter() - now)
        wall, used, many = time.perf_counter() - began, time.process_time() - used, len(self.batch) * len(taken)
        ordered = sorted(taken)
        p50, p99 = ordered[len(ordered) // 2], ordered[int(0.99 * len(ordered))]
        return Turn(many / wall, p50, p99, used / many)

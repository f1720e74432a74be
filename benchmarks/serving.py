"""The service under 64, 8 and 1 clients, beside LitServe, a FastAPI endpoint and a loop, all with the model of
`make demo`.

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
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from io import BytesIO
from pathlib import Path
from statistics import median
from typing import Any
from urllib.request import Request, urlopen

import numpy as np
import psutil
import torch
from PIL import Image
from safetensors.torch import save_file
from urllib3 import encode_multipart_formdata

from benchmarks.demo_model import BATCH, SIDE
from benchmarks.machine import ROOT
from benchmarks.measure import MeasureError, process_tree, proportional_bytes
from benchmarks.servers import SERVERS
from benchmarks.suite import Settings
from benchmarks.turns import markdown, ratio, take_turns
from fixtures.launch import free_port
from inference.models.predictor import load_predictor
from tests.support.running import start, wait_until
from training.data import datasets as data
from training.loop import evaluation
from training.models.image_models import build_model

JSON, BINARY, PNG, LOOP, ROW = "ours, JSON", "ours, binary", "ours, PNG", "bare loop", "bare loop, one row"
EIGHT, ONE = "ours, JSON, 8 clients", "ours, JSON, 1 client"
NUM_CLIENTS, NUM_IMAGES = 64, 64
WARM_UP_SECONDS = 1.0
START_SECONDS = 300.0
INFER = "/v2/models/model/infer"
TURN_SECONDS = 8.0

SERVE_TO_PEER = 1.5
"""Least ratio of the service's answers a second to those of each peer."""

SERVE_TO_LOOP = {JSON: 0.85, BINARY: 0.85, PNG: 0.6}
"""Least ratios of answers a second to those of the loop, under 64 clients."""

EIGHT_TO_ONE = 3.0
"""Least ratio of answers a second to those that one client gets."""

ONE_TIMES, ONE_MORE_SECONDS = 2.0, 0.003
"""One client waits at most so many times as long as the loop takes for one row, and so many seconds more."""

MORE_BYTES_THAN_LITSERVE = 100_000_000


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
        asked = f'wrk.format(nil, "{self.path}", nil, bodies[n])'
        return "\n".join([*lines, f"request = function() n = n % #bodies + 1 return {asked} end"])

    def answer(self, port: int, number: int) -> bytes:
        url = f"http://127.0.0.1:{port}{self.path}"
        with urlopen(Request(url, self.bodies[number], dict(self.headers)), timeout=60) as answer:
            found: bytes = answer.read()
        return found


@dataclass(frozen=True, slots=True)
class Server:
    """A running server, and what clients ask it."""

    port: int
    process: subprocess.Popen[str]
    requests: Requests
    script: Path
    num_clients: int = NUM_CLIENTS

    def check(self) -> None:
        """Raises MeasureError if it gives the same answer to every image."""
        if len({self.requests.answer(self.port, number) for number in range(8)}) < 2:
            raise MeasureError("a server gives the same answer to every image")

    def turn(self, seconds: float) -> Turn:
        self._load(WARM_UP_SECONDS)
        before = _cpu_seconds(self.process.pid)
        found = self._load(seconds)
        used = _cpu_seconds(self.process.pid) - before
        resident = sum(map(proportional_bytes, process_tree(self.process.pid)))
        return Turn(found.rate, found.p50, found.p99, used / found.many, resident)

    def _load(self, seconds: float) -> Loaded:
        options = ["-t1", f"-c{self.num_clients}", f"-d{max(1, round(seconds))}s", "--timeout=60s", "--latency"]
        command = ["wrk", *options, "-s", str(self.script), f"http://127.0.0.1:{self.port}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise MeasureError(f"wrk failed: {done.stderr.strip()}")
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
        """Raises MeasureError if an answer was not a success, or none came."""
        if trouble := re.search(r"(Non-2xx|Socket errors).*", said):
            raise MeasureError(f"not every request was answered: {trouble[0]}")
        many, rate = re.search(r"(\d+) requests in", said), re.search(r"Requests/sec:\s*([\d.]+)", said)
        if many is None or rate is None or not int(many[1]):
            raise MeasureError(f"wrk counted no request: {said[:200]}")
        p50, p99 = (_seconds(said, part) for part in ("50%", "99%"))
        return cls(int(many[1]), float(rate[1]), p50, p99)


UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0}


def _seconds(said: str, part: str) -> float:
    found = re.search(rf"{part}\s+([\d.]+)(us|ms|s|m)\b", said)
    if found is None:
        raise MeasureError(f"wrk does not say the {part} of its latencies")
    return float(found[1]) * UNITS[found[2]]


def _cpu_seconds(pid: int) -> float:
    return sum(sum(psutil.Process(each).cpu_times()[:2]) for each in process_tree(pid))


def images() -> Any:
    return np.random.default_rng(0).integers(0, 256, (NUM_IMAGES, SIDE * SIDE), np.uint8)


IMAGE = {"name": "image", "shape": [1, SIDE, SIDE], "datatype": "UINT8"}


def as_json(image: Any) -> bytes:
    return json.dumps({"inputs": [IMAGE | {"data": image.tolist()}]}).encode()


BINARY_HEAD = json.dumps(
    {"inputs": [IMAGE | {"parameters": {"binary_data_size": SIDE**2}}], "parameters": {"binary_data_output": True}}
).encode()


def as_form(image: Any) -> bytes:
    file = BytesIO()
    Image.fromarray(image.reshape(SIDE, SIDE)).save(file, "png")
    return bytes(encode_multipart_formdata({"image": ("a.png", file.getvalue(), "image/png")}, boundary="X")[0])


def make_requests() -> dict[str, Requests]:
    """The requests of each contestant."""
    given, json_type = images(), {"Content-Type": "application/json"}
    binary_type = {"Content-Type": "application/octet-stream", "Inference-Header-Content-Length": str(len(BINARY_HEAD))}
    form_type = {"Content-Type": "multipart/form-data; boundary=X"}
    for_peers = Requests("/predict", [json.dumps({"image": image.tolist()}).encode() for image in given], json_type)
    return {
        JSON: Requests(INFER, [as_json(each) for each in given], json_type),
        BINARY: Requests(INFER, [BINARY_HEAD + each.tobytes() for each in given], binary_type),
        PNG: Requests("/predict", [as_form(each) for each in given], form_type),
        **dict.fromkeys(SERVERS, for_peers),
    }


@contextmanager
def _running(module: str, words: Sequence[str], port: int, log: Path) -> Iterator[subprocess.Popen[str]]:
    with log.open("wb") as output:
        running = start(*words, module=module, cwd=ROOT, stdout=output, stderr=output)
    try:
        wait_until(lambda: _is_open(port) or running.process.poll() is not None, START_SECONDS)
        if running.process.poll() is not None:
            raise MeasureError(f"{module} does not start: {log.read_text()[-300:]}")
        yield running.process
    finally:
        running.end()


def _is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def measure_service(settings: Settings) -> list[str]:
    """All use one thread fewer than there are processors, the service's default."""
    with tempfile.TemporaryDirectory() as name:
        torch.manual_seed(0)
        model = build_model()
        # torchvision begins with a head of zeros, which tells no image from another.
        torch.nn.init.normal_(model.heads[0].weight)
        save_file(model.state_dict(), Path(name) / "model.safetensors")
        threads = max(1, (os.cpu_count() or 1) - 1)
        return rows(take_turns_serving(Path(name), settings.runs, TURN_SECONDS, threads))


def take_turns_serving(folder: Path, rounds: int, seconds: float, threads: int) -> dict[str, list[Turn]]:
    """``folder`` has ``model.safetensors``. The first round fills caches and does not count."""
    if shutil.which("wrk") is None:
        raise MeasureError("the service is measured with wrk, which is not installed")
    ways, scripts = make_requests(), dict[str, Path]()
    for number, (who, requests) in enumerate(ways.items()):
        scripts[who] = folder / f"{number}.lua"
        scripts[who].write_text(requests.script())
    model = str(folder / "model.safetensors")
    with ExitStack() as stack:
        port = free_port()
        options = ["--model", f"model={model}", "--port", str(port), "--threads", str(threads)]
        ours = stack.enter_context(_running("inference.serving", options, port, folder / "ours.log"))
        running = {who: Server(port, ours, ways[who], scripts[who]) for who in (JSON, BINARY, PNG)}
        running |= {who: Server(port, ours, ways[JSON], scripts[JSON], many) for who, many in ((EIGHT, 8), (ONE, 1))}
        for who in SERVERS:
            port = free_port()
            words = [who, model, str(port), str(threads)]
            process = stack.enter_context(_running("benchmarks.servers", words, port, folder / f"{who}.log"))
            running[who] = Server(port, process, ways[who], scripts[who])
        for each in running.values():
            each.check()
        loops = {LOOP: Loop(model, threads, BATCH), ROW: Loop(model, threads, 1)}
        turns = {who: partial(each.turn, seconds) for who, each in loops.items()}
        return take_turns(turns | {who: partial(each.turn, seconds) for who, each in running.items()}, rounds)


class Loop:
    """Calls the model on one batch of ``size`` images, repeatedly."""

    def __init__(self, model: str, threads: int, size: int) -> None:
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


def rows(found: Mapping[str, Sequence[Turn]]) -> list[str]:
    """Each server, and then the promises."""
    header = f"{NUM_CLIENTS} clients | answers a second | p50 | p99 | processor | memory"
    servers = markdown(header, (_server_row(who, taken) for who, taken in found.items()))
    return [*servers, "", *markdown("promise | measured | promised", _promises(found))]


def _server_row(who: str, taken: Sequence[Turn]) -> list[str]:
    p50, p99 = (f"{1000 * median(getattr(each, name) for each in taken):.1f} ms" for name in ("p50", "p99"))
    cpu = f"{1000 * median(each.cpu_per_answer for each in taken):.2f} ms"
    memory = _memory(taken)
    shown = f"{memory / 1e6:.0f} MB" if memory else ""
    return [who, f"{median(each.rate for each in taken):.0f}", p50, p99, cpu, shown]


def _memory(taken: Sequence[Turn]) -> int:
    return max(each.resident_bytes for each in taken)


def _promises(found: Mapping[str, Sequence[Turn]]) -> Iterator[list[str]]:
    rates = [(who, LOOP, least) for who, least in SERVE_TO_LOOP.items()]
    rates += [(JSON, who, SERVE_TO_PEER) for who in SERVERS if who in found]
    for above, below, least in (*rates, (EIGHT, ONE, EIGHT_TO_ONE)):
        yield [f"{above} / {below}", f"{ratio('rate', found[above], found[below]):.2f}", f"at least {least:g}"]
    row, one = (median(each.p50 for each in found[who]) for who in (ROW, ONE))
    most = ONE_TIMES * row + ONE_MORE_SECONDS
    yield [f"p50 of {ONE}", f"{1000 * one:.1f} ms", f"at most {1000 * most:.1f} ms"]
    if "LitServe" in found:
        more = _memory(found[JSON]) - _memory(found["LitServe"])
        yield ["memory above LitServe's", f"{more / 1e6:.0f} MB", f"at most {MORE_BYTES_THAN_LITSERVE / 1e6:.0f} MB"]

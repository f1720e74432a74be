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

from benchmarks.measure import ROOT, MeasureError, process_tree, proportional_bytes
from benchmarks.runner import RunSettings
from benchmarks.servers import BATCH, SERVERS, SIDE
from benchmarks.turns import compute_ratio, make_table, take_turns
from fixtures.launch import free_port
from inference.models.predictor import load_predictor
from tests.support.running import start, wait_until
from training.data import datasets as data
from training.loop import evaluation
from training.models.image_models import build_model

JSON, BINARY, PNG, LOOP, ONE_ROW_LOOP = "ours, JSON", "ours, binary", "ours, PNG", "bare loop", "bare loop, one row"
EIGHT_CLIENTS, ONE_CLIENT = "ours, JSON, 8 clients", "ours, JSON, 1 client"
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
class LoadTurn:
    """Some seconds under load. Durations in seconds; ``resident_bytes`` are proportional shares of all processes of the
    server."""

    rate: float
    p50: float
    p99: float
    cpu_per_answer: float
    resident_bytes: int = 0


WRK_SUMMARY = """
function done(summary, latency)
  local e = summary.errors
  local errors = e.connect + e.read + e.write + e.status + e.timeout
  print(string.format('{"answers": %d, "errors": %d, "seconds": %f, "p50": %f, "p99": %f}', summary.requests, errors,
    summary.duration / 1e6, latency:percentile(50) / 1e6, latency:percentile(99) / 1e6))
end
"""
"""What wrk prints at the end, as the last line."""


@dataclass(frozen=True, slots=True)
class RequestSet:
    """Requests that clients send in turn."""

    path: str
    bodies: Sequence[bytes]
    headers: Mapping[str, str] = field(default_factory=dict)

    def build_script(self) -> str:
        """Them as a script of wrk."""
        bodies = ",".join('"' + "".join(f"\\{byte:03d}" for byte in body) + '"' for body in self.bodies)
        lines = [f"local bodies, n = {{{bodies}}}, 0", 'wrk.method = "POST"']
        lines += [f"wrk.headers[{json.dumps(name)}] = {json.dumps(value)}" for name, value in self.headers.items()]
        request = f'wrk.format(nil, "{self.path}", nil, bodies[n])'
        return "\n".join([*lines, f"request = function() n = n % #bodies + 1 return {request} end", WRK_SUMMARY])

    def fetch_answer(self, port: int, number: int) -> bytes:
        url = f"http://127.0.0.1:{port}{self.path}"
        with urlopen(Request(url, self.bodies[number], dict(self.headers)), timeout=60) as response:
            answer: bytes = response.read()
        return answer


@dataclass(frozen=True, slots=True)
class MeasuredServer:
    """A running server, and what clients ask it."""

    port: int
    process: subprocess.Popen[str]
    requests: RequestSet
    num_clients: int = NUM_CLIENTS

    def check_answers_differ(self) -> None:
        """Raises MeasureError if it gives the same answer to every image."""
        if len({self.requests.fetch_answer(self.port, number) for number in range(8)}) < 2:
            raise MeasureError("a server gives the same answer to every image")

    def take_turn(self, seconds: float) -> LoadTurn:
        self._run_wrk(WARM_UP_SECONDS)
        before = _cpu_seconds(self.process.pid)
        load = self._run_wrk(seconds)
        used = _cpu_seconds(self.process.pid) - before
        resident = sum(map(proportional_bytes, process_tree(self.process.pid)))
        answers = load["answers"]
        return LoadTurn(answers / load["seconds"], load["p50"], load["p99"], used / answers, resident)

    def _run_wrk(self, seconds: float) -> dict[str, float]:
        """Raises MeasureError if an answer was not a success, or none came."""
        options = ["-t1", f"-c{self.num_clients}", f"-d{max(1, round(seconds))}s", "--timeout=60s"]
        with tempfile.NamedTemporaryFile("w", suffix=".lua") as script:
            script.write(self.requests.build_script())
            script.flush()
            command = ["wrk", *options, "-s", script.name, f"http://127.0.0.1:{self.port}"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise MeasureError(f"wrk failed: {done.stderr.strip()}")
        load: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
        if load["errors"] or not load["answers"]:
            raise MeasureError(f"not every request was answered: {done.stdout.strip()}")
        return load


def _cpu_seconds(pid: int) -> float:
    return sum(sum(psutil.Process(each).cpu_times()[:2]) for each in process_tree(pid))


def make_images() -> Any:
    return np.random.default_rng(0).integers(0, 256, (NUM_IMAGES, SIDE * SIDE), np.uint8)


IMAGE = {"name": "image", "shape": [1, SIDE, SIDE], "datatype": "UINT8"}


def encode_json(image: Any) -> bytes:
    return json.dumps({"inputs": [IMAGE | {"data": image.tolist()}]}).encode()


BINARY_HEAD = json.dumps(
    {"inputs": [IMAGE | {"parameters": {"binary_data_size": SIDE**2}}], "parameters": {"binary_data_output": True}}
).encode()


def encode_form(image: Any) -> bytes:
    file = BytesIO()
    Image.fromarray(image.reshape(SIDE, SIDE)).save(file, "png")
    return bytes(encode_multipart_formdata({"image": ("a.png", file.getvalue(), "image/png")}, boundary="X")[0])


def make_requests() -> dict[str, RequestSet]:
    """The requests of each contestant."""
    images, json_type = make_images(), {"Content-Type": "application/json"}
    binary_type = {"Content-Type": "application/octet-stream", "Inference-Header-Content-Length": str(len(BINARY_HEAD))}
    form_type = {"Content-Type": "multipart/form-data; boundary=X"}
    for_peers = RequestSet("/predict", [json.dumps({"image": image.tolist()}).encode() for image in images], json_type)
    return {
        JSON: RequestSet(INFER, [encode_json(each) for each in images], json_type),
        BINARY: RequestSet(INFER, [BINARY_HEAD + each.tobytes() for each in images], binary_type),
        PNG: RequestSet("/predict", [encode_form(each) for each in images], form_type),
        **dict.fromkeys(SERVERS, for_peers),
    }


@contextmanager
def _run_server(module: str, words: Sequence[str], port: int, log: Path) -> Iterator[subprocess.Popen[str]]:
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


def measure_service(name: str, settings: RunSettings) -> list[str]:
    """All use one thread fewer than there are processors, the service's default."""
    with tempfile.TemporaryDirectory() as temporary:
        torch.manual_seed(0)
        model = build_model()
        # torchvision begins with a head of zeros, which tells no image from another.
        torch.nn.init.normal_(model.heads[0].weight)
        save_file(model.state_dict(), Path(temporary) / "model.safetensors")
        threads = max(1, (os.cpu_count() or 1) - 1)
        return make_tables(take_turns_serving(Path(temporary), settings.runs, TURN_SECONDS, threads))


def take_turns_serving(folder: Path, rounds: int, seconds: float, threads: int) -> dict[str, list[LoadTurn]]:
    """``folder`` has ``model.safetensors``. The first round fills caches and does not count."""
    if shutil.which("wrk") is None:
        raise MeasureError("the service is measured with wrk, which is not installed")
    requests, model = make_requests(), str(folder / "model.safetensors")
    with ExitStack() as stack:
        port = free_port()
        options = ["--model", f"model={model}", "--port", str(port), "--threads", str(threads)]
        ours = stack.enter_context(_run_server("inference.serving", options, port, folder / "ours.log"))
        servers = {who: MeasuredServer(port, ours, requests[who]) for who in (JSON, BINARY, PNG)}
        clients = {EIGHT_CLIENTS: 8, ONE_CLIENT: 1}
        servers |= {who: MeasuredServer(port, ours, requests[JSON], many) for who, many in clients.items()}
        for who in SERVERS:
            port = free_port()
            words = [who, model, str(port), str(threads)]
            process = stack.enter_context(_run_server("benchmarks.servers", words, port, folder / f"{who}.log"))
            servers[who] = MeasuredServer(port, process, requests[who])
        for server in servers.values():
            server.check_answers_differ()
        loops = {LOOP: BareLoop(model, threads, BATCH), ONE_ROW_LOOP: BareLoop(model, threads, 1)}
        contestants: dict[str, BareLoop | MeasuredServer] = {**loops, **servers}
        return take_turns({who: partial(each.take_turn, seconds) for who, each in contestants.items()}, rounds)


class BareLoop:
    """Calls the model on one batch of ``size`` images, repeatedly."""

    def __init__(self, model: str, threads: int, size: int) -> None:
        torch.set_num_threads(threads)
        task: Any = load_predictor(model).task
        self.forward = evaluation.plain_logits(task.model)
        self.batch = data.to_input(torch.from_numpy(make_images()[:size]).view(-1, SIDE, SIDE))

    def take_turn(self, seconds: float) -> LoadTurn:
        taken: list[float] = []
        began, used = time.perf_counter(), time.process_time()
        while (now := time.perf_counter()) < began + seconds:
            self.forward(self.batch)
            taken.append(time.perf_counter() - now)
        wall, used, many = time.perf_counter() - began, time.process_time() - used, len(self.batch) * len(taken)
        ordered = sorted(taken)
        p50, p99 = ordered[len(ordered) // 2], ordered[int(0.99 * len(ordered))]
        return LoadTurn(many / wall, p50, p99, used / many)


def make_tables(turns: Mapping[str, Sequence[LoadTurn]]) -> list[str]:
    """Each server, and then the promises."""
    header = f"{NUM_CLIENTS} clients | answers a second | p50 | p99 | processor | memory"
    servers = make_table(header, (_server_cells(who, taken) for who, taken in turns.items()))
    return [*servers, "", *make_table("promise | measured | promised", _list_promises(turns))]


def _server_cells(who: str, taken: Sequence[LoadTurn]) -> list[str]:
    p50, p99 = (f"{1000 * median(getattr(each, name) for each in taken):.1f} ms" for name in ("p50", "p99"))
    cpu = f"{1000 * median(each.cpu_per_answer for each in taken):.2f} ms"
    memory = _get_peak_memory(taken)
    shown = f"{memory / 1e6:.0f} MB" if memory else ""
    return [who, f"{median(each.rate for each in taken):.0f}", p50, p99, cpu, shown]


def _get_peak_memory(taken: Sequence[LoadTurn]) -> int:
    return max(each.resident_bytes for each in taken)


def _list_promises(turns: Mapping[str, Sequence[LoadTurn]]) -> Iterator[list[str]]:
    rates = [(who, LOOP, least) for who, least in SERVE_TO_LOOP.items()]
    rates += [(JSON, who, SERVE_TO_PEER) for who in SERVERS if who in turns]
    for above, below, least in (*rates, (EIGHT_CLIENTS, ONE_CLIENT, EIGHT_TO_ONE)):
        yield [f"{above} / {below}", f"{compute_ratio('rate', turns[above], turns[below]):.2f}", f"at least {least:g}"]
    row, one = (median(each.p50 for each in turns[who]) for who in (ONE_ROW_LOOP, ONE_CLIENT))
    most = ONE_TIMES * row + ONE_MORE_SECONDS
    yield [f"p50 of {ONE_CLIENT}", f"{1000 * one:.1f} ms", f"at most {1000 * most:.1f} ms"]
    if "LitServe" in turns:
        more = _get_peak_memory(turns[JSON]) - _get_peak_memory(turns["LitServe"])
        yield ["memory above LitServe's", f"{more / 1e6:.0f} MB", f"at most {MORE_BYTES_THAN_LITSERVE / 1e6:.0f} MB"]

"""Many clients, models that change, and everything that goes wrong at once: each answer is right or says why not.

Some seconds of it; a minute with ``--soak``.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import grpc
import httpx
import numpy as np
import psutil
import pytest
from safetensors.torch import save_file
from torch import Tensor

from inference.models.predictor import load_predictor
from inference.serving.grpc.requests import MESSAGES, SERVICE
from tests.inference.conftest import Service, running_service
from training.data.datasets import Samples

pytestmark = pytest.mark.extended

NUM_CLIENTS = 64
NUM_IMAGES = 40
BAD = 0.05
VANISHING = 0.02
SLOW = 0.02

BUSY_HTTP, BUSY_GRPC = 503, grpc.StatusCode.UNAVAILABLE
GROWTH_BYTES = 96 * 2**20
"""That a process may grow by after its first second: what torch and the allocators keep of two models at a time."""

Rows = list[tuple[float, ...]]


@dataclass(frozen=True, slots=True)
class Models:
    """Two checkpoints that answer differently; ``file`` is now the one and now the other."""

    file: Path
    kinds: tuple[Path, Path]
    truths: tuple[Rows, Rows]

    def put(self, which: int) -> None:
        beside = self.file.with_suffix(".new")
        beside.write_bytes(self.kinds[which].read_bytes())
        beside.rename(self.file)

    def has(self, places: list[int], found: Rows) -> bool:
        """Whether all rows are the answers of one and the same model."""
        return any([truth[place] for place in places] == found for truth in self.truths)


@dataclass(slots=True)
class Seen:
    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def models(weights, digits, tmp_path_factory):
    folder = tmp_path_factory.mktemp("storm")
    kinds = (folder / "one.safetensors", folder / "two.safetensors")
    name = next(name for name in weights if name.endswith("head.bias"))
    save_file(weights, kinds[0])
    save_file({**weights, name: weights[name].flip(0) + 1}, kinds[1])
    answers = [load_predictor(kind).predict(list(digits.pixels[:NUM_IMAGES])) for kind in kinds]
    one, two = [[answer.probabilities or () for answer in each] for each in answers]
    assert one != two
    models = Models(folder / "model.safetensors", kinds, (one, two))
    models.put(0)
    return models


@pytest.fixture
def service(models, tmp_path):
    options = ["--architecture=ours", "--grpc-port=0", "--model-control=explicit"]
    with running_service(tmp_path / "run", None, f"--model=m={models.file}", *options) as service:
        yield service


class Client:
    """Asks for some rows at a time, in a way that it draws."""

    def __init__(self, number: int, service: Service, models: Models, pixels: Tensor, seen: Seen) -> None:
        self.draw, self.service, self.models, self.seen = random.Random(number), service, models, seen
        self.pixels = pixels.numpy()

    async def run(self, http: httpx.AsyncClient, calls: grpc.aio.Channel, until: Callable[[], bool]) -> None:
        infer = calls.unary_unary(f"/{SERVICE}/ModelInfer")
        while not until():
            chance = self.draw.random()
            if chance < BAD:
                await self.ask_wrongly(http)
            elif chance < BAD + VANISHING:
                await self.vanish()
            elif chance < BAD + VANISHING + SLOW:
                await self.ask_slowly(http)
            else:
                ask: Callable[[list[int]], Awaitable[Rows | None]] = self.draw.choice(
                    [lambda at: self.over_json(http, at), lambda at: self.over_grpc(infer, at)]
                )
                await self.ask(ask)

    async def ask(self, ask: Callable[[list[int]], Awaitable[Rows | None]]) -> None:
        places = [self.draw.randrange(NUM_IMAGES) for _ in range(self.draw.randint(1, 3))]
        found = await ask(places)
        if found is not None:
            self.seen.outcomes["answered"] += 1
            if not self.models.has(places, found):
                self.seen.wrong.append(f"rows {places}: {found}")

    def body(self, places: list[int]) -> bytes:
        given = {"name": "image", "shape": [len(places), 28, 28], "datatype": "UINT8"}
        return json.dumps({"inputs": [{**given, "data": self.pixels[places].reshape(-1).tolist()}]}).encode()

    async def over_json(self, http: httpx.AsyncClient, places: list[int], content: object = None) -> Rows | None:
        answer = await http.post("/v2/models/m/infer", content=content or self.body(places))  # type: ignore[arg-type]
        if answer.status_code == BUSY_HTTP:
            self.seen.outcomes["busy"] += 1
            return None
        if answer.status_code != 200:
            self.seen.wrong.append(f"{answer.status_code}: {answer.text}")
            return None
        flat = answer.json()["outputs"][1]["data"]
        return [tuple(flat[at : at + 10]) for at in range(0, len(flat), 10)]

    async def over_grpc(self, infer: Callable[..., Awaitable[bytes]], places: list[int]) -> Rows | None:
        request = MESSAGES["ModelInferRequest"](model_name="m", raw_input_contents=[self.pixels[places].tobytes()])
        request.inputs.add(name="image", shape=[len(places), 28, 28], datatype="UINT8")
        try:
            response = MESSAGES["ModelInferResponse"].FromString(await infer(request.SerializeToString(), timeout=120))
        except grpc.aio.AioRpcError as error:
            self.seen.outcomes["busy"] += error.code() is BUSY_GRPC
            if error.code() is not BUSY_GRPC:
                self.seen.wrong.append(str(error))
            return None
        found = np.frombuffer(response.raw_output_contents[1], np.float32).reshape(-1, 10)
        return [tuple(map(float, row)) for row in found]

    async def ask_wrongly(self, http: httpx.AsyncClient) -> None:
        content = self.draw.choice([b"", b"{", self.body([1])[:-9], b'{"inputs": []}', b"\xff" * 99])
        answer = await http.post("/v2/models/m/infer", content=content)
        self.seen.outcomes["refused"] += answer.status_code == 400
        if answer.status_code != 400 or set(answer.json()) != {"error"}:
            self.seen.wrong.append(f"{content[:20]!r} got {answer.status_code}: {answer.text}")

    async def ask_slowly(self, http: httpx.AsyncClient) -> None:
        async def slowly(body: bytes) -> object:
            for at in range(0, len(body), 1 + len(body) // 4):
                yield body[at : at + 1 + len(body) // 4]
                await asyncio.sleep(0.1)

        await self.ask(lambda places: self.over_json(http, places, slowly(self.body(places))))

    async def vanish(self) -> None:
        """Behind a whole request, or in the middle of it."""
        body = self.body([0, 1])
        _, writer = await asyncio.open_connection("127.0.0.1", self.service.port)
        head = f"POST /v2/models/m/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        writer.write(head + body[: self.draw.choice([99, len(body)])])
        await writer.drain()
        writer.close()
        self.seen.outcomes["vanished"] += 1


async def storm(service: Service, models: Models, digits: Samples, seconds: float, every: float) -> Seen:
    seen, end = Seen(), time.monotonic() + seconds
    clients = [Client(number, service, models, digits.pixels, seen) for number in range(NUM_CLIENTS)]
    limits = httpx.Limits(max_connections=NUM_CLIENTS)
    async with (
        httpx.AsyncClient(base_url=service.url, timeout=120, limits=limits) as http,
        grpc.aio.insecure_channel(service.grpc) as calls,
    ):

        async def reload() -> None:
            for which in chain.from_iterable([(1, 0)] * 10**6):
                await asyncio.sleep(every)
                if time.monotonic() >= end:
                    return
                models.put(which)
                answer = await http.post("/v2/repository/models/m/load")
                seen.outcomes["reloaded"] += answer.status_code == 200

        await asyncio.gather(reload(), *(each.run(http, calls, lambda: time.monotonic() >= end) for each in clients))
    return seen


def test_no_answer_is_wrong_and_memory_stays(service, models, digits, pytestconfig):
    seconds, every = (60.0, 5.0) if pytestconfig.getoption("--soak") else (5.0, 1.0)
    process = psutil.Process(service.process.pid)
    asyncio.run(storm(service, models, digits, 2, 0.5))
    before = process.memory_info().rss
    seen = asyncio.run(storm(service, models, digits, seconds, every))
    assert seen.wrong == []
    assert min(seen.outcomes[each] for each in ("answered", "refused", "vanished", "reloaded")) > 0
    assert process.memory_info().rss - before < GROWTH_BYTES
    metrics = httpx.get(f"{service.url}/metrics").text
    assert 'responses_total{code="500"}' not in metrics
    service.process.send_signal(signal.SIGTERM)
    assert service.process.wait(60) == 143
    assert service.log.read_text() == "stopped by SIGTERM\n"

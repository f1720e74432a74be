"""Many clients while everything goes wrong at once, and while checkpoints are replaced in each way that people copy
files: each answer is of weights that were saved whole, or says why not.

Some seconds of it; a minute with ``--soak``.
"""

import asyncio
import itertools
import json
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import psutil
import pytest

import ckpt_tools
from inference.models.predictor import load_predictor
from inference.serving.grpc.requests import MESSAGES, SERVICE
from tests.inference.conftest import Service, running_service, write_sharded
from tests.inference.serving.helpers import image_request, infer_message

pytestmark = pytest.mark.extended

NUM_CLIENTS = 64
NUM_IMAGES = 40
BAD = 0.05
BUSY_HTTP, BUSY_GRPC = 503, grpc.StatusCode.UNAVAILABLE
GROWTH_BYTES = 96 * 2**20
"""That a process may grow by after its first second: what torch and the allocators keep of two models at a time."""

QUIET_SECONDS = 2.0
BETWEEN_SECONDS = 0.7  # between the files of a copy in place: long enough to load a checkpoint of two halves
PAUSE_SECONDS = 0.05  # between the pieces of a copy; far less than the quiet time, also on a machine that is busy
NUM_PIECES = 3
CATCHING_UP_SECONDS = 60.0
FORMATS = ("safetensors", "dcp")
LOADED = "safetensors"
"""The model that the storm has loaded by requests; its folder is exchanged at once."""

Rows = list[tuple[float, ...]]


# --- ways to replace a checkpoint


def copied_slowly(source: Path, target: Path) -> None:
    """The file grows piece by piece."""
    data = source.read_bytes()
    with target.open("wb") as file:
        for piece in range(NUM_PIECES):
            file.write(data[len(data) * piece // NUM_PIECES : len(data) * (piece + 1) // NUM_PIECES])
            file.flush()
            time.sleep(PAUSE_SECONDS)


def in_place(source: Path, folder: Path) -> None:
    """``cp -rp``: each file is written over the old one, with the times of the source; the marker of a DCP is first."""
    for file in sorted(source.iterdir()):
        copied_slowly(file, folder / file.name)
        shutil.copystat(file, folder / file.name)
        time.sleep(BETWEEN_SECONDS)


def renamed(source: Path, folder: Path) -> None:
    """``rsync``: each file is written beside the old one, and renamed over it."""
    for file in sorted(source.iterdir()):
        copied_slowly(file, folder / f".{file.name}.Qx7")
        (folder / f".{file.name}.Qx7").rename(folder / file.name)


def uploaded(source: Path, folder: Path) -> None:
    """A fresh upload: the old files are removed, and the new ones come in any order."""
    for file in folder.iterdir():
        file.unlink()
    for file in random.Random(len(str(folder))).sample(sorted(source.iterdir()), len(list(source.iterdir()))):
        copied_slowly(file, folder / file.name)


def exchanged(source: Path, folder: Path) -> None:
    """A whole folder is renamed; for a moment there is none."""
    shutil.copytree(source, folder.with_name(f"new-{folder.name}"))
    folder.rename(folder.with_name(f"old-{folder.name}"))
    folder.with_name(f"new-{folder.name}").rename(folder)
    shutil.rmtree(folder.with_name(f"old-{folder.name}"))


ROUNDS = ((in_place, uploaded), (renamed, in_place))  # of both formats at once


@dataclass(frozen=True, slots=True)
class Saved:
    """Two checkpoints in each format, what they answer, and the folders that hold now the one and now the other."""

    root: Path
    digests: tuple[str, ...]
    truths: tuple[Rows, ...]

    def folder(self, model: str) -> Path:
        return self.root / "served" / model

    def replace(self, model: str, which: int, way: Callable[[Path, Path], None]) -> None:
        way(self.root / str(which) / model, self.folder(model))


@pytest.fixture
def saved(weights, digits, tmp_path):
    """The second differs in every tensor."""
    predictors = []
    for which, kind in enumerate((weights, {name: tensor * 0.9 + 0.01 for name, tensor in weights.items()})):
        folder = tmp_path / str(which)
        folder.mkdir()
        write_sharded(folder / "safetensors", kind)
        ckpt_tools.convert(folder / "safetensors", folder / "dcp", to="dcp", world_size=2)
        predictors.append(load_predictor(folder / "dcp"))
    for model in FORMATS:
        shutil.copytree(tmp_path / "0" / model, tmp_path / "served" / model)
    images = list(digits.pixels[:NUM_IMAGES])
    truths = tuple([each.probabilities or () for each in predictor.predict(images)] for predictor in predictors)
    assert all(one != two for one, two in zip(*truths, strict=True))
    return Saved(tmp_path, tuple(each.identity.digest for each in predictors), truths)


@pytest.fixture
def service(saved, tmp_path):
    options = [f"--model={model}={saved.folder(model)}" for model in FORMATS]
    options += ["--architecture=ours", "--grpc-port=0", "--model-control=explicit", "--watch=0.1"]
    with running_service(tmp_path / "run", None, *options, f"--quiet-time={QUIET_SECONDS}") as service:
        yield service


# --- clients


@dataclass(slots=True)
class Seen:
    """What clients saw: how many answers there were, by checkpoint, and each that should not have been."""

    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Clients:
    """Ask the service of a test, in ways that they draw, until ``ended``."""

    service: Service
    saved: Saved
    pixels: np.ndarray[Any, Any]
    http: httpx.AsyncClient
    calls: grpc.aio.Channel
    is_stormy: bool
    seen: Seen = field(default_factory=Seen)
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    async def ask(self, number: int) -> None:
        draw = random.Random(number)
        while not self.ended.is_set():
            chance = draw.random() if self.is_stormy else 1
            model = LOADED if self.is_stormy else draw.choice(FORMATS)
            places = [draw.randrange(NUM_IMAGES) for _ in range(draw.randint(1, 3))]
            if chance < BAD:
                await self.ask_wrongly(draw)
            else:
                way = draw.choice([self.over_json, self.over_grpc])
                await self.judge(model, places, await way(model, places))

    async def judge(self, model: str, places: list[int], found: Rows | None) -> None:
        """All rows have to be the answers of one and the same checkpoint."""
        if found is not None:
            which = [number for number, truth in enumerate(self.saved.truths) if [truth[at] for at in places] == found]
            self.seen.outcomes[f"{model} {which}"] += 1
            if not which:
                self.seen.wrong.append(f"rows {places} of {model}: {found}")

    def body(self, places: list[int]) -> bytes:
        return json.dumps(image_request(self.pixels[places])).encode()

    async def over_json(self, model: str, places: list[int]) -> Rows | None:
        answer = await self.http.post(f"/v2/models/{model}/infer", content=self.body(places))
        if answer.status_code == BUSY_HTTP:
            self.seen.outcomes["busy"] += 1
            return None
        if answer.status_code != 200:
            self.seen.wrong.append(f"{answer.status_code}: {answer.text}")
            return None
        flat = answer.json()["outputs"][1]["data"]
        return [tuple(flat[at : at + 10]) for at in range(0, len(flat), 10)]

    async def over_grpc(self, model: str, places: list[int]) -> Rows | None:
        request = infer_message(self.pixels[places], model=model).SerializeToString()
        infer = self.calls.unary_unary(f"/{SERVICE}/ModelInfer")
        try:
            response = MESSAGES["ModelInferResponse"].FromString(await infer(request, timeout=120))
        except grpc.aio.AioRpcError as error:
            self.seen.outcomes["busy"] += error.code() is BUSY_GRPC
            if error.code() is not BUSY_GRPC:
                self.seen.wrong.append(str(error))
            return None
        found = np.frombuffer(response.raw_output_contents[1], np.float32).reshape(-1, 10)
        return [tuple(map(float, row)) for row in found]

    async def ask_wrongly(self, draw: random.Random) -> None:
        content = draw.choice([b"", b"{", self.body([1])[:-9], b'{"inputs": []}', b"\xff" * 99])
        answer = await self.http.post(f"/v2/models/{LOADED}/infer", content=content)
        self.seen.outcomes["refused"] += answer.status_code == 400
        if answer.status_code != 400 or set(answer.json()) != {"error"}:
            self.seen.wrong.append(f"{content[:20]!r} got {answer.status_code}: {answer.text}")

    async def look(self) -> None:
        """The metadata says whose answers these are."""
        while not self.ended.is_set():
            for model in FORMATS:
                answer = await self.http.get(f"/v2/models/{model}")
                if answer.status_code == BUSY_HTTP:
                    self.seen.outcomes["busy"] += 1
                elif answer.status_code != 200 or answer.json()["parameters"]["digest"] not in self.saved.digests:
                    self.seen.wrong.append(f"{model} is described by {answer.text}")
            await asyncio.sleep(0.05)

    async def catch_up(self, model: str, which: int) -> None:
        """Wait until the service serves that checkpoint."""
        end = time.monotonic() + CATCHING_UP_SECONDS
        while time.monotonic() < end:
            answer = await self.http.get(f"/v2/models/{model}")
            if answer.status_code == 200 and answer.json()["parameters"]["digest"] == self.saved.digests[which]:
                self.seen.outcomes["caught up"] += 1
                return
            await asyncio.sleep(0.05)
        self.seen.wrong.append(f"{model} does not serve checkpoint {which} in {CATCHING_UP_SECONDS:g} seconds")


@pytest.fixture
def seen_while(service, saved, digits):
    """What clients see while the service is disturbed."""

    async def run(disturb: Callable[[Clients], Awaitable[None]], clients: int, is_stormy: bool) -> Seen:
        # The service closes a connection that is idle for 5 seconds, which a busy machine may take between requests.
        limits = httpx.Limits(max_connections=clients, keepalive_expiry=1)
        async with (
            httpx.AsyncClient(base_url=service.url, timeout=120, limits=limits) as http,
            grpc.aio.insecure_channel(service.grpc) as calls,
        ):
            asking = Clients(service, saved, digits.pixels[:NUM_IMAGES].numpy(), http, calls, is_stormy)
            waiting = asyncio.gather(asking.look(), *map(asking.ask, range(clients)))
            try:
                await disturb(asking)
            finally:
                asking.ended.set()
                await waiting
        assert asking.seen.wrong == []
        return asking.seen

    return lambda *args: asyncio.run(run(*args))


def test_every_answer_is_of_weights_that_were_saved(service, saved, seen_while, pytestconfig):
    """First checkpoints are replaced, which the service watches; then there is a storm, and memory stays."""

    async def replace_each_way(asking: Clients) -> None:
        for ways, which in zip(ROUNDS, (1, 0), strict=True):
            pairs = zip(FORMATS, ways, strict=True)
            await asyncio.gather(*(asyncio.to_thread(saved.replace, model, which, way) for model, way in pairs))
            await asyncio.gather(*(asking.catch_up(model, which) for model in FORMATS))

    seen = seen_while(replace_each_way, 8, False)
    assert seen.outcomes.keys() == {"caught up", *(f"{model} [{which}]" for model in FORMATS for which in (0, 1))}
    assert seen.outcomes["caught up"] == len(ROUNDS) * len(FORMATS)

    def reloading(seconds: float, every: float) -> Callable[[Clients], Awaitable[None]]:
        async def reload(asking: Clients) -> None:
            end = time.monotonic() + seconds
            for which in itertools.cycle((1, 0)):
                await asyncio.sleep(every)
                if time.monotonic() >= end and asking.seen.outcomes["reloaded"] >= 2:
                    return
                await asyncio.to_thread(saved.replace, LOADED, which, exchanged)
                answer = await asking.http.post(f"/v2/repository/models/{LOADED}/load")
                asking.seen.outcomes["reloaded"] += answer.status_code == 200

        return reload

    process = psutil.Process(service.process.pid)
    seen_while(reloading(2, 0.5), NUM_CLIENTS, True)
    before = process.memory_info().rss
    storm = reloading(60, 5) if pytestconfig.getoption("--soak") else reloading(4, 0.8)
    seen = seen_while(storm, NUM_CLIENTS, True)
    answered = [f"{LOADED} [{which}]" for which in (0, 1)]
    assert min(seen.outcomes[each] for each in (*answered, "refused", "reloaded")) > 0
    assert process.memory_info().rss - before < GROWTH_BYTES
    assert 'responses_total{code="500"}' not in httpx.get(f"{service.url}/metrics").text
    service.process.send_signal(signal.SIGTERM)
    assert service.process.wait(60) == 143
    assert service.log.read_text().endswith("stopped by SIGTERM\n")

"""Checkpoints are replaced again and again under a service that is asked all the time, in each way that people copy
files: every answer is of weights that were saved whole.

Some seconds of it; a minute with ``--soak``, where the process of the models is killed too.
"""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
import pytest

import ckpt_tools
from inference.models.predictor import load_predictor
from tests.inference.conftest import Service, running_service, write_sharded
from training.data.datasets import Samples

pytestmark = pytest.mark.extended

QUIET_SECONDS = 2.0
BETWEEN_SECONDS = 0.7  # between the files of a copy in place: long enough to load a checkpoint of two halves
PAUSE_SECONDS = 0.05  # between the pieces of a copy; far less than the quiet time, also on a machine that is busy
NUM_PIECES = 3
NUM_IMAGES = 10
NUM_CLIENTS = 8
CATCHING_UP_SECONDS = 60.0
FORMATS = ("safetensors", "dcp")

Rows = list[tuple[float, ...]]


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


WAYS = (in_place, renamed, uploaded, exchanged)
ROUNDS = ((in_place, uploaded), (renamed, in_place))  # of both formats at once


@dataclass(frozen=True, slots=True)
class Saved:
    """Two checkpoints in each format, what they answer, and the folders that hold now the one and now the other."""

    root: Path
    digests: tuple[str, str]
    truths: tuple[Rows, Rows]

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
    one, two = ([each.probabilities or () for each in predictor.predict(images)] for predictor in predictors)
    assert all(a != b for a, b in zip(one, two, strict=True))
    return Saved(tmp_path, (predictors[0].identity.digest, predictors[1].identity.digest), (one, two))


@pytest.fixture
def service(saved, tmp_path):
    options = [f"--model={model}={saved.folder(model)}" for model in FORMATS]
    options += ["--watch=0.1", f"--quiet-time={QUIET_SECONDS}"]
    with running_service(tmp_path / "run", None, *options) as service:
        yield service


@dataclass(slots=True)
class Seen:
    """What clients saw: how many answers there were, by checkpoint, and each that should not have been."""

    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Clients:
    """Ask the service of a test until ``ended``. ``refusals`` are statuses that are no fault now."""

    http: httpx.AsyncClient
    saved: Saved
    pixels: list[list[int]]
    seen: Seen
    ended: asyncio.Event
    refusals: frozenset[int]

    async def ask(self, number: int) -> None:
        draw = random.Random(number)
        while not self.ended.is_set():
            place, model = draw.randrange(NUM_IMAGES), draw.choice(FORMATS)
            given = {"name": "image", "shape": [1, 28, 28], "datatype": "UINT8", "data": self.pixels[place]}
            try:
                answer = await self.http.post(f"/v2/models/{model}/infer", json={"inputs": [given]})
            except httpx.HTTPError as error:
                self.seen.wrong.append(f"no answer: {error!r}")
                return
            if answer.status_code != 200:
                self._refused(answer)
                continue
            row = tuple(answer.json()["outputs"][1]["data"])
            which = [number for number, truth in enumerate(self.saved.truths) if truth[place] == row]
            self.seen.outcomes[f"{model} {which}"] += 1
            if not which:
                self.seen.wrong.append(f"image {place}, version {answer.json()['model_version']} of {model}: {row}")

    async def look(self) -> None:
        """The metadata says whose answers these are."""
        while not self.ended.is_set():
            for model in FORMATS:
                answer = await self.http.get(f"/v2/models/{model}")
                if answer.status_code != 200:
                    self._refused(answer)
                elif (digest := answer.json()["parameters"]["digest"]) not in self.saved.digests:
                    self.seen.wrong.append(f"{model} has {digest}, which was never saved")
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

    def _refused(self, answer: httpx.Response) -> None:
        self.seen.outcomes[str(answer.status_code)] += 1
        if answer.status_code not in self.refusals:
            self.seen.wrong.append(f"{answer.status_code}: {answer.text}")


async def asked_while(
    service: Service,
    saved: Saved,
    digits: Samples,
    disturb: Callable[[Clients], Awaitable[None]],
    *,
    clients: int,
    refusals: frozenset[int] = frozenset(),
) -> Seen:
    """What clients see while ``disturb`` runs."""
    pixels = [image.flatten().tolist() for image in digits.pixels[:NUM_IMAGES]]
    async with httpx.AsyncClient(base_url=service.url, timeout=120) as http:
        asking = Clients(http, saved, pixels, Seen(), asyncio.Event(), refusals)
        waiting = asyncio.gather(asking.look(), *map(asking.ask, range(clients)))
        try:
            await disturb(asking)
        finally:
            asking.ended.set()
            await waiting
    return asking.seen


def test_every_answer_is_of_weights_that_were_saved(service, saved, digits):
    async def replace_each_way(asking: Clients) -> None:
        for ways, which in zip(ROUNDS, (1, 0), strict=True):
            pairs = zip(FORMATS, ways, strict=True)
            await asyncio.gather(*(asyncio.to_thread(saved.replace, model, which, way) for model, way in pairs))
            await asyncio.gather(*(asking.catch_up(model, which) for model in FORMATS))

    seen = asyncio.run(asked_while(service, saved, digits, replace_each_way, clients=NUM_CLIENTS))
    assert seen.wrong == []
    assert seen.outcomes.keys() == {"caught up", *(f"{model} [{which}]" for model in FORMATS for which in (0, 1))}
    assert seen.outcomes["caught up"] == len(ROUNDS) * len(FORMATS)


@pytest.mark.soak
def test_a_minute_of_replacements_and_kills(service, saved, digits):
    """Some replacements follow at once on others, so that loads meet them at any moment. After a kill there is no model
    for a while, which is a 503."""
    end = time.monotonic() + 60

    async def replace(asking: Clients, model: str) -> None:
        draw, last = random.Random(model), 0
        while time.monotonic() < end:
            last = 1 - last
            for which in (*draw.choices((0, 1), k=draw.randint(0, 2)), last):
                await asyncio.sleep(draw.uniform(0, 2 * QUIET_SECONDS))
                await asyncio.to_thread(saved.replace, model, which, draw.choice(WAYS))
            await asking.catch_up(model, last)

    async def kill() -> None:
        while time.monotonic() + 15 < end:
            await asyncio.sleep(15)
            with suppress(psutil.NoSuchProcess):
                for child in psutil.Process(service.process.pid).children():
                    if any("model_process" in word for word in child.cmdline()):
                        child.send_signal(signal.SIGKILL)

    async def disturb(asking: Clients) -> None:
        await asyncio.gather(*(replace(asking, model) for model in FORMATS), kill())

    seen = asyncio.run(asked_while(service, saved, digits, disturb, clients=32, refusals=frozenset({503})))
    assert seen.wrong == []
    assert min(seen.outcomes[f"{model} [{which}]"] for model in FORMATS for which in (0, 1)) > 0
    assert seen.outcomes["503"] > 0
    assert json.loads(httpx.post(f"{service.url}/v2/repository/index").text)[0]["state"] == "READY"

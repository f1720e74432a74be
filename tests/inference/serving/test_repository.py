"""Models are loaded, unloaded and replaced while requests run, and each request is answered by one version."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from ckpt_tools.errors import FormatError, UsageError
from inference.models.ours import OurImages
from inference.models.predictor import Predictor, load_predictor
from inference.models.results import Columns, Item
from inference.serving.__main__ import Options
from inference.serving.repository import NotReadyError, Repository, Source, UnknownModelError
from inference.serving.settings import Settings
from inference.serving.watching import Watcher


@dataclass(frozen=True, eq=False)
class Stamped(OurImages):
    """Takes what our own model takes, and answers when it may, with the number of the load that it came from."""

    stamp: int = 0
    may_answer: threading.Event = field(default_factory=threading.Event)

    def predict(self, inputs: Sequence[Item]) -> Columns:
        self.may_answer.wait(60)
        stamps = np.full(len(inputs), self.stamp)
        return {"label": stamps, "probabilities": stamps[:, None].astype(np.float32)}


@dataclass
class Loader:
    """Counts the loads, and gives a model that says which load it came from."""

    template: Predictor
    loads: int = 0
    fails: bool = False
    may_answer: threading.Event = field(default_factory=threading.Event)

    def __call__(self, source: Source) -> Predictor:
        if self.fails:
            raise FormatError(f"{source.url} is damaged")
        self.loads += 1
        assert isinstance(self.template.task, OurImages)
        task = Stamped(self.template.task.model, stamp=self.loads, may_answer=self.may_answer)
        return replace(self.template, name=source.name, task=task)


@pytest.fixture(scope="module")
def template(forms: Path) -> Predictor:
    return load_predictor(forms / "model.safetensors", name="m")


@pytest.fixture
def loader(template: Predictor) -> Loader:
    loader = Loader(template)
    loader.may_answer.set()
    return loader


@pytest.fixture
def repository(loader: Loader) -> Iterator[Repository]:
    repository = Repository([Source("a", "one"), Source("b", "two"), Source("b", "three")], loader)
    repository.load_all()
    yield repository
    repository.close()


def answer(repository: Repository, name: str, number: str | None = None) -> int:
    async def run() -> int:
        with repository.hold(name, number) as version:
            return (await version.batcher.submit(torch.zeros(28, 28, dtype=torch.uint8))).label

    return asyncio.run(run())


def test_names_have_versions_and_the_newest_answers(repository: Repository) -> None:
    assert repository.names == ("a", "b")
    assert [version.number for version in repository.versions_of("b")] == [1, 2]
    assert [answer(repository, "a"), answer(repository, "b"), answer(repository, "b", "1")] == [1, 3, 2]


@pytest.mark.parametrize(("name", "number"), [("c", None), ("a", "2"), ("a", "x"), ("", None)])
def test_an_unknown_model_or_version_is_named(repository: Repository, name: str, number: str | None) -> None:
    with pytest.raises(UnknownModelError, match=r"there is no model|has no version"):
        repository.version(name, number)


def test_unloading_and_loading(repository: Repository, loader: Loader) -> None:
    repository.unload("a")
    with pytest.raises(NotReadyError):
        repository.version("a")
    assert [(entry.name, entry.state) for entry in repository.index()][:1] == [("a", "UNAVAILABLE")]
    assert repository.is_ready  # It is as somebody wants it.
    repository.load("a")
    assert answer(repository, "a") == loader.loads == 4
    assert repository.version("a").number == 2


def test_a_request_holds_the_version_that_it_began_with(repository: Repository, loader: Loader) -> None:
    async def run() -> None:
        loader.may_answer.clear()
        with repository.hold("a") as before:
            slow = asyncio.create_task(before.batcher.submit(torch.zeros(28, 28)))
            queued = asyncio.create_task(before.batcher.submit(torch.zeros(28, 28)))
            await asyncio.sleep(0.05)
            await asyncio.to_thread(repository.load, "a")
            assert before.is_retired
            assert repository.version("a") is not before
            loader.may_answer.set()
            late = asyncio.create_task(before.batcher.submit(torch.zeros(28, 28)))
            assert [(await each).label for each in (slow, queued, late)] == [1, 1, 1]
        with pytest.raises(Exception, match=r"^$"):
            await before.batcher.submit(torch.zeros(28, 28))

    asyncio.run(run())
    assert answer(repository, "a") == 4


def test_threads_of_replaced_models_end(repository: Repository) -> None:
    def batchers() -> int:
        return sum(thread.name == "batcher" for thread in threading.enumerate())

    before = batchers()
    for _ in range(5):
        repository.load("a")
    end = time.monotonic() + 60
    while batchers() > before and time.monotonic() < end:
        time.sleep(0.01)
    assert batchers() == before


def test_a_load_that_fails_leaves_the_old_model(repository: Repository, loader: Loader) -> None:
    loader.fails = True
    with pytest.raises(FormatError):
        repository.load("a")
    assert answer(repository, "a") == 1
    entry = repository.index()[0]
    assert (entry.state, entry.version) == ("READY", "1")
    assert entry.reason == "the last load failed (FormatError); the log of the service says why"


def test_no_request_fails_and_none_is_mixed_while_models_are_replaced(repository: Repository) -> None:
    """Each request has several rows; a mixed one would have two labels."""

    async def ask(until: asyncio.Event) -> int:
        asked = 0
        while not until.is_set():
            with repository.hold("a") as version:
                rows = await version.batcher.submit_all([torch.zeros(28, 28)] * 7)
            assert len({row.label for row in rows}) == 1
            asked += 1
        return asked

    async def run() -> None:
        until = asyncio.Event()
        clients = [asyncio.create_task(ask(until)) for _ in range(8)]
        for _ in range(20):
            await asyncio.to_thread(repository.load, "a")
        until.set()
        assert min(await asyncio.gather(*clients)) > 1

    asyncio.run(run())


def test_no_models_are_refused(loader: Loader) -> None:
    with pytest.raises(UsageError, match="no model to serve"):
        Repository([], loader)


# --- watching


def write_checkpoint(folder: Path, weights: dict[str, Tensor], step: int) -> None:
    """As a trainer does: under another name first."""
    partial = folder / f".step-{step}.partial"
    partial.mkdir(parents=True)
    save_file({**weights, "heads.head.bias": weights["heads.head.bias"] + step}, partial / "model.safetensors")
    partial.rename(folder / f"step-{step}")


@pytest.fixture
def run_folder(weights: dict[str, Tensor], tmp_path: Path) -> Path:
    write_checkpoint(tmp_path / "run", weights, 1)
    return tmp_path / "run"


def load(source: Source) -> Predictor:
    return load_predictor(source.url, name=source.name)


def test_a_newer_checkpoint_of_a_run_is_loaded(run_folder: Path, weights: dict[str, Tensor]) -> None:
    told: list[str] = []
    repository = Repository([Source("m", f"{run_folder}@latest")], load)
    watcher = Watcher(repository, 60, told.append)
    repository.load_all()
    slot, first = repository.slots[0], repository.version("m").predictor.identity.digest
    watcher.visit(0, slot)
    watcher.visit(0, slot)
    assert repository.version("m").number == 1
    (run_folder / ".step-3.partial").mkdir()
    write_checkpoint(run_folder, weights, 2)
    watcher.visit(0, slot)
    assert repository.version("m").number == 1, "one look is not enough"
    watcher.visit(0, slot)
    assert repository.version("m").number == 2
    assert repository.version("m").predictor.identity.digest != first
    assert told == [f"m: serves {run_folder / 'step-2'}"]
    repository.close()


def test_a_file_that_is_replaced_is_loaded_again_and_a_damaged_one_is_not(
    weights: dict[str, Tensor], tmp_path: Path
) -> None:
    file, told = tmp_path / "model.safetensors", []
    save_file(weights, file)
    repository = Repository([Source("m", str(file))], load)
    watcher = Watcher(repository, 60, told.append)
    repository.load_all()
    file.write_bytes(b"damaged")
    for _ in range(3):
        watcher.visit(0, repository.slots[0])
    assert (repository.version("m").number, told) == (1, [])
    save_file({"another.model": torch.ones(3)}, file)
    for _ in range(3):
        watcher.visit(0, repository.slots[0])
    assert repository.version("m").number == 1
    assert [line.partition(": /")[0] for line in told] == [
        "m: the new checkpoint cannot be loaded, the old one keeps answering"
    ]
    save_file({**weights, "heads.head.bias": weights["heads.head.bias"] + 1}, file)
    os.utime(file, (time.time() + 10,) * 2)
    for _ in range(3):
        watcher.visit(0, repository.slots[0])
    assert repository.version("m").number == 2
    repository.close()


def test_it_looks_by_itself(run_folder: Path, weights: dict[str, Tensor]) -> None:
    repository = Repository([Source("m", f"{run_folder}@latest")], load)
    watcher = Watcher(repository, 0.05, print)
    repository.load_all()
    with watcher:
        write_checkpoint(run_folder, weights, 2)
        end = time.monotonic() + 60
        while repository.version("m").number == 1 and time.monotonic() < end:
            time.sleep(0.02)
    assert repository.version("m").number == 2
    repository.close()


@pytest.mark.parametrize("seconds", [0, -1, float("nan")])
def test_a_watch_without_a_time_is_refused(seconds: float) -> None:
    with pytest.raises(UsageError, match="--watch"):
        Options(["a"], Settings(), watch=seconds)

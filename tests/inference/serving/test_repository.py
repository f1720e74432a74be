"""Models are loaded, unloaded and replaced while requests run, and each request is answered by one version."""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from ckpt_tools.errors import FormatError, StoreError, UsageError
from inference.common.name_options import Reading
from inference.models.options import DEFAULTS
from inference.models.ours import OurImages
from inference.models.predictor import Predictor, load_predictor
from inference.models.results import Columns, Item
from inference.serving.__main__ import Options
from inference.serving.repository import Load, NotReadyError, Repository, Slot, Source, UnknownModelError
from inference.serving.settings import Settings
from inference.serving.watching import Watcher
from tests.inference.conftest import write_sharded


@dataclass(frozen=True, eq=False)
class Stamped(OurImages):
    """Takes what our own model takes, and answers when it may, with the number of the load that it came from."""

    stamp: int = 0
    may_answer: threading.Event = field(default_factory=threading.Event)
    has_begun: threading.Event = field(default_factory=threading.Event)

    def predict(self, inputs: Sequence[Item]) -> Columns:
        self.has_begun.set()
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
    has_begun: threading.Event = field(default_factory=threading.Event)

    def __call__(self, source: Source) -> Predictor:
        if self.fails:
            raise FormatError(f"{source.url} is damaged")
        self.loads += 1
        assert isinstance(self.template.task, OurImages)
        task = Stamped(self.template.task.model, stamp=self.loads, may_answer=self.may_answer, has_begun=self.has_begun)
        return replace(self.template, name=source.name, task=task)


@pytest.fixture(scope="module")
def template(forms):
    return load_predictor(forms / "model.safetensors", name="m")


@pytest.fixture
def loader(template):
    loader = Loader(template)
    loader.may_answer.set()
    return loader


@pytest.fixture
def repository(loader):
    repository = Repository([Source("a", "one"), Source("b", "two"), Source("b", "three")], loader)
    repository.load_all()
    yield repository
    repository.close()


def answer(repository: Repository, name: str, number: str | None = None) -> int:
    async def run() -> int:
        with repository.hold(name, number) as version:
            return (await version.batcher.submit(torch.zeros(28, 28, dtype=torch.uint8))).label

    return asyncio.run(run())


def test_names_have_versions_and_the_newest_answers(repository):
    assert repository.names == ("a", "b")
    assert [version.number for version in repository.versions_of("b")] == [1, 2]
    assert [answer(repository, "a"), answer(repository, "b"), answer(repository, "b", "1")] == [1, 3, 2]


@pytest.mark.parametrize(("name", "number"), [("c", None), ("a", "2"), ("a", "x"), ("", None)])
def test_an_unknown_model_or_version_is_named(repository, name, number):
    with pytest.raises(UnknownModelError, match=r"there is no model|has no version"):
        repository.version(name, number)


def test_unloading_and_loading(repository, loader):
    repository.unload("a")
    with pytest.raises(NotReadyError):
        repository.version("a")
    assert [(entry.name, entry.state) for entry in repository.index()][:1] == [("a", "UNAVAILABLE")]
    assert repository.is_ready  # It is as somebody wants it.
    repository.load("a")
    assert answer(repository, "a") == loader.loads == 4
    assert repository.version("a").number == 2


def test_a_request_holds_the_version_that_it_began_with(repository, loader):
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


def test_threads_of_replaced_models_end(repository):
    def batchers() -> int:
        return sum(thread.name == "batcher" for thread in threading.enumerate())

    before = batchers()
    for _ in range(5):
        repository.load("a")
    end = time.monotonic() + 60
    while batchers() > before and time.monotonic() < end:
        time.sleep(0.01)
    assert batchers() == before


def test_a_load_that_fails_leaves_the_old_model(repository, loader):
    loader.fails = True
    with pytest.raises(FormatError):
        repository.load("a")
    assert answer(repository, "a") == 1
    entry = repository.index()[0]
    assert (entry.state, entry.version) == ("READY", "1")
    assert entry.reason == "the last load failed (FormatError); the log of the service says why"


def test_no_request_fails_and_none_is_mixed_while_models_are_replaced(repository):
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


def test_no_models_are_refused(loader):
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
def run_folder(weights, tmp_path):
    write_checkpoint(tmp_path / "run", weights, 1)
    return tmp_path / "run"


def load(source: Source) -> Predictor:
    return load_predictor(source.url, name=source.name)


def watched(url: object, load: Load, told: list[str], quiet: float = 0.0) -> tuple[Repository, Watcher, Slot]:
    """A model that is loaded, and its watcher, which looks when the test has it look."""
    repository = Repository([Source("m", str(url))], load)
    watcher = Watcher(repository, 0.2, quiet, told.append)
    repository.load_all()
    return repository, watcher, repository.slots[0]


def test_a_newer_checkpoint_of_a_run_is_loaded(run_folder, weights):
    told: list[str] = []
    repository, watcher, slot = watched(f"{run_folder}@latest", load, told)
    first = repository.version("m").predictor.identity.digest
    watcher.visit(slot)
    assert repository.version("m").number == 1
    (run_folder / ".step-3.partial").mkdir()
    write_checkpoint(run_folder, weights, 2)
    watcher.visit(slot)
    watcher.visit(slot)
    assert repository.version("m").number == 2
    assert repository.version("m").predictor.identity.digest != first
    assert told == [f"m: serves {run_folder / 'step-2'}"]
    repository.close()


def test_a_change_of_the_named_folder_of_config_json_is_loaded(run_folder, tmp_path):
    told, config = list[str](), tmp_path / "config" / "config.json"
    config.parent.mkdir()
    names = [list("abcdefghij"), list("klmnopqrst")]
    config.write_text(json.dumps({"architecture": "ours", "labels": names[0]}))

    def load_with(source: Source) -> Predictor:
        return load_predictor(source.url, architecture="ours", config=source.options.reading.config)

    options = replace(DEFAULTS, reading=Reading(config=str(config.parent)))
    repository = Repository([Source("m", str(run_folder / "step-1"), options)], load_with)
    watcher = Watcher(repository, 0.2, 0.0, told.append)
    repository.load_all()
    (slot,) = repository.slots
    watcher.visit(slot)
    assert told == [] and repository.version("m").predictor.labels == tuple(names[0])
    config.write_text(json.dumps({"architecture": "ours", "labels": names[1]}))
    watcher.visit(slot)
    assert told == [f"m: serves {run_folder / 'step-1'}"] and repository.version("m").predictor.labels == tuple(
        names[1]
    )
    repository.close()


def test_a_folder_is_loaded_once_nothing_has_changed_for_the_quiet_time(weights, tmp_path):
    """One shard is replaced, and half a second later the other, by copies with the times of the originals. Until both
    are there the quiet time is longer than any pause of a busy machine."""
    folder, new, told = tmp_path / "model", tmp_path / "new", list[str]()
    write_sharded(folder, weights)
    write_sharded(new, {name: tensor + 1 for name, tensor in weights.items()})
    time.sleep(1)
    repository, watcher, slot = watched(folder, load, told, quiet=0.8)
    old = repository.version("m").predictor.identity.digest
    watcher.quiet = 600
    for shard in sorted(new.glob("*.safetensors")):
        subprocess.run(["cp", "-p", shard, folder], check=True)
        end = time.monotonic() + 0.5
        while time.monotonic() < end:
            watcher.visit(slot)
            assert repository.version("m").predictor.identity.digest == old
    watcher.quiet = 0.8
    time.sleep(0.8)
    watcher.visit(slot)
    assert repository.version("m").predictor.identity.digest == load_predictor(new).identity.digest
    assert told == [f"m: serves {folder}"]
    repository.close()


def test_the_first_load_waits_for_the_quiet_time_too(weights, tmp_path):
    file, told, begun = tmp_path / "model.safetensors", list[str](), time.time()
    save_file(weights, file)
    repository, _, _ = watched(file, load, told, quiet=1)
    assert time.time() - begun >= 1
    assert told == [f"m: waits until {file} has not changed for 1 seconds"]
    told_again: list[str] = []
    again, _, _ = watched(file, load, told_again, quiet=1)
    assert told_again == []
    repository.close()
    again.close()


def test_models_of_a_process_that_ended_are_loaded_as_they_were_or_once_it_is_quiet(weights, tmp_path):
    """The process ends while a copy over the folder is under way: one shard of it is there."""
    folder, new, told = tmp_path / "model", tmp_path / "new", list[str]()
    write_sharded(folder, weights)
    write_sharded(new, {name: tensor + 1 for name, tensor in weights.items()})
    saved = [load_predictor(each).identity.digest for each in (folder, new)]
    time.sleep(0.5)
    repository, watcher, slot = watched(folder, load, told, quiet=0.8)
    repository.lost("the process of the models was ended by SIGKILL")
    repository.reload(told.append)
    assert (repository.version("m").predictor.identity.digest, told) == (saved[0], [])

    first, second = sorted(new.glob("*.safetensors"))
    shutil.copy2(first, folder)
    repository.lost("the process of the models was ended by SIGKILL")

    def copy_the_rest(sentence: str) -> None:
        told.append(sentence)
        shutil.copy2(second, folder)

    watcher.tell = copy_the_rest
    repository.reload(told.append)
    assert repository.version("m").predictor.identity.digest == saved[1]
    assert told == [f"m: waits until {folder} has not changed for 0.8 seconds"]
    assert slot.version is not None
    repository.close()


def test_a_file_that_is_replaced_is_loaded_again_and_a_damaged_one_is_not(weights, tmp_path):
    """A damaged one is tried once, until it changes."""
    file, told, loads = tmp_path / "model.safetensors", list[str](), list[str]()
    save_file(weights, file)

    def counted(source: Source) -> Predictor:
        loads.append(source.url)
        return load(source)

    repository, watcher, slot = watched(file, counted, told)
    save_file({"another.model": torch.ones(3)}, file)
    for _ in range(3):
        watcher.visit(slot)
        time.sleep(0.3)
    assert (repository.version("m").number, len(loads)) == (1, 2)
    assert [line.partition(": /")[0] for line in told] == [
        "m: the new checkpoint cannot be loaded, the old one keeps answering"
    ]
    assert (slot.state, slot.reason) == ("READY", "the last load failed (FormatError); the log of the service says why")
    save_file({**weights, "heads.head.bias": weights["heads.head.bias"] + 1}, file)
    watcher.visit(slot)
    watcher.visit(slot)
    assert (repository.version("m").number, len(loads), slot.reason) == (2, 3, "")
    repository.close()


def test_an_incomplete_checkpoint_is_not_loaded(run_folder, weights):
    told: list[str] = []
    folder = run_folder / "step-1"
    repository, watcher, slot = watched(folder, load, told)
    save_file({name: tensor + 1 for name, tensor in weights.items()}, folder / "model.safetensors")
    (folder / "optimizer.pt.incomplete").touch()
    watcher.visit(slot)
    assert (repository.version("m").number, told) == (
        1,
        [
            f"m: the new checkpoint cannot be loaded, the old one keeps answering: {folder} is not complete: "
            "the file optimizer.pt.incomplete marks it as unfinished"
        ],
    )
    (folder / "optimizer.pt.incomplete").unlink()
    watcher.visit(slot)
    watcher.visit(slot)
    assert repository.version("m").number == 2
    repository.close()


@dataclass
class Failing:
    """Loads once, and then fails so many times with ``error``."""

    error: Exception
    failures: int
    loads: list[float] = field(default_factory=list)

    def __call__(self, source: Source) -> Predictor:
        self.loads.append(time.monotonic())
        if 1 < len(self.loads) <= 1 + self.failures:
            raise self.error
        return load(source)


def test_a_load_that_failed_for_the_networks_sake_is_tried_again_after_a_growing_time(weights, tmp_path):
    """The files stay as they are."""
    file, told = tmp_path / "model.safetensors", list[str]()
    save_file(weights, file)
    failing = Failing(StoreError("the store does not answer"), 3)
    repository, watcher, slot = watched(file, failing, told)
    save_file({name: tensor + 1 for name, tensor in weights.items()}, file)
    end = time.monotonic() + 60
    while repository.version("m").number == 1 and time.monotonic() < end:
        watcher.visit(slot)
        if slot.reason:
            assert slot.reason == "the last load failed (StoreError); the log of the service says why"
        time.sleep(0.02)
    pauses = [after - before for before, after in itertools.pairwise(failing.loads[1:])]
    assert [pause >= least for pause, least in zip(pauses, (0.4, 0.8, 1.6), strict=True)] == [True] * 3
    assert (repository.version("m").number, slot.reason) == (2, "")
    assert told == [
        "m: the new checkpoint cannot be loaded, the old one keeps answering: the store does not answer",
        f"m: serves {file}",
    ]
    repository.close()


@pytest.mark.parametrize(
    ("error", "name", "sentence"),
    [
        (ZeroDivisionError("integer modulo by zero"), "ZeroDivisionError", "ZeroDivisionError: integer modulo by zero"),
        (MemoryError(), "MemoryError", "MemoryError"),
        (RuntimeError("Traceback:\n  at a line\nKeyError: 'x'"), "RuntimeError", "KeyError: 'x'"),
    ],
)
def test_an_unforeseen_error_is_told_and_watching_goes_on(error, name, sentence, weights, tmp_path):
    file, told = tmp_path / "model.safetensors", list[str]()
    save_file(weights, file)
    repository, watcher, slot = watched(file, Failing(error, 1), told)
    with watcher:
        save_file({name: tensor + 1 for name, tensor in weights.items()}, file)
        until(lambda: len(told) > 0)
        assert answer(repository, "m") in range(10)
        assert (slot.state, slot.reason) == ("READY", f"the last load failed ({name}); the log of the service says why")
        until(lambda: repository.version("m").number == 2)
    assert told == [
        f"m: the new checkpoint cannot be loaded, the old one keeps answering: {file} cannot be loaded: {sentence}",
        f"m: serves {file}",
    ]
    repository.close()


def test_watching_goes_on_after_any_number_of_failures_and_when_nobody_reads_the_log(weights, tmp_path):
    file = tmp_path / "model.safetensors"
    save_file(weights, file)

    def closed(_: str) -> None:
        raise BrokenPipeError

    failing = Failing(StoreError("the store does not answer"), 2)
    repository = Repository([Source("m", str(file))], failing)
    watcher = Watcher(repository, 0.05, 0.0, closed)
    repository.load_all()
    save_file({name: tensor + 1 for name, tensor in weights.items()}, file)
    with suppress(BrokenPipeError):
        watcher.visit(repository.slots[0])
    (waiting,) = watcher._waiting.values()
    waiting.num_failures, waiting.next_try = 10**5, 0.0
    with watcher:
        until(lambda: waiting.num_failures == 10**5 + 1)
        assert waiting.next_try - time.monotonic() < 300
        waiting.next_try = 0.0
        until(lambda: repository.version("m").number == 2)
    repository.close()


def test_a_source_that_is_gone_is_told_once_and_looked_at_again(weights, tmp_path):
    file, told = tmp_path / "model.safetensors", list[str]()
    save_file(weights, file)
    repository, watcher, slot = watched(file, load, told)
    file.rename(tmp_path / "away")
    for _ in range(3):
        watcher.visit(slot)
    assert told == [f"m: {file} cannot be looked at: there is no file or folder {file}"]
    assert (
        slot.reason == "the last look at the checkpoint failed (SourceNotFoundError); the log of the service says why"
    )
    (tmp_path / "away").rename(file)
    watcher.visit(slot)
    watcher.visit(slot)
    assert (answer(repository, "m") in range(10), slot.reason) == (True, "")
    repository.close()


def test_a_model_that_was_unloaded_stays_so(weights, tmp_path):
    file = tmp_path / "model.safetensors"
    save_file(weights, file)
    repository, watcher, slot = watched(file, load, [])
    repository.unload("m")
    save_file({name: tensor + 1 for name, tensor in weights.items()}, file)
    watcher.visit(slot)
    watcher.visit(slot)
    assert slot.version is None
    repository.close()


def test_it_looks_by_itself(run_folder, weights):
    repository = Repository([Source("m", f"{run_folder}@latest")], load)
    watcher = Watcher(repository, 0.05, 0.1, print)
    repository.load_all()
    with watcher:
        write_checkpoint(run_folder, weights, 2)
        until(lambda: repository.version("m").number == 2)
    repository.close()


def until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not is_so() and time.monotonic() < end:
        time.sleep(0.02)
    assert is_so()


@pytest.mark.parametrize(("watch", "quiet"), [(1, -1), (1, float("nan")), (None, 1)])
def test_a_quiet_time_of_no_use_is_refused(watch, quiet):
    with pytest.raises(UsageError, match="--quiet-time"):
        Options(["a"], Settings(), watch=watch, quiet_time=quiet)


@pytest.mark.parametrize("seconds", [0, -1, float("nan")])
def test_a_watch_without_a_time_is_refused(seconds):
    with pytest.raises(UsageError, match="--watch"):
        Options(["a"], Settings(), watch=seconds)

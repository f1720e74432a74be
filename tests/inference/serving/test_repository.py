"""Models are loaded, unloaded, watched and replaced while requests run, and each request is answered by one version."""

import asyncio
import itertools
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from ckpt_tools.errors import StoreError
from inference.models.predictor import Predictor, load_predictor
from inference.serving.repository import (
    LoadModel,
    ModelRepository,
    ModelSlot,
    NamedSource,
    NotReadyError,
    UnknownModelError,
)
from inference.serving.watching import CheckpointWatcher
from tests.inference.conftest import write_sharded
from tests.inference.serving.helpers import Loader, wait_until

KEPT = "m: the new checkpoint cannot be loaded, the old one keeps answering: "
LOAD_FAILED = "the last load failed ({}); the log of the service says why"
BLACK = torch.zeros(28, 28, dtype=torch.uint8)


@pytest.fixture
def loader(predictor):
    loader = Loader(predictor)
    loader.may_answer.set()
    return loader


@pytest.fixture
def repository(loader):
    repository = ModelRepository([NamedSource("a", "one"), NamedSource("b", "two"), NamedSource("b", "three")], loader)
    repository.load_all()
    yield repository
    repository.close()


def answer(repository: ModelRepository, name: str, number: str | None = None) -> int | None:
    async def run() -> int | None:
        with repository.hold_version(name, number) as version:
            return (await version.batcher.submit(BLACK)).label

    return asyncio.run(run())


def test_names_have_versions_and_the_newest_answers(repository):
    assert repository.names == ("a", "b")
    assert [version.number for version in repository.list_model_versions("b")] == [1, 2]
    assert [answer(repository, "a"), answer(repository, "b"), answer(repository, "b", "1")] == [1, 3, 2]
    for name, number in (("c", None), ("a", "2"), ("a", "x"), ("", None)):
        with pytest.raises(UnknownModelError, match=r"there is no model|has no version"):
            repository.get_version(name, number)


def test_unloading_and_loading(repository, loader):
    repository.unload("a")
    with pytest.raises(NotReadyError):
        repository.get_version("a")
    assert [(entry["name"], entry["state"]) for entry in repository.list_index()][:1] == [("a", "UNAVAILABLE")]
    assert repository.is_ready  # It is as somebody wants it.
    repository.load("a")
    assert answer(repository, "a") == loader.loads == 4
    assert repository.get_version("a").number == 2


def test_a_request_holds_the_version_that_it_began_with(repository, loader):
    async def run() -> None:
        loader.may_answer.clear()
        with repository.hold_version("a") as before:
            slow, queued = (asyncio.create_task(before.batcher.submit(BLACK)) for _ in range(2))
            await asyncio.sleep(0.05)
            await asyncio.to_thread(repository.load, "a")
            assert before.is_retired
            assert repository.get_version("a") is not before
            loader.may_answer.set()
            late = asyncio.create_task(before.batcher.submit(BLACK))
            assert [(await each).label for each in (slow, queued, late)] == [1, 1, 1]
        with pytest.raises(Exception, match=r"^$"):
            await before.batcher.submit(BLACK)

    asyncio.run(run())
    assert answer(repository, "a") == 4


# --- watching


def write_checkpoint(folder: Path, weights: dict[str, Tensor], step: int) -> None:
    """As a trainer does: under another name first."""
    partial = folder / f".step-{step}.partial"
    partial.mkdir(parents=True)
    save_file({name: tensor + step for name, tensor in weights.items()}, partial / "model.safetensors")
    partial.rename(folder / f"step-{step}")


NET = """
from torch import nn

inputs = {"x": ("FP32", [-1, 3])}


def net():
    return nn.Linear(3, 2)
"""
SMALL = nn.Linear(3, 2).state_dict()
OTHER = {name: tensor + 1 for name, tensor in SMALL.items()}


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    """Load a small network: most tests of the watcher load several."""
    file = tmp_path_factory.mktemp("network") / "net.py"
    file.write_text(NET)
    return lambda source: load_predictor(source.url, architecture=f"{file}:net", name=source.name)


@pytest.fixture
def run_folder(tmp_path):
    write_checkpoint(tmp_path / "run", SMALL, 1)
    return tmp_path / "run"


@pytest.fixture
def file(tmp_path):
    save_file(SMALL, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


@dataclass
class Watched:
    """A model that is loaded, and its watcher, which looks when the test has it look."""

    repository: ModelRepository
    watcher: CheckpointWatcher
    told: list[str]

    @property
    def slot(self) -> ModelSlot:
        return self.repository.slots[0]

    @property
    def number(self) -> int:
        return self.repository.get_version("m").number

    @property
    def digest(self) -> str:
        return self.repository.get_version("m").predictor.identity.digest

    def is_answering(self) -> bool:
        return self.repository.get_version("m").predictor.predict([np.ones(3, np.float32)])[0]["output"].shape == (2,)

    def visit(self, times: int = 1) -> None:
        for _ in range(times):
            self.watcher.check_slot(self.slot)


@pytest.fixture
def watched(load):
    """Make one; all are closed at the end."""
    made: list[Watched] = []

    def make(source: object, load: LoadModel = load, quiet: float = 0.0, seconds: float = 0.05) -> Watched:
        told = list[str]()
        repository = ModelRepository(
            [source if isinstance(source, NamedSource) else NamedSource("m", str(source))], load
        )
        made.append(Watched(repository, CheckpointWatcher(repository, seconds, quiet, told.append), told))
        repository.load_all()
        return made[-1]

    yield make
    for each in made:
        each.repository.close()


def test_a_newer_checkpoint_of_a_run_is_loaded(watched, run_folder):
    found = watched(f"{run_folder}@latest")
    first = found.digest
    found.visit()
    assert found.number == 1
    (run_folder / ".step-3.partial").mkdir()
    write_checkpoint(run_folder, SMALL, 2)
    found.visit(2)
    assert found.number == 2 and found.digest != first
    assert found.told == [f"m: serves {run_folder / 'step-2'}"]
    with found.watcher:  # It looks by itself.
        write_checkpoint(run_folder, SMALL, 4)
        wait_until(lambda: found.number == 3)


@pytest.fixture
def folders(tmp_path):
    """A checkpoint of two files in ``model``, which is old, and another in ``new``."""
    write_sharded(tmp_path / "model", SMALL)
    write_sharded(tmp_path / "new", OTHER)
    time.sleep(0.4)
    return tmp_path / "model", tmp_path / "new"


def test_a_folder_is_loaded_once_nothing_has_changed_for_the_quiet_time(watched, folders, load):
    """One shard is replaced, and later the other, by copies with the times of the originals. Until both are there the
    quiet time is longer than any pause of a busy machine."""
    folder, new = folders
    found = watched(folder, quiet=0.4)
    old, found.watcher.quiet_time = found.digest, 600
    for shard in sorted(new.glob("*.safetensors")):
        shutil.copy2(shard, folder)
        end = time.monotonic() + 0.2
        while time.monotonic() < end:
            found.visit()
            assert found.digest == old
    found.watcher.quiet_time = 0.4
    time.sleep(0.4)
    found.visit()
    assert found.digest == load(NamedSource("m", str(new))).identity.digest
    assert found.told == [f"m: serves {folder}"]


def test_the_first_load_waits_for_the_quiet_time_too(watched, file):
    begun = time.time()
    assert watched(file, quiet=0.5).told == [f"m: waits until {file} has not changed for 0.5 seconds"]
    assert time.time() - begun >= 0.5
    assert watched(file, quiet=0.5).told == []


def test_a_file_that_is_replaced_is_loaded_again_and_a_damaged_one_is_not(watched, file, load):
    """A damaged one is tried once, until it changes."""
    loads = list[str]()

    def counted(source: NamedSource) -> Predictor:
        loads.append(source.url)
        return load(source)

    found = watched(file, counted)
    save_file({"another.model": torch.ones(3)}, file)
    for _ in range(3):
        found.visit()
        time.sleep(0.1)
    assert (found.number, len(loads)) == (1, 2)
    (line,) = found.told
    assert line.startswith(f"{KEPT}/")
    assert (found.slot.state, found.slot.reason) == ("READY", LOAD_FAILED.format("FormatError"))
    save_file(OTHER, file)
    found.visit(2)
    assert (found.number, len(loads), found.slot.reason) == (2, 3, "")


def test_an_incomplete_checkpoint_is_not_loaded(watched, run_folder):
    folder = run_folder / "step-1"
    found = watched(folder)
    save_file(OTHER, folder / "model.safetensors")
    (folder / "optimizer.pt.incomplete").touch()
    found.visit()
    marked = "the file optimizer.pt.incomplete marks it as unfinished"
    assert (found.number, found.told) == (1, [f"{KEPT}{folder} is not complete: {marked}"])
    (folder / "optimizer.pt.incomplete").unlink()
    found.visit(2)
    assert found.number == 2


@dataclass
class Failing:
    """Loads once, and then fails so many times with ``error``."""

    load: LoadModel
    error: Exception
    failures: int
    loads: list[float] = field(default_factory=list)

    def __call__(self, source: NamedSource) -> Predictor:
        self.loads.append(time.monotonic())
        if 1 < len(self.loads) <= 1 + self.failures:
            raise self.error
        return self.load(source)


NO_ANSWER = StoreError("the store does not answer")


def test_a_load_that_failed_for_the_networks_sake_is_tried_again_after_a_growing_time(watched, file, load):
    """The files stay as they are."""
    failing = Failing(load, NO_ANSWER, 3)
    found = watched(file, failing)
    save_file(OTHER, file)

    def is_loaded() -> bool:
        found.visit()
        assert found.slot.reason in ("", LOAD_FAILED.format("StoreError"))
        return found.number == 2

    wait_until(is_loaded)
    pauses = [after - before for before, after in itertools.pairwise(failing.loads[1:])]
    assert [pause >= least for pause, least in zip(pauses, (0.1, 0.2, 0.4), strict=True)] == [True] * 3
    assert (found.slot.reason, found.told) == ("", [f"{KEPT}{NO_ANSWER}", f"m: serves {file}"])


def test_an_unforeseen_error_is_told_and_watching_goes_on(watched, file, load):
    found = watched(file, Failing(load, RuntimeError("Traceback:\n  at a line\nKeyError: 'x'"), 1))
    save_file(OTHER, file)
    found.visit()
    assert found.is_answering()
    assert (found.slot.state, found.slot.reason) == ("READY", LOAD_FAILED.format("RuntimeError"))
    with found.watcher:
        wait_until(lambda: found.number == 2)
    assert found.told == [f"{KEPT}{file} cannot be loaded: KeyError: 'x'", f"m: serves {file}"]


def test_a_source_that_is_gone_is_told_once_and_looked_at_again(watched, file, tmp_path):
    found = watched(file)
    file.rename(tmp_path / "away")
    found.visit(3)
    assert found.told == [f"m: {file} cannot be looked at: there is no file or folder {file}"]
    reason = "the last look at the checkpoint failed (SourceNotFoundError); the log of the service says why"
    assert found.slot.reason == reason
    (tmp_path / "away").rename(file)
    found.visit(2)
    assert (found.is_answering(), found.slot.reason) == (True, "")


def test_a_model_that_was_unloaded_stays_so(watched, file):
    found = watched(file)
    found.repository.unload("m")
    save_file(OTHER, file)
    found.visit(2)
    assert found.slot.version is None

"""Tasks on the processes of a cluster: together, in order, to the end, and again where a process is lost."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest
import ray
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_tools.errors import StoreError
from ckpt_tools.stores.destination import StoreDestination
from ckpt_tools.stores.local.store import LocalStore
from ckpt_tools.stores.memory import MemoryStore
from ckpt_tools.stores.shared_files import SharedFilesCheck, prepare_shared_files_check
from ckpt_tools.testing.runners import RunnerTests, double
from ckpt_tools.transfer.crc_board import PartCrc, combine_crcs
from ckpt_tools.transfer.runners import TaskRunner
from ckpt_tools.transfer.runners import ray as ray_runner
from ckpt_tools.transfer.runners.ray import MAX_LOSSES, RayRunner, RayTaskProcess, TaskResult
from ckpt_tools.transfer.runners.ray_board import RANGES_PER_ANSWER, PostponedError, open_board
from tests.support.ray_cluster import cluster, processes

pytestmark = pytest.mark.extended

__all__ = ["cluster"]


def at_ease() -> None:
    """A check that finds nothing."""


def runner_of(num_workers: int, **changed: Any) -> RayRunner:
    usual = {"bytes_of_item": lambda item: 1, "bytes_in_flight": 1000, "check": at_ease}
    return RayRunner(num_workers, **{**usual, **changed})


@pytest.fixture(scope="module")
def runners(cluster):
    """Runners by their number of workers, each used by many tests: five of its processes take as many seconds."""
    made: dict[int, RayRunner] = {}
    yield made
    for runner in made.values():
        runner.close()


class TestRayRunner(RunnerTests):
    @pytest.fixture(autouse=True)
    def _runners(self, runners):
        self.runners = runners

    def make(self, num_workers: int) -> TaskRunner:
        if num_workers not in self.runners:
            self.runners[num_workers] = runner_of(num_workers)
        return self.runners[num_workers]


@pytest.fixture
def pair(runners, cluster):
    """A runner with two workers that are up, and perhaps two that a test lost."""
    found = runners.setdefault(2, runner_of(2))
    while len(set(found.run(who, range(8)))) < 2:
        pass  # one of them is still starting
    return found


def who(item: int) -> int:
    time.sleep(0.01)
    return os.getpid()


def test_items_are_worked_through_in_order_by_as_many_processes_as_there_are_workers(pair):
    def when(item: int) -> tuple[int, int, float]:
        return item, who(item), time.monotonic()

    found = sorted(pair.run(when, range(40)))
    assert len({pid for _, pid, _ in found}) == 2 and os.getpid() not in {pid for _, pid, _ in found}
    for pid in {pid for _, pid, _ in found}:
        assert all(a < b for a, b in pairwise(at for _, by, at in found if by == pid))


def test_no_more_bytes_are_handed_out_than_may_be(pair):
    """Of items of 40 bytes two fit in 100 at a time, and one of 1,000 goes alone."""
    alone = RayRunner(
        2, bytes_of_item=lambda item: item, bytes_in_flight=100, check=at_ease, _idle_processes=pair._idle_processes
    )

    def span(num_bytes: int) -> tuple[int, float, float]:
        started = time.monotonic()
        time.sleep(0.02)
        return num_bytes, started, time.monotonic()

    spans = list(alone.run(span, [40, 40, 40, 40, 1000, 40, 40]))
    pair._idle_processes = alone._idle_processes
    for _, started, _ in spans:
        together = [num_bytes for num_bytes, since, until in spans if since <= started < until]
        assert sum(together) <= 100 or together == [1000]


def test_an_error_that_cannot_be_sent_comes_as_its_words(pair):
    class LocalError(Exception):
        """Cannot be pickled by name."""

    def fail(item: int) -> None:
        raise LocalError("of this function alone")

    with pytest.raises(Exception, match="of this function alone"):
        list(pair.run(fail, range(3)))


def kill_once(marker: Path) -> None:
    """End this process as the kernel would, the first time that anybody comes here."""
    try:
        marker.touch(exist_ok=False)
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


def test_an_item_that_kills_every_process_ends_the_run(pair):
    def work(item: int) -> int:
        if item == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return item

    found = []
    with pytest.raises(StoreError, match=f"{MAX_LOSSES} processes of the cluster were lost at the same task"):
        found.extend(pair.run(work, range(10)))


def test_a_check_that_fails_ends_the_run_before_it_begins(pair, tmp_path):
    pair.check = SharedFilesCheck(sizes=((tmp_path / "nowhere", 1),))
    try:
        with pytest.raises(
            StoreError, match=f"the worker on {socket.gethostname()} does not see the same {tmp_path}/nowhere"
        ):
            list(pair.run(double, range(3)))
    finally:
        pair.check = at_ease


def test_an_interrupted_run_ends_its_processes(pair, cluster, tmp_path):
    def work(item: int) -> None:
        (tmp_path / str(os.getpid())).touch()
        time.sleep(60)

    def items() -> Iterator[int]:
        yield from range(2)
        while not list(tmp_path.iterdir()):
            time.sleep(0.01)
        raise KeyboardInterrupt

    before = {process.pid for process in processes(cluster)}
    with pytest.raises(KeyboardInterrupt):
        list(pair.run(work, items()))
    assert {int(path.name) for path in tmp_path.iterdir()} <= before
    for name in [path.name for path in tmp_path.iterdir()]:
        while int(name) in {process.pid for process in processes(cluster)}:
            time.sleep(0.01)  # Ray says that it is dead a moment before it is


class TestWaiting:
    """Workers that wait for the checksums of earlier items."""

    @pytest.fixture
    def board(self, cluster):
        with closing(open_board()) as made:
            yield made

    def test_parts_from_anywhere_make_a_checksum(self, board):
        parts = [PartCrc((0, 30), start, start + 10, 1000 + start) for start in (0, 10, 20)]
        for part in [*parts, parts[0]]:
            board.post_checksums(7, [part])
        assert board.wait_for_checksum(7, (0, 30)) == combine_crcs(parts)

    def test_what_this_process_told_last_is_known_without_asking(self, board):
        board.post_checksums(0, [PartCrc((0, 4), 0, 4, 11)])
        ray.kill(board.actor)
        assert board.wait_for_checksum(0, (0, 4)) == 11

    def test_one_answer_holds_the_checksums_that_are_asked_for_next(self, board):
        board.post_checksums(0, [PartCrc((at, at + 1), at, at + 1, at) for at in range(5000)])
        board.post_checksums(1, [])
        assert board.wait_for_checksum(0, (100, 101)) == 100
        assert len(board._known_checksums) == RANGES_PER_ANSWER

    def test_a_lost_board_is_an_error_of_one_sentence(self, board):
        ray.kill(board.actor)
        with pytest.raises(StoreError, match="keeps the checksums of this run was lost"):
            board.wait_for_checksum(0, (0, 4))

    @pytest.mark.parametrize("error", [StoreError("disk full", path="f"), PostponedError()])
    def test_whoever_waits_is_woken(self, board, error):
        waiting = board.actor.values.remote(0, (0, 4))
        board.postpone() if isinstance(error, PostponedError) else board.fail_waiting_workers(error)
        woken = ray.get(waiting, timeout=30)
        assert type(woken) is type(error) and str(woken) == str(error)
        with pytest.raises(type(error)):
            board.wait_for_checksum(0, (0, 4))

    def test_the_earliest_item_is_lost_while_all_others_wait_for_it(self, board, pair, tmp_path, monkeypatch):
        """The one process that is left had taken an item that needs the lost one, and no other ever comes."""
        nobody = ray.remote(num_cpus=1, resources={"nowhere": 1})(RayTaskProcess)
        monkeypatch.setattr(ray_runner, "new_process", nobody.remote)

        def work(item: int) -> int:
            if item == 0:
                time.sleep(0.3)
                kill_once(tmp_path / "killed")
            board.post_checksums(0, [PartCrc((item, item + 1), item, item + 1, item)])
            return board.wait_for_checksum(0, (max(0, item - 1), max(1, item)))

        left = RayRunner(2, lambda item: 1, 1000, at_ease, board, _idle_processes=pair._idle_processes)
        with closing(left):
            assert sorted(left.run(work, range(20))) == sorted([0, *range(19)])
        assert (tmp_path / "killed").exists()
        pair._idle_processes = []


def test_what_is_shared_is_asked_for(tmp_path):
    source, staged = tmp_path / "source", tmp_path / "staging/output"
    source.mkdir()
    staged.mkdir(parents=True)
    (source / "file").write_bytes(b"abc")
    with prepare_shared_files_check(LocalStore(source), StoreDestination(LocalStore(staged))) as check:
        check()
        (source / "file").write_bytes(b"ab")
        with pytest.raises(StoreError, match=r"does not see .*source/file"):
            check()
        (source / "file").write_bytes(b"abc")
        (tmp_path / "staging/seen").write_bytes(b"another")
        with pytest.raises(StoreError, match=r"does not see .*staging"):
            check()
    assert not list(staged.iterdir()) and [path.name for path in (tmp_path / "staging").iterdir()] == ["output"]


def test_what_is_not_on_a_disk_is_not_asked_for():
    with prepare_shared_files_check(MemoryStore(), StoreDestination(MemoryStore())) as check:
        assert check == SharedFilesCheck()


# --- no schedule of completions and losses ever leaves the run with nothing to happen ---


@dataclass(eq=False)
class _SimulatedProcess:
    world: _World
    is_started: bool = False
    is_dead: bool = False
    queue: list[tuple[int, Future[Any]]] = field(default_factory=list)
    started: Future[Any] = field(default_factory=Future)

    @property
    def start(self) -> _Method:
        return _Method(lambda *_: self.started)

    @property
    def do(self) -> _Method:
        return _Method(self._queued)

    def _queued(self, item: int) -> Future[Any]:
        future: Future[Any] = Future()
        if self.is_dead:
            future.set_exception(ray.exceptions.RayActorError())
        else:
            self.queue.append((item, future))
        return future


@dataclass
class _Method:
    call: Callable[..., Future[Any]]

    def remote(self, *arguments: Any) -> _Method:
        return _Method(lambda: self.call(*arguments))

    def future(self) -> Future[Any]:
        return self.call()


@dataclass
class _World:
    """Processes and a board, in which something possible happens, by chance, whenever the driver waits for news."""

    chance: Random
    needs: list[set[int]]
    losses: int
    processes: list[_SimulatedProcess] = field(default_factory=list)
    told: set[int] = field(default_factory=set)
    news: list[Any] = field(default_factory=list)
    is_postponing: bool = False

    def new_process(self) -> _SimulatedProcess:
        self.processes.append(_SimulatedProcess(self))
        return self.processes[-1]

    def postpone(self) -> None:
        self.is_postponing = True

    def resume(self) -> None:
        self.is_postponing = False

    def put(self, news: Any) -> None:
        self.news.append(news)

    def get(self, timeout: float | None) -> Any:
        while not self.news:
            events = [*self._possible()]
            assert events, "something can still happen"
            self.chance.choice(events)()
        return self.news.pop(self.chance.randrange(len(self.news)) if self.chance.random() < 0.3 else 0)

    def _possible(self) -> Iterator[Callable[[], None]]:
        alive = [process for process in self.processes if not process.is_dead]
        for process in alive:
            if not process.is_started:
                yield lambda process=process: self._start(process)
            elif process.queue and (self._is_free(process.queue[0][0]) or self.is_postponing):
                yield lambda process=process: self._work(process)
            if self.losses and len(alive) > 1 and process.is_started:
                yield lambda process=process: self._lose(process)

    def _is_free(self, item: int) -> bool:
        return self.needs[item] <= self.told

    def _start(self, process: _SimulatedProcess) -> None:
        process.is_started = True
        process.started.set_result(TaskResult((None,)))

    def _work(self, process: _SimulatedProcess) -> None:
        item, future = process.queue.pop(0)
        if self._is_free(item):
            self.told.add(item)
            future.set_result(TaskResult((item,)))
        else:
            future.set_result(TaskResult((), PostponedError()))

    def _lose(self, process: _SimulatedProcess) -> None:
        self.losses -= 1
        process.is_dead = True
        if process.queue and self._is_free(process.queue[0][0]) and self.chance.random() < 0.5:
            self.told.add(process.queue[0][0])
        for _, future in process.queue:
            future.set_exception(ray.exceptions.RayActorError())


@settings(max_examples=100, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(1, 4), st.integers(0, 25), st.integers(0, 2))
def test_something_always_moves(chance, num_workers, num_items, losses):
    needs = [set(chance.sample(range(item), min(item, chance.randrange(4)))) for item in range(num_items)]
    world = _World(chance, needs, losses)
    runner = RayRunner(num_workers, lambda item: 1, chance.randrange(1, 9), at_ease, board=world)  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ray_runner, "new_process", world.new_process)
        patched.setattr(ray_runner, "_kill_processes", lambda processes: None)
        run: ray_runner._RayRun[int, int] = ray_runner._RayRun(runner, None, enumerate(range(num_items)), events=world)  # type: ignore[arg-type]
        for _ in range(num_workers):
            run.start_worker(world.new_process())
        assert sorted(run.iter_results()) == list(range(num_items))
    assert run.error is None and run.num_assigned == 0 and run.bytes_assigned == 0


def test_a_cluster_without_a_free_processor_is_said_to_be_one(cluster, monkeypatch):
    nobody = ray.remote(num_cpus=1, resources={"nowhere": 1})(RayTaskProcess)
    monkeypatch.setattr(ray_runner, "new_process", nobody.remote)
    monkeypatch.setattr(ray_runner, "START_SECONDS", 0.2)
    with closing(runner_of(1)) as runner, pytest.raises(StoreError, match="did not start a worker in 0 seconds"):
        list(runner.run(double, range(3)))

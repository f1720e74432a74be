"""Tasks on threads: together, to the end, and with nothing left behind."""

import threading
import time

import pytest

from ckpt_tools.errors import StoreError
from ckpt_tools.testing.runners import RunnerTests, double, fail_at_seven
from ckpt_tools.transfer.runners import TaskRunner
from ckpt_tools.transfer.runners.threads import ThreadRunner


@pytest.fixture(autouse=True)
def _no_thread_is_left():
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


class TestThreadRunner(RunnerTests):
    def make(self, num_workers: int) -> TaskRunner:
        return ThreadRunner(num_workers)


def test_as_many_work_at_a_time_as_it_has_workers():
    together = threading.Barrier(3, timeout=60)
    used = set(ThreadRunner(3).run(lambda item: together.wait() * 0 + threading.get_ident(), range(9)))
    assert len(used) == 3 and threading.get_ident() not in used


def test_the_first_error_wins_and_the_others_finish_what_they_began():
    begun, finished = threading.Barrier(2, timeout=60), []

    def work(item: int) -> int:
        begun.wait()
        if item == 0:
            raise StoreError("first")
        time.sleep(0.5)
        finished.append(item)
        raise StoreError("second")

    with pytest.raises(StoreError, match="first"):
        list(ThreadRunner(2).run(work, range(50)))
    assert finished == [1]


def test_no_item_is_started_after_an_error_or_an_early_end():
    started = []

    def work(item: int) -> int:
        started.append(item)
        if item < 1000:
            fail_at_seven(item)
        time.sleep(0.001)
        return item

    with pytest.raises(StoreError):
        list(ThreadRunner(2).run(work, range(1000)))
    running = ThreadRunner(2).run(work, range(1000, 2000))
    next(running)
    running.close()
    assert not any(thread.name.startswith("ckpt-tools") for thread in threading.enumerate())
    assert len(started) < 200  # the other thread works on until the error is known


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), MemoryError(), KeyError()])
def test_an_error_of_any_kind_ends_the_threads_whether_of_the_work_or_of_who_takes_the_results(error):
    def work(item: int) -> int:
        raise error

    with pytest.raises(type(error)):
        list(ThreadRunner(2).run(work, range(10)))
    with pytest.raises(type(error)):
        list(map(work, ThreadRunner(2).run(double, range(1000))))


def test_results_are_handed_out_while_others_are_in_the_making():
    taken = threading.Event()

    def work(item: int) -> int:
        assert item == 0 or taken.wait(timeout=60)
        return item

    results = ThreadRunner(2).run(work, range(2))
    assert next(results) == 0
    taken.set()
    assert list(results) == [1]

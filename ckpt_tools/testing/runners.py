"""Conformance tests of runners, as a class to inherit."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator

import pytest

from ckpt_tools.errors import StoreError
from ckpt_tools.transfer.runners import TaskRunner


def double(item: int) -> int:
    return 2 * item


def fail_at_seven(item: int) -> int:
    if item == 7:
        raise StoreError("disk full", path="f")
    return item


class RunnerTests(ABC):
    """Inherit it, and say how a runner is made."""

    @abstractmethod
    def make(self, num_workers: int) -> TaskRunner:
        """A runner with that many workers."""

    @pytest.mark.parametrize("num_workers", [1, 2, 5])
    @pytest.mark.parametrize("num_items", [0, 1, 3, 200])
    def test_every_item_has_one_result(self, num_workers: int, num_items: int) -> None:
        results = list(self.make(num_workers).run(double, range(num_items)))
        assert sorted(results) == [2 * item for item in range(num_items)]

    @pytest.mark.parametrize("num_workers", [1, 3])
    def test_an_error_is_raised_as_it_was(self, num_workers: int) -> None:
        with pytest.raises(StoreError, match="disk full") as caught:
            list(self.make(num_workers).run(fail_at_seven, range(100)))
        assert caught.value.path == "f"

    def test_results_from_before_an_error_still_come(self) -> None:
        running = self.make(1).run(fail_at_seven, range(100))
        assert [next(running) for _ in range(7)] == list(range(7))
        with pytest.raises(StoreError):
            next(running)

    def test_items_are_taken_as_they_are_needed(self) -> None:
        """A plan of millions of tasks is never a list."""
        taken = []

        def items() -> Iterator[int]:
            for item in range(100_000):
                taken.append(item)
                yield item

        running = self.make(2).run(fail_at_seven, items())
        with pytest.raises(StoreError):
            list(running)
        assert len(taken) < 1000

    def test_results_that_nobody_takes_hold_back_the_work(self) -> None:
        taken = []

        def items() -> Iterator[int]:
            for item in range(10_000):
                taken.append(item)
                yield item

        running = self.make(2).run(double, items())
        first = next(running)
        time.sleep(0.1)
        assert len(taken) < 100
        assert sorted([first, *running]) == [2 * item for item in range(10_000)]

    def test_an_error_of_the_items_themselves_is_raised(self) -> None:
        def items() -> Iterator[int]:
            yield 1
            raise StoreError("no more", path="items")

        with pytest.raises(StoreError, match="no more"):
            list(self.make(2).run(double, items()))

    def test_it_can_run_again(self) -> None:
        runner = self.make(2)
        with pytest.raises(StoreError):
            list(runner.run(fail_at_seven, range(100)))
        assert sorted(runner.run(double, range(3))) == [0, 2, 4]

    @pytest.mark.parametrize("num_workers", [0, -1])
    def test_without_workers_it_cannot_be_made(self, num_workers: int) -> None:
        with pytest.raises(ValueError, match="worker"):
            self.make(num_workers)

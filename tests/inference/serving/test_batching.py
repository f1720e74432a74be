"""Items that wait together are worked on together, and each gets its own result or error."""

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import wraps
from typing import Any

import pytest

from inference.serving.batching import Batcher

pytestmark = pytest.mark.quick


def in_a_loop(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """A test that is a coroutine."""
    return wraps(test)(lambda: asyncio.run(test()))


class Work:
    """Doubles numbers, batch by batch, and only while it may."""

    def __init__(self) -> None:
        self.may_go_on = threading.Event()
        self.has_begun = threading.Event()
        self.batches: list[list[int]] = []

    def __call__(self, items: Sequence[int]) -> list[int]:
        self.has_begun.set()
        self.may_go_on.wait(10)
        self.batches.append(list(items))
        if 13 in items:
            raise ValueError("thirteen")
        return [2 * item for item in items]


async def begun(work: Work, batcher: Batcher[int, int]) -> asyncio.Task[int]:
    """A first item that the work holds on to, so that the next ones have to wait."""
    first = asyncio.create_task(batcher.submit(0))
    await asyncio.to_thread(work.has_begun.wait, 10)
    return first


async def waiting(batcher: Batcher[int, int], *items: int) -> list[asyncio.Task[int]]:
    tasks = [asyncio.create_task(batcher.submit(item)) for item in items]
    await asyncio.sleep(0)
    return tasks


@in_a_loop
async def test_what_waits_is_worked_on_together_and_each_gets_its_own_result():
    work = Work()
    with Batcher(work, max_batch=3, max_waiting=10) as batcher:
        first = await begun(work, batcher)
        others = await waiting(batcher, 1, 2, 3, 4)
        assert batcher.num_waiting == 4
        work.may_go_on.set()
        assert await asyncio.gather(first, *others) == [0, 2, 4, 6, 8]
    assert work.batches == [[0], [1, 2, 3], [4]]


@in_a_loop
async def test_a_full_batch_does_not_wait_for_the_one_before():
    work, seen = Work(), []
    with Batcher(work, max_batch=2, max_waiting=10, on_execution=seen.append, num_threads=2) as batcher:
        first = await begun(work, batcher)
        others = await waiting(batcher, 1)
        await asyncio.sleep(0.1)
        assert batcher.num_waiting == 1
        others += await waiting(batcher, 2, 3)
        while batcher.num_waiting > 1:
            await asyncio.sleep(0.001)
        work.may_go_on.set()
        assert await asyncio.gather(first, *others) == [0, 2, 4, 6]
    assert sorted(work.batches) == [[0], [1, 2], [3]]
    assert sum(each.num_items for each in seen) == 4


@in_a_loop
async def test_an_error_is_for_its_item_and_not_for_its_company():
    work = Work()
    with Batcher(work, max_batch=2, max_waiting=5) as batcher:
        first = await begun(work, batcher)
        others = await waiting(batcher, 13, 1, 2)
        work.may_go_on.set()
        results = await asyncio.gather(first, *others, return_exceptions=True)
    assert [type(result) for result in results] == [int, ValueError, int, int]


@in_a_loop
async def test_an_idle_model_waits_for_more_as_long_as_it_is_told():
    work = Work()
    work.may_go_on.set()
    with Batcher(work, max_batch=3, max_waiting=10, max_delay=0.3) as batcher:
        began = time.monotonic()
        assert await asyncio.gather(*await waiting(batcher, 1, 2)) == [2, 4]
        assert time.monotonic() - began >= 0.3
        # A full batch does not wait, which would never end.
        batcher.max_delay = 1e6
        assert await asyncio.gather(*await waiting(batcher, 3, 4, 5)) == [6, 8, 10]
    assert work.batches == [[1, 2], [3, 4, 5]]

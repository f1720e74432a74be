"""A board of checksums that the workers of a Ray cluster share: one process, beside the one that assigns tasks.

A worker that needs a checksum waits on the event loop of that process, until the checksum, an error, or ``postpone``.
The last is for a lost worker: tasks that wait for its parts may occupy all workers that could repeat them. They are
given back, and everything is assigned again in order (``runners.ray``).
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ckpt_tools.errors import CkptError, StoreError
from ckpt_tools.transfer.crc_board import PartCrc, combined

Range = tuple[int, int]

ANSWER_RANGES = 4096
"""Checksums in one answer: those that follow the one asked for. The directory of a file of many records asks for each
in turn, and a question costs half a millisecond."""

MAX_WAITING = 100_000
"""Questions that may be open at a time, more than any cluster has workers: above it, no message could be sent."""

MAX_UNHEARD = 1000
"""Unanswered messages of the process that assigns tasks: it sends a whole journal at once."""


class PostponedError(Exception):
    """A worker was lost, perhaps with bytes that this task waits for; it is to be handed out again."""


@dataclass(slots=True)
class RayBoard:
    """Client of the board, for any process. A worker waits until its post has arrived, because after the receipt it is
    not repeated."""

    notices: Any
    """The handle of ``ChecksumActor``."""
    max_unheard: int = MAX_UNHEARD
    _unheard: deque[Any] = field(default_factory=deque, repr=False)
    _known: dict[tuple[int, Range], int] = field(default_factory=dict, repr=False)

    def post(self, file: int, parts: Iterable[PartCrc]) -> None:
        told = tuple(parts)
        self._known = {(file, part.covers): part.value for part in told if part.is_whole}
        if told:
            self._unheard.append(self.notices.post.remote(file, told))
        while len(self._unheard) > self.max_unheard:
            _answer(self._unheard.popleft())

    def value(self, file: int, covers: Range) -> int:
        key = (file, covers)
        if key not in self._known:
            answer = _answer(self.notices.values.remote(file, covers))
            if isinstance(answer, BaseException):
                raise answer
            self._known.update(((file, each), value) for each, value in answer)
        return self._known[key]

    def fail(self, error: BaseException) -> None:
        if not isinstance(error, PostponedError):
            _answer(self.notices.fail.remote(sendable(error)))

    def forget(self, file: int) -> None:
        self.notices.forget.remote(file)

    def postpone(self) -> None:
        """Raise PostponedError in every call that waits or would wait, until ``resume``."""
        _answer(self.notices.postpone.remote(True))

    def resume(self) -> None:
        """Waiting is safe again."""
        _answer(self.notices.postpone.remote(False))

    def close(self) -> None:
        """End its process."""
        import ray

        ray.kill(self.notices)

    def __reduce__(self) -> tuple[object, ...]:
        return RayBoard, (self.notices, 0)


def open_board() -> RayBoard:
    """A new, empty board on this node: were it on another, one more loss would end the run."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    options = {"num_cpus": 0, "max_concurrency": MAX_WAITING, "scheduling_strategy": here}
    return RayBoard(ray.remote(**options)(ChecksumActor).remote())


def _answer(ref: Any) -> Any:
    import ray

    try:
        return ray.get(ref)
    except ray.exceptions.RayActorError as error:
        raise StoreError("the process that keeps the checksums of this run was lost; run again") from error


def sendable(error: BaseException) -> BaseException:
    """The error itself if any process can rebuild it, as those of ckpt-tools and Python; else its message."""
    is_plain = type(error).__module__ == "builtins" and all(isinstance(each, str | int) for each in error.args)
    if is_plain or isinstance(error, CkptError | PostponedError):
        return error
    return RuntimeError(f"{type(error).__name__}: {error}")


@dataclass(slots=True)
class _FileChecksums:
    """Checksums of one file: ranges with missing parts, and values of complete ranges."""

    parts: dict[Range, dict[int, PartCrc]] = field(default_factory=dict)
    missing: dict[Range, int] = field(default_factory=dict)
    values: dict[Range, int] = field(default_factory=dict)
    in_order: list[Range] = field(default_factory=list)

    def add(self, part: PartCrc) -> bool:
        """True if the part was the last of its range."""
        covers = part.covers
        known = self.parts.setdefault(covers, {})
        if covers in self.values or part.start in known:
            return False
        known[part.start] = part
        self.missing[covers] = self.missing.get(covers, covers[1] - covers[0]) - (part.stop - part.start)
        if self.missing[covers] == 0:
            self._complete(covers)
        return covers in self.values

    def _complete(self, covers: Range) -> None:
        del self.missing[covers]
        self.values[covers] = combined(self.parts.pop(covers).values())
        insort(self.in_order, covers)

    def following(self, covers: Range) -> list[tuple[Range, int]]:
        first = bisect_left(self.in_order, covers)
        return [(each, self.values[each]) for each in self.in_order[first : first + ANSWER_RANGES]]


class ChecksumActor:
    """The process of a board. All of it runs on one event loop, so that nothing is locked."""

    def __init__(self) -> None:
        self._files: dict[int, _FileChecksums] = {}
        self._news: dict[tuple[int, Range], asyncio.Event] = {}
        self._error: BaseException | None = None
        self._is_postponing = False

    async def post(self, file: int, parts: tuple[PartCrc, ...]) -> None:
        notices = self._files.setdefault(file, _FileChecksums())
        for part in parts:
            if notices.add(part) and (file, part.covers) in self._news:
                self._news.pop((file, part.covers)).set()

    async def values(self, file: int, covers: Range) -> list[tuple[Range, int]] | BaseException:
        """The value of ``covers`` and those that follow it, once it is known; or why it will not be."""
        notices = self._files.setdefault(file, _FileChecksums())
        while covers not in notices.values:
            if self._error is not None:
                return self._error
            if self._is_postponing:
                return PostponedError()
            await self._news.setdefault((file, covers), asyncio.Event()).wait()
        return notices.following(covers)

    async def fail(self, error: BaseException) -> None:
        self._error = self._error or error
        self._wake_all()

    async def postpone(self, is_postponing: bool) -> None:
        self._is_postponing = is_postponing
        self._wake_all()

    async def forget(self, file: int) -> None:
        self._files.pop(file, None)

    def _wake_all(self) -> None:
        news, self._news = self._news, {}
        for event in news.values():
            event.set()

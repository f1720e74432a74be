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
from ckpt_tools.transfer.crc_board import PartCrc, combine_crcs

CoveredRange = tuple[int, int]

RANGES_PER_ANSWER = 4096
"""Checksums in one answer: the requested one and those that follow it. The directory of a file of many records needs
each in turn, and a request costs half a millisecond."""

MAX_OPEN_CALLS = 100_000
"""Requests that may be open at a time, more than any cluster has workers: above it, no message could be sent."""

MAX_UNANSWERED = 1000
"""Unanswered messages of the process that assigns tasks: it sends a whole journal at once."""


class PostponedError(Exception):
    """A worker was lost, perhaps with bytes that this task waits for; it is to be handed out again."""


@dataclass(slots=True)
class RayChecksumBoard:
    """Client of the board, for any process.

    A worker waits until its post has arrived (``max_unanswered`` is 0 there): once its receipt is taken, the task and
    its post are not repeated.
    """

    actor: Any
    """The handle of ``ChecksumActor``."""
    max_unanswered: int = MAX_UNANSWERED
    _unanswered: deque[Any] = field(default_factory=deque, repr=False)
    _known_checksums: dict[tuple[int, CoveredRange], int] = field(default_factory=dict, repr=False)

    def post_checksums(self, file: int, parts: Iterable[PartCrc]) -> None:
        posted_parts = tuple(parts)
        self._known_checksums = {(file, part.covered_range): part.crc for part in posted_parts if part.is_whole}
        if posted_parts:
            self._unanswered.append(self.actor.post.remote(file, posted_parts))
        while len(self._unanswered) > self.max_unanswered:
            _get_answer(self._unanswered.popleft())

    def wait_for_checksum(self, file: int, covers: CoveredRange) -> int:
        key = (file, covers)
        if key not in self._known_checksums:
            answer = _get_answer(self.actor.values.remote(file, covers))
            if isinstance(answer, BaseException):
                raise answer
            self._known_checksums.update(((file, each), value) for each, value in answer)
        return self._known_checksums[key]

    def fail_waiting_workers(self, error: BaseException) -> None:
        if not isinstance(error, PostponedError):
            _get_answer(self.actor.fail.remote(make_error_sendable(error)))

    def forget_file(self, file: int) -> None:
        self.actor.forget.remote(file)

    def postpone(self) -> None:
        """Raise PostponedError in every call that waits or would wait, until ``resume``."""
        _get_answer(self.actor.postpone.remote(True))

    def resume(self) -> None:
        """Waiting is safe again."""
        _get_answer(self.actor.postpone.remote(False))

    def close(self) -> None:
        """End its process."""
        import ray

        ray.kill(self.actor)

    def __reduce__(self) -> tuple[object, ...]:
        return RayChecksumBoard, (self.actor, 0)


def open_board() -> RayChecksumBoard:
    """A new, empty board on this node: were it on another, one more loss would end the run."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    this_node = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    options = {"num_cpus": 0, "max_concurrency": MAX_OPEN_CALLS, "scheduling_strategy": this_node}
    return RayChecksumBoard(ray.remote(**options)(ChecksumActor).remote())


def _get_answer(ref: Any) -> Any:
    import ray

    try:
        return ray.get(ref)
    except ray.exceptions.RayActorError as error:
        raise StoreError("the process that keeps the checksums of this run was lost; run again") from error


def make_error_sendable(error: BaseException) -> BaseException:
    """The error itself if any process can rebuild it, as those of ckpt-tools and Python; else its message."""
    is_builtin = type(error).__module__ == "builtins" and all(isinstance(each, str | int) for each in error.args)
    if is_builtin or isinstance(error, CkptError | PostponedError):
        return error
    return RuntimeError(f"{type(error).__name__}: {error}")


@dataclass(slots=True)
class _FileChecksums:
    """Checksums of one file: ranges with missing parts, and values of complete ranges."""

    parts: dict[CoveredRange, dict[int, PartCrc]] = field(default_factory=dict)
    missing_bytes: dict[CoveredRange, int] = field(default_factory=dict)
    values: dict[CoveredRange, int] = field(default_factory=dict)
    ranges_in_order: list[CoveredRange] = field(default_factory=list)

    def add_part(self, part: PartCrc) -> bool:
        """True if the part was the last of its range."""
        covers = part.covered_range
        known_parts = self.parts.setdefault(covers, {})
        if covers in self.values or part.start in known_parts:
            return False
        known_parts[part.start] = part
        self.missing_bytes[covers] = self.missing_bytes.get(covers, covers[1] - covers[0]) - (part.stop - part.start)
        if self.missing_bytes[covers]:
            return False
        del self.missing_bytes[covers]
        self.values[covers] = combine_crcs(self.parts.pop(covers).values())
        insort(self.ranges_in_order, covers)
        return True

    def list_values_from(self, covers: CoveredRange) -> list[tuple[CoveredRange, int]]:
        first = bisect_left(self.ranges_in_order, covers)
        return [(each, self.values[each]) for each in self.ranges_in_order[first : first + RANGES_PER_ANSWER]]


class ChecksumActor:
    """The process of a board. All of it runs on one event loop, so that nothing is locked."""

    def __init__(self) -> None:
        self._files: dict[int, _FileChecksums] = {}
        self._news: dict[tuple[int, CoveredRange], asyncio.Event] = {}
        self._error: BaseException | None = None
        self._is_postponing = False

    async def post(self, file: int, parts: tuple[PartCrc, ...]) -> None:
        checksums = self._files.setdefault(file, _FileChecksums())
        for part in parts:
            if checksums.add_part(part) and (file, part.covered_range) in self._news:
                self._news.pop((file, part.covered_range)).set()

    async def values(self, file: int, covers: CoveredRange) -> list[tuple[CoveredRange, int]] | BaseException:
        """The value of ``covers`` and those that follow it, once it is known; or why it will not be."""
        checksums = self._files.setdefault(file, _FileChecksums())
        while covers not in checksums.values:
            if self._error is not None:
                return self._error
            if self._is_postponing:
                return PostponedError()
            await self._news.setdefault((file, covers), asyncio.Event()).wait()
        return checksums.list_values_from(covers)

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

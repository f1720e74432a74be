"""Restarts of a run on Ray after failures, with fewer workers if machines were lost.

Ray Train could restart workers too, but with any number that fits; a run needs one that divides its batch and its
groups of workers. So each attempt is a separate ``TorchTrainer``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import count
from typing import Any, TypeVar

import ray
import torch
from ray.util.queue import Queue
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ckpt_tools.errors import UsageError

from ..checkpoints.run_folder import restarted
from ..config.train_config import TrainConfig
from .failures import Failure

ANSWER_SECONDS = 60.0  # time for a node to start a process. Ray detects a lost node in half of it.
WAIT_SECONDS = 5.0
LOOK_SECONDS = 1.0  # time between two looks for a request to stop

Outcome = TypeVar("Outcome")
Say = Callable[[str], None]


class AttemptFailedError(Exception):
    """A worker, or all of an attempt because of it, has failed."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure)  # what unpickling passes on
        self.failure = failure

    def __str__(self) -> str:
        return self.failure.sentence


def cause_of(failures: Mapping[int, BaseException]) -> Failure:
    """The failure of the rank that the others fail because of: one whose process is gone, else one that lost no
    connection, the lowest first. Ray does not tell the signal, nor which failure of a poll was first."""
    found = (_failure(*each) for each in failures.items())
    return min(found, key=lambda each: (not each.is_end, each.has_lost_another, each.rank))


def _failure(rank: int, error: BaseException) -> Failure:
    if isinstance(error, AttemptFailedError):
        return error.failure
    cause = getattr(error, "health_check_failure", None)
    return Failure.of(rank, error) if cause is None else Failure.of_end(rank, cause)


def with_restarts(
    config: TrainConfig, attempt: Callable[[TrainConfig], Outcome], say: Say, *, on_gpus: bool = False
) -> tuple[TrainConfig, Outcome]:
    """Result of ``attempt`` and the configuration that succeeded. Raises CkptError after the last attempt."""
    current = config
    for number in count(1):
        try:
            return current, attempt(current)
        except AttemptFailedError as error:
            if number > config.max_restarts:
                raise error.failure.to_error(config.out) from error
            say(f"restart {number} of {config.max_restarts}: {error}")
            current = restarted(_for_the_next(config, say, on_gpus=on_gpus))
    raise AssertionError("the loop returns or raises")


def _for_the_next(config: TrainConfig, say: Say, *, on_gpus: bool) -> TrainConfig:
    """Wait for machines. Without ``min_workers``, Ray itself waits until all workers fit."""
    if config.min_workers is None:
        return config
    found = on_what_is_left(config, room := room_for_workers(on_gpus=on_gpus))
    if found is None:
        say(f"there is room for {room} of at least {config.min_workers} workers: waiting for machines")
    while found is None:
        time.sleep(WAIT_SECONDS)
        found = on_what_is_left(config, room_for_workers(on_gpus=on_gpus))
    say(f"continuing with {found.num_workers} of {config.num_workers} workers")
    return found


def on_what_is_left(config: TrainConfig, room: int) -> TrainConfig | None:
    """The run with the most workers that ``room`` has and the batch allows; None below ``min_workers``."""
    assert config.min_workers is not None
    for workers in range(min(room, config.num_workers), config.min_workers - 1, -1):
        with suppress(UsageError):
            return replace(config, num_workers=workers)
    return None


def room_for_workers(*, on_gpus: bool) -> int:
    """Number of workers for which the responding nodes have a CPU and, if they need it, a GPU."""
    needed = ("CPU", "GPU") if on_gpus else ("CPU",)
    return sum(int(min(node["Resources"].get(name, 0) for name in needed)) for node in _answering())


def _answering() -> list[dict[str, Any]]:
    """Nodes that respond: a lost node counts as alive until Ray has missed several heartbeats."""
    asked = {_ask(node["NodeID"]): node for node in ray.nodes() if node["Alive"]}
    done, late = ray.wait(list(asked), num_returns=len(asked), timeout=ANSWER_SECONDS)
    for each in late:
        ray.cancel(each, force=True)
    return [asked[each] for each in done if _succeeded(each)]


def _ask(node_id: str) -> Any:
    def answer() -> None:
        """Does nothing. As a function of the module it would import torch in its process."""

    return ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=on_node(node_id))(answer).remote()


def on_node(node_id: str) -> NodeAffinitySchedulingStrategy:
    return NodeAffinitySchedulingStrategy(node_id, soft=False)


def on_this_node() -> NodeAffinitySchedulingStrategy:
    """Scheduling on the node of the command, for actors that live as long as it."""
    return on_node(ray.get_runtime_context().get_node_id())


def _succeeded(task: Any) -> bool:
    try:
        ray.get(task)
    except ray.exceptions.RayError:
        return False
    return True


def is_asked(stop: Queue) -> Callable[[], bool]:
    """A function that tells whether ``stop`` holds a request, without a remote call. Only the first rank must know."""
    asked = threading.Event()
    if torch.distributed.get_rank() == 0:
        threading.Thread(target=_wait, args=(stop, asked), daemon=True).start()
    return asked.is_set


def _wait(stop: Queue, asked: threading.Event) -> None:
    """The request stays in the queue, for the ranks of a restart; a ``get`` of a killed rank would take it away."""
    with suppress(ray.exceptions.RayError):
        while stop.empty():
            time.sleep(LOOK_SECONDS)
        asked.set()

"""Restarts of a run on Ray after failures, with fewer workers if machines were lost.

Ray Train could restart workers too, but with any number that fits; a run needs one that divides its batch and its
groups of workers. So each attempt is a separate ``TorchTrainer``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import count
from typing import Any, TypeVar

import ray
import torch
from ray.util.placement_group import PlacementGroup
from ray.util.queue import Queue
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ckpt_tools.errors import UsageError

from ..checkpoints.run_folder import config_after_failure
from ..config.train_config import TrainConfig
from .failures import RankFailure

ANSWER_SECONDS = 60.0  # time for a node to start a process. Ray detects a lost node in half of it.
WAIT_SECONDS = 5.0
LOOK_SECONDS = 1.0  # time between two looks for a request to stop

Outcome = TypeVar("Outcome")
PrintLine = Callable[[str], None]


class AttemptFailedError(Exception):
    """A worker, or all of an attempt because of it, has failed."""

    def __init__(self, failure: RankFailure) -> None:
        super().__init__(failure)  # what unpickling passes on
        self.failure = failure

    def __str__(self) -> str:
        return self.failure.sentence


def find_cause(failures: Mapping[int, BaseException]) -> RankFailure:
    """The failure of the rank that the others fail because of: one whose process is gone, else one that lost no
    connection, the lowest first. Ray does not tell the signal, nor which failure of a poll was first."""
    of_ranks = (_to_failure(*each) for each in failures.items())
    return min(of_ranks, key=lambda each: (not each.is_end, each.has_lost_another, each.rank))


def _to_failure(rank: int, error: BaseException) -> RankFailure:
    if isinstance(error, AttemptFailedError):
        return error.failure
    lost = getattr(error, "health_check_failure", None)
    return RankFailure.from_lost_process(rank, lost) if lost else RankFailure.from_error(rank, error)


def run_with_restarts(
    config: TrainConfig, attempt: Callable[[TrainConfig], Outcome], print_line: PrintLine, *, on_gpus: bool = False
) -> tuple[TrainConfig, Outcome]:
    """Result of ``attempt`` and the configuration that succeeded. Raises CkptError after the last attempt."""
    current = config
    for number in count(1):
        try:
            return current, attempt(current)
        except AttemptFailedError as error:
            if number > config.max_restarts:
                raise error.failure.to_error(config.out) from error
            print_line(f"restart {number} of {config.max_restarts}: {error}")
            current = config_after_failure(_wait_for_room(config, print_line, on_gpus=on_gpus))
    raise AssertionError("the loop returns or raises")


def _wait_for_room(config: TrainConfig, print_line: PrintLine, *, on_gpus: bool) -> TrainConfig:
    """Wait for machines. Without ``min_workers``, Ray itself waits until all workers fit."""
    if config.min_workers is None:
        return config
    is_said = False
    while (smaller := shrink_to_room(config, room := _count_room(on_gpus=on_gpus))) is None:
        if not is_said:
            print_line(f"there is room for {room} of at least {config.min_workers} workers: waiting for machines")
        is_said = True
        time.sleep(WAIT_SECONDS)
    print_line(f"continuing with {smaller.num_workers} of {config.num_workers} workers")
    return smaller


def shrink_to_room(config: TrainConfig, room: int) -> TrainConfig | None:
    """The run with the most workers that ``room`` has and the batch allows; None below ``min_workers``."""
    assert config.min_workers is not None
    for workers in range(min(room, config.num_workers), config.min_workers - 1, -1):
        with suppress(UsageError):
            return replace(config, num_workers=workers)
    return None


def _count_room(*, on_gpus: bool) -> int:
    """Number of workers for which the nodes that respond have a CPU and, if they need it, a GPU. A lost node counts as
    alive until Ray has missed several heartbeats."""

    def do_nothing() -> None:
        """As a function of the module it would import torch in its process."""

    asking = ray.remote(num_cpus=0, max_retries=0)(do_nothing)
    nodes = [node for node in ray.nodes() if node["Alive"]]
    answers = [asking.options(scheduling_strategy=schedule_on_node(node["NodeID"])).remote() for node in nodes]
    needed = ("CPU", "GPU") if on_gpus else ("CPU",)
    rooms = [int(min(node["Resources"].get(name, 0) for name in needed)) for node in nodes]
    return sum(room for room, answer in zip(rooms, answers, strict=True) if _has_answered(answer))


def _has_answered(task: Any) -> bool:
    try:
        ray.get(task, timeout=ANSWER_SECONDS)
    except ray.exceptions.RayError:
        return False
    return True


def list_placement_groups() -> set[str]:
    """Identifiers of the placement groups that this driver, or an actor for it, has made and not removed. Empty in an
    actor, as in a trial of Ray Tune: other trials make theirs for the same driver."""
    context = ray.get_runtime_context()
    if context.get_actor_id() is not None:
        return set()
    table = ray.util.placement_group_table()
    job = context.get_job_id()
    return {name for name, group in table.items() if name.endswith(job) and group["state"] != "REMOVED"}


def remove_placement_groups(names: Iterable[str]) -> None:
    """Remove what a failed attempt has left. If a worker is lost just before its training begins, Ray 2.60 keeps the
    placement group of the workers, and none of the next attempt would ever fit beside it."""
    for name in names:
        ray.util.remove_placement_group(PlacementGroup(ray.PlacementGroupID(bytes.fromhex(name))))


def schedule_on_node(node_id: str) -> NodeAffinitySchedulingStrategy:
    return NodeAffinitySchedulingStrategy(node_id, soft=False)


def schedule_on_this_node() -> NodeAffinitySchedulingStrategy:
    """Scheduling on the node of the command, for actors that live as long as it."""
    return schedule_on_node(ray.get_runtime_context().get_node_id())


def watch_stop_requests(stop: Queue) -> Callable[[], bool]:
    """A function that tells whether ``stop`` holds a request, without a remote call. Only the first rank must know. The
    request stays in the queue, for the ranks of a restart; a ``get`` of a killed rank would take it away."""
    is_requested = threading.Event()

    def wait_for_request() -> None:
        with suppress(ray.exceptions.RayError):
            while stop.empty():
                time.sleep(LOOK_SECONDS)
            is_requested.set()

    if torch.distributed.get_rank() == 0:
        threading.Thread(target=wait_for_request, daemon=True).start()
    return is_requested.is_set

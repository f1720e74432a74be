"""One Ray cluster for all tests that need one: starting it takes ten times as long as most of them."""

import os
from typing import Any

import psutil
import pytest

os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import ray
from ray.cluster_utils import Cluster

_STARTED: list[Cluster] = []
"""Every module that imports the fixture has one of its own; the cluster is the first one's."""

HEALTH = {"health_check_initial_delay_ms": 500, "health_check_period_ms": 500, "health_check_failure_threshold": 3}
"""A lost node is noticed by the messages that it no longer answers: after 2 seconds here, 15 and more by default."""

NODE = {"include_dashboard": False, "object_store_memory": 80 << 20}


@pytest.fixture(scope="session")
def cluster():
    """A node of CPUs enough for all that tests keep, to which this process is connected; tests may add others."""
    if _STARTED:
        yield _STARTED[0]
        return
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 16, "_system_config": HEALTH, **NODE})
    ray.init(address=made.address, logging_level="ERROR", log_to_driver=False)
    _STARTED.append(made)
    yield made
    _STARTED.clear()
    ray.shutdown()
    made.shutdown()


def processes(cluster: Cluster, node: Any = None) -> list[psutil.Process]:
    """The workers of a run on a node, the cluster's first if none is named."""
    (raylet,) = (node or cluster.head_node).all_processes["raylet"]
    children = psutil.Process(raylet.process.pid).children(recursive=True)
    return [child for child in children if _is_worker(child)]


def _is_worker(process: psutil.Process) -> bool:
    try:
        return "ray::RayTaskProcess" in " ".join(process.cmdline())
    except psutil.Error:  # gone meanwhile
        return False

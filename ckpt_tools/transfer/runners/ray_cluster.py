"""The connection to a Ray cluster: one that runs, or one of this machine's processors for as long as it is needed."""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from typing import Any

from ckpt_tools.core.option_names import format_option
from ckpt_tools.errors import StoreError, UsageError
from ckpt_tools.process.guard import guard_processes
from ckpt_tools.process.signals import block_signals_while_starting, defer_signals

OBJECT_STORE_BYTES = 256 << 20
"""Object store memory of a cluster that is started here. Only the plan passes through it; Ray's default is 30 % of the
memory."""

ANSWER_SECONDS = 10.0
"""Seconds for a cluster's port to answer."""


@contextmanager
def connect_to_cluster(address: str | None, num_workers: int) -> Iterator[None]:
    """Ray, connected to the cluster at ``address`` or in ``RAY_ADDRESS``, else to one of ``num_workers`` CPUs that is
    started here and stopped afterwards. Where this process is connected already, that connection is used and kept.

    Raises:
        UsageError: Ray is not installed, or the address is a client's. StoreError: there is no cluster to be reached.
    """
    ray = _import_ray()
    if ray.is_initialized():
        yield
        return
    cluster_address = address or os.environ.get("RAY_ADDRESS")
    # Ray prints on stdout what became of its processes, where results belong.
    with redirect_stdout(sys.stderr):
        with nullcontext(nullcontext) if _is_running_cluster(cluster_address) else guard_processes() as marking:
            try:
                with marking():
                    _initialize_ray(ray, cluster_address, num_workers)
                yield
            finally:
                with defer_signals():
                    ray.shutdown()


def _is_running_cluster(address: str | None) -> bool:
    """True if the cluster at ``address`` runs already; else it is started here."""
    return address not in (None, "local")


def _import_ray() -> Any:
    # Ray says in a warning what it will do with accelerators one day; none is asked for here.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
    except ImportError as error:
        raise UsageError(
            f"{format_option('runner', 'ray')} needs Ray; install it with: pip install 'ckpt-tools[ray]'"
        ) from error
    return ray


def _initialize_ray(ray: Any, address: str | None, num_workers: int) -> None:
    if address is not None and address.startswith("ray://"):
        raise UsageError(
            f"{format_option('address', address)} is a Ray client's: run on a node of the cluster, "
            f"with {format_option('address', 'auto')}"
        )
    if address not in (None, "auto", "local"):
        # Ray itself would try for 45 seconds, and then say less.
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host, int(port)), timeout=ANSWER_SECONDS).close()
        except (OSError, ValueError) as error:
            raise StoreError(f"no Ray cluster could be reached at {address}: {error}") from error
    local_options = {"num_cpus": num_workers, "include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES}
    options = {"address": address} if _is_running_cluster(address) else {"address": "local", **local_options}
    try:
        with block_signals_while_starting():
            ray.init(**options, logging_level=logging.ERROR, log_to_driver=False)
    except (ConnectionError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise StoreError(f"no Ray cluster could be reached at {options['address']}: {reason}") from error


def count_cluster_cpus() -> int:
    """CPUs of the whole cluster, at least 1."""
    import ray

    return max(1, int(ray.cluster_resources().get("CPU", 0)))

"""The connection to a Ray cluster: one that runs, or one of this machine's processors for as long as it is needed."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from functools import cache
from typing import Any

from ckpt_tools.errors import StoreError, UsageError
from ckpt_tools.signals import STOPPING, heeded, held_back

OBJECT_STORE_BYTES = 256 << 20
"""Of a cluster that is started here. The plan alone goes through it; Ray's own habit is 30 % of the memory."""

ANSWER_SECONDS = 10.0
"""What a cluster's port may take to answer."""


@contextmanager
def connected(address: str | None, num_workers: int) -> Iterator[None]:
    """Ray, connected to the cluster at ``address`` or in ``RAY_ADDRESS``, else to one of ``num_workers`` CPUs that is
    started here and stopped afterwards. Where this process is connected already, that connection is used and kept.

    Raises:
        UsageError: Ray is not installed, or the address is a client's. StoreError: there is no cluster to be reached.
    """
    ray = _imported()
    if ray.is_initialized():
        yield
        return
    # Ray prints on stdout what became of its processes, where results belong.
    with redirect_stdout(sys.stderr):
        try:
            _connect(ray, address or os.environ.get("RAY_ADDRESS"), num_workers)
            yield
        finally:
            with held_back():
                ray.shutdown()


def _imported() -> Any:
    # Ray says in a warning what it will do with accelerators one day; none is asked for here.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
    except ImportError as error:
        raise UsageError("--runner ray needs Ray; install it with: pip install 'ckpt-tools[ray]'") from error
    return ray


def _connect(ray: Any, address: str | None, num_workers: int) -> None:
    if address is not None and address.startswith("ray://"):
        raise UsageError(
            f"--address {address} is for Ray Client, which is not supported; "
            "run on a node of the cluster with --address auto"
        )
    if address not in (None, "auto", "local"):
        _look_for(address)
    local = {"num_cpus": num_workers, "include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES}
    options = {"address": address} if address not in (None, "local") else {"address": "local", **local}
    try:
        with _deaf_to_signals():
            ray.init(**options, logging_level=logging.ERROR, log_to_driver=False)
    except (ConnectionError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise StoreError(f"no Ray cluster could be reached at {options['address']}: {reason}") from error


_is_connecting = threading.Event()


@contextmanager
def _deaf_to_signals() -> Iterator[None]:
    """Signals that ask this process to end wait while Ray connects, and Ray's own handlers do not outlive that.

    Ray would exit at SIGTERM, and a library of its own abort with a stack. An exception in the middle of starting
    would leave processes that nobody knows. These must be able to hear, so that each child takes signals again.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.getsignal(number) for number in STOPPING}
    _hear_in_children()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, heeded())
    _is_connecting.set()
    try:
        yield
    finally:
        _is_connecting.clear()
        for number, handler in handlers.items():
            if handler is not None:
                signal.signal(number, handler)
        with held_back():
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


@cache
def _hear_in_children() -> None:
    def hear() -> None:
        if _is_connecting.is_set():
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)

    os.register_at_fork(after_in_child=hear)


def _look_for(address: str) -> None:
    """Ray itself tries for 45 seconds, and then says less."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=ANSWER_SECONDS).close()
    except (OSError, ValueError) as error:
        raise StoreError(f"no Ray cluster could be reached at {address}: {error}") from error


def num_cpus() -> int:
    """CPUs of the whole cluster, at least 1."""
    import ray

    return max(1, int(ray.cluster_resources().get("CPU", 0)))

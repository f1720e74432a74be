"""Actor through which the command of a run on Ray sends the request to stop to its workers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import ray

from .ray_restarts import on_this_node

Control = Any
"""Handle of a :class:`RunControl`; Ray's handles are untyped."""


class RunControl:
    """Actor with the request to save and stop, and the number of starts of the workers."""

    def __init__(self) -> None:
        self._asked = asyncio.Event()
        self._starts = 0

    async def begin(self) -> int:
        self._starts += 1
        return self._starts

    async def ask(self) -> None:
        self._asked.set()

    async def until_asked(self) -> None:
        await self._asked.wait()


def new_control() -> Control:
    return ray.remote(num_cpus=0, scheduling_strategy=on_this_node())(RunControl).remote()


def is_asked(control: Control) -> Callable[[], bool]:
    """A function that tells whether there is a request to stop, without a remote call."""
    asked = threading.Event()
    threading.Thread(target=_wait, args=(control, asked), daemon=True).start()
    return asked.is_set


def _wait(control: Control, asked: threading.Event) -> None:
    with suppress(ray.exceptions.RayError):
        ray.get(control.until_asked.remote())
        asked.set()

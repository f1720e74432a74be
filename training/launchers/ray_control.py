"""How the command that started a run on Ray speaks to its workers, on whichever machines they are."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import ray

from .ray_restarts import on_this_node

Control = Any
"""The handle of a :class:`RunControl`; Ray's handles have no useful type."""


class RunControl:
    """An actor of the run: whether it is asked to save and stop, and how often its workers were started."""

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
    """A function that says, without asking anybody, whether the run is to stop."""
    asked = threading.Event()
    threading.Thread(target=_wait, args=(control, asked), daemon=True).start()
    return asked.is_set


def _wait(control: Control, asked: threading.Event) -> None:
    with suppress(ray.exceptions.RayError):
        ray.get(control.until_asked.remote())
        asked.set()

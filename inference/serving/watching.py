"""A run's folder is watched: a newer complete checkpoint is loaded beside the one that answers, and takes its place."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import ckpt_tools
from ckpt_tools.errors import CkptError, UsageError

from .repository import Repository, Slot

LATEST = "@latest"

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Sight:
    """The checkpoint that a URL means at a time, as far as a listing shows it."""

    url: str
    step: int | None
    time: str | None
    num_files: int
    file_bytes: int


def look(url: str, storage_options: Mapping[str, Any] | None = None) -> Sight | None:
    """What is at ``url`` now: of ``RUN@latest`` the newest checkpoint that is complete. None if nothing is.

    Raises:
        CkptError: as ``ckpt_tools.ls``.
    """
    found = ckpt_tools.ls(url.removesuffix(LATEST), storage_options=storage_options).latest
    return None if found is None else Sight(found.url, found.step, found.time, found.num_files, found.file_bytes)


@dataclass(slots=True)
class Watcher:
    """Looks at every source each ``seconds``, in a thread of its own. Use as a context manager.

    It remembers what it sees when it is made, so make it before the models are loaded. A checkpoint is loaded when two
    looks in a row show the same one, and it is not the one of before: a file that is being replaced looks different
    each time.
    """

    repository: Repository
    seconds: float
    tell: Tell
    _loaded: dict[int, Sight | None] = field(default_factory=dict, init=False)
    _seen: dict[int, Sight | None] = field(default_factory=dict, init=False)
    _trouble: dict[int, str] = field(default_factory=dict, init=False)
    _ending: threading.Event = field(default_factory=threading.Event, init=False)

    def __post_init__(self) -> None:
        if not self.seconds > 0:
            raise UsageError(f"--watch is a number of seconds above 0, not {self.seconds:g}")
        for place, slot in enumerate(self.repository.slots):
            self._loaded[place] = self._seen[place] = self._look(place, slot)

    def __enter__(self) -> Watcher:
        self._ending.clear()
        threading.Thread(target=self._run, name="watcher", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()

    def _run(self) -> None:
        while not self._ending.wait(self.seconds):
            for place, slot in enumerate(self.repository.slots):
                self.visit(place, slot)

    def visit(self, place: int, slot: Slot) -> None:
        """Look once, and load what is new. A model that was unloaded stays so."""
        sight = self._look(place, slot)
        is_steady, self._seen[place] = sight == self._seen[place], sight
        if sight is None or not is_steady or sight == self._loaded[place] or slot.version is None:
            return
        self._loaded[place] = sight
        try:
            self.repository.renew(slot)
        except CkptError as error:
            self.tell(f"{slot.source.name}: the new checkpoint cannot be loaded, the old one goes on: {error}")
        else:
            self.tell(f"{slot.source.name}: serves {sight.url}")

    def _look(self, place: int, slot: Slot) -> Sight | None:
        """None if nothing can be seen, which is told once until it changes."""
        try:
            sight, trouble = look(slot.source.url), ""
        except CkptError as error:
            sight, trouble = None, f"{slot.source.name}: {slot.source.url} cannot be looked at: {error}"
        if trouble and trouble != self._trouble.get(place):
            self.tell(trouble)
        self._trouble[place] = trouble
        return sight

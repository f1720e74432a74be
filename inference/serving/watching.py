"""Polls sources for newer complete checkpoints (``--watch``) and loads them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import ckpt_tools
from ckpt_tools.errors import CkptError

from .repository import Repository, Slot

LATEST = "@latest"

Tell = Callable[[str], None]


@dataclass(slots=True)
class Watcher:
    """Checks every source each ``seconds`` in a thread. Use as a context manager. Create it before the models are
    loaded, because it compares with what it sees then. A changed checkpoint is loaded when two checks in a row see the
    same: a file being replaced looks different each time."""

    repository: Repository
    seconds: float
    tell: Tell
    _loaded: dict[int, ckpt_tools.RunCheckpoint | None] = field(default_factory=dict, init=False)
    _seen: dict[int, ckpt_tools.RunCheckpoint | None] = field(default_factory=dict, init=False)
    _trouble: dict[int, str] = field(default_factory=dict, init=False)
    _ending: threading.Event = field(default_factory=threading.Event, init=False)

    def __post_init__(self) -> None:
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
        """Check once, and load a new checkpoint. An unloaded model stays unloaded."""
        sight = self._look(place, slot)
        is_steady, self._seen[place] = sight == self._seen[place], sight
        if sight is None or not is_steady or sight == self._loaded[place] or slot.version is None:
            return
        self._loaded[place] = sight
        try:
            self.repository.renew(slot)
        except CkptError as error:
            self.tell(f"{slot.source.name}: the new checkpoint cannot be loaded, the old one keeps answering: {error}")
        else:
            self.tell(f"{slot.source.name}: serves {sight.url}")

    def _look(self, place: int, slot: Slot) -> ckpt_tools.RunCheckpoint | None:
        """The checkpoint at the source, None if it cannot be listed, which is reported once."""
        try:
            sight, trouble = ckpt_tools.ls(slot.source.url.removesuffix(LATEST)).latest, ""
        except CkptError as error:
            sight, trouble = None, f"{slot.source.name}: {slot.source.url} cannot be looked at: {error}"
        if trouble and trouble != self._trouble.get(place):
            self.tell(trouble)
        self._trouble[place] = trouble
        return sight

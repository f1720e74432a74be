"""Lock on a place of an object store: an object that its holder writes again every few seconds.

The object is made with a condition ("if there is none"), so that of two processes one fails. A lock whose holder has
been silent for long, by the service's own clock, or was a process of this machine that has ended, is taken over, again
with a condition ("if it is still this one"). On services without conditions the object is read back; two processes that
start within that moment may both get the lock.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from ckpt_tools.errors import CkptError, DestinationExistsError, StoreError
from ckpt_tools.stores.s3.client import Small

BEAT_SECONDS = 15.0
"""Interval of a holder's heartbeats: four requests a minute."""

STALE_SECONDS = 60.0
"""Silence after which a holder is taken for dead: four beats, as a request may be tried again for half a minute."""

ATTEMPTS = 3
"""Attempts to take a lock: its object may vanish between listing and reading when a holder ends."""


class SmallObjects(Protocol):
    """Operations that a lock needs of a store."""

    def get(self, key: str) -> Small | None: ...

    def put_absent(self, key: str, data: bytes) -> bool: ...

    def put_matching(self, key: str, data: bytes, etag: str) -> bool: ...

    def delete(self, keys: list[str]) -> None: ...


@dataclass(slots=True)
class ObjectLock:
    """A lock at ``key``, taken by ``hold``."""

    objects: SmallObjects
    key: str
    url: str
    _token: str = field(default_factory=lambda: secrets.token_hex(16), repr=False)
    _etag: str = field(default="", repr=False)
    _num_beats: int = field(default=0, repr=False)
    lost: bool = field(default=False, repr=False)
    """True once another process was seen to have taken over."""

    def take(self) -> None:
        """Raises DestinationExistsError where another process holds it, and StoreError."""
        for _ in range(ATTEMPTS):
            found = self.objects.get(self.key)
            if found is None:
                self.objects.put_absent(self.key, self._text())
            elif not _is_stale(found):
                # Locks of earlier versions do not name the host.
                content = _content(found)
                who = f" (process {content['pid']} on {content['host']})" if {"pid", "host"} <= content.keys() else ""
                raise DestinationExistsError(
                    f"another process is writing to {self.url}{who}; wait for it to end (one that was killed "
                    f"on another machine is given up {STALE_SECONDS:.0f} seconds after its last sign of life)"
                )
            else:
                self.objects.put_matching(self.key, self._text(), found.etag)
            if self._is_mine():
                return
        raise DestinationExistsError(f"another process is about to write to {self.url}; wait for it to end")

    def _text(self) -> bytes:
        # Others on this machine find the process so.
        pid = os.getpid()
        process = {"machine": _machine(), "host": socket.gethostname(), "pid": pid, "started": _started(pid)}
        return json.dumps({"token": self._token, "beat": self._num_beats, **process}).encode()

    def _is_mine(self) -> bool:
        """Read the lock back: a condition may have been ignored, or met by an attempt whose answer was lost."""
        found = self.objects.get(self.key)
        if found is None or _content(found).get("token") != self._token:
            return False
        self._etag = found.etag
        return True

    def beat(self) -> None:
        """Write a heartbeat. Raises StoreError if another process took over."""
        self._num_beats += 1
        self.objects.put_matching(self.key, self._text(), self._etag)
        self.check()

    def check(self) -> None:
        """Raises StoreError if another process took over."""
        if not self._is_mine():
            self.lost = True
            raise self.taken_over()

    def taken_over(self) -> StoreError:
        return StoreError(f"another process took over {self.url}, because this one gave no sign of life for too long")

    def release(self) -> None:
        """Release the lock if this process still holds it. Raises StoreError."""
        if self._is_mine():
            self.objects.delete([self.key])

    @contextmanager
    def beating(self) -> Iterator[None]:
        """Write heartbeats in a thread while this runs. The next beat makes up for one that fails."""
        ended = threading.Event()

        def beat() -> None:
            while not ended.wait(BEAT_SECONDS):
                with suppress(CkptError):
                    self.beat()

        thread = threading.Thread(target=beat, name="ckpt-tools-lock", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


def _content(found: Small) -> dict[str, object]:
    """Content of a lock; empty if the object is damaged or not a lock."""
    with suppress(ValueError):
        content = json.loads(found.data)
        return content if isinstance(content, dict) else {}
    return {}


def is_held(found: Small | None) -> bool:
    """True if the lock is held by a process that is not known to be dead."""
    return found is not None and not _is_stale(found)


def _is_stale(found: Small) -> bool:
    """True if the holder is dead. An empty lock is of a process that was killed while it wrote it: a process holds a
    lock only after it has read it back."""
    content = _content(found)
    if not content:
        return True
    if content.get("machine") == _machine():
        try:
            pid = content.get("pid")
            has_ended = not isinstance(pid, int) or _started(pid) != content.get("started")
        except OSError:
            has_ended = True
        if has_ended:
            return True
    return found.age_seconds > STALE_SECONDS


def _machine() -> str:
    """The running system and the namespace of process numbers, which each container has for itself."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return secrets.token_hex(16)


def _started(pid: int) -> str:
    """Start of a process in ticks of the kernel, which tells it from a later process of the same number."""
    stat = Path(f"/proc/{pid}/stat").read_text()
    return stat.rpartition(")")[2].split()[19]

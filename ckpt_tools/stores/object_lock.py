"""Lock on a location in an object store: an object that its holder writes again every few seconds.

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

BEAT_SECONDS = 15.0
"""Interval of a holder's heartbeats: four requests a minute."""

STALE_SECONDS = 60.0
"""Silence after which a holder is taken for dead: four beats, as a request may be tried again for half a minute."""

MAX_ATTEMPTS = 3
"""Attempts to take a lock: its object may vanish between listing and reading when a holder ends."""


@dataclass(frozen=True, slots=True)
class ObjectBody:
    """A whole object, and the seconds since it was written, by the service's own clock."""

    data: bytes
    etag: str
    age_seconds: float


class LockObjects(Protocol):
    """Operations that a lock needs of a store."""

    def get_object(self, key: str) -> ObjectBody | None: ...

    def put_if_unchanged(self, key: str, data: bytes, etag: str | None) -> None: ...

    def delete_objects(self, keys: list[str]) -> None: ...


@dataclass(slots=True)
class ObjectLock:
    """A lock at ``key``, taken by ``hold``. ``url`` is what it locks, for messages."""

    objects: LockObjects
    key: str
    url: str
    _token: str = field(default_factory=lambda: secrets.token_hex(16), repr=False)
    _etag: str = field(default="", repr=False)
    _num_beats: int = field(default=0, repr=False)
    is_lost: bool = field(default=False, repr=False)
    """True once another process was seen to have taken over."""

    def acquire_lock(self) -> None:
        """Raises DestinationExistsError where another process holds it, and StoreError."""
        # A service may ignore the condition of writing, or its answer may be lost. The lock is held if and only if it
        # has this process's token when it is read back.
        for _ in range(MAX_ATTEMPTS):
            current_lock = self.objects.get_object(self.key)
            if current_lock is not None and not _is_stale(current_lock):
                # Locks of earlier versions do not name the host.
                content = _decode_holder(current_lock)
                who = f" (process {content['pid']} on {content['host']})" if {"pid", "host"} <= content.keys() else ""
                raise DestinationExistsError(
                    f"another process is writing to {self.url}{who}; wait for it to end (one that was killed "
                    f"on another machine is given up {STALE_SECONDS:.0f} seconds after its last sign of life)"
                )
            etag = None if current_lock is None else current_lock.etag
            self.objects.put_if_unchanged(self.key, self._encode_holder(), etag)
            if self._is_held_by_this():
                return
        raise DestinationExistsError(f"another process is about to write to {self.url}; wait for it to end")

    def _encode_holder(self) -> bytes:
        # By these, other processes on this machine find out whether this one has ended.
        pid = os.getpid()
        holder = {
            "machine": _machine_id(),
            "host": socket.gethostname(),
            "pid": pid,
            "started": _process_start_time(pid),
        }
        return json.dumps({"token": self._token, "beat": self._num_beats, **holder}).encode()

    def _is_held_by_this(self) -> bool:
        """Read the lock back: a condition may have been ignored, or met by an attempt whose answer was lost."""
        current_lock = self.objects.get_object(self.key)
        if current_lock is None or _decode_holder(current_lock).get("token") != self._token:
            return False
        self._etag = current_lock.etag
        return True

    def write_heartbeat(self) -> None:
        """Write a heartbeat. Raises StoreError if another process took over."""
        self._num_beats += 1
        self.objects.put_if_unchanged(self.key, self._encode_holder(), self._etag)
        self.check_still_held()

    def check_still_held(self) -> None:
        """Raises StoreError if another process took over."""
        if not self._is_held_by_this():
            self.is_lost = True
            raise self.taken_over_error()

    def taken_over_error(self) -> StoreError:
        return StoreError(f"another process took over {self.url}, because this one gave no sign of life for too long")

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Hold the lock while this runs; a thread writes heartbeats. The next beat makes up for one that fails.

        Raises as ``acquire_lock``.
        """
        is_ended = threading.Event()

        def write_heartbeats() -> None:
            while not is_ended.wait(BEAT_SECONDS):
                with suppress(CkptError):
                    self.write_heartbeat()

        self.acquire_lock()
        thread = threading.Thread(target=write_heartbeats, name="ckpt-tools-lock", daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_ended.set()
            thread.join()
            with suppress(CkptError):
                if self._is_held_by_this():
                    self.objects.delete_objects([self.key])


def _decode_holder(lock_object: ObjectBody) -> dict[str, object]:
    """Content of a lock; empty if the object is damaged or not a lock."""
    with suppress(ValueError):
        content = json.loads(lock_object.data)
        return content if isinstance(content, dict) else {}
    return {}


def is_lock_held(lock_object: ObjectBody | None) -> bool:
    """True if the lock is held by a process that is not known to be dead."""
    return lock_object is not None and not _is_stale(lock_object)


def _is_stale(lock_object: ObjectBody) -> bool:
    """True if the holder is dead. An empty lock is of a process that was killed while it wrote it: a process holds a
    lock only after it has read it back."""
    content = _decode_holder(lock_object)
    if not content:
        return True
    if content.get("machine") == _machine_id():
        try:
            pid = content.get("pid")
            has_ended = not isinstance(pid, int) or _process_start_time(pid) != content.get("started")
        except OSError:
            has_ended = True
        if has_ended:
            return True
    return lock_object.age_seconds > STALE_SECONDS


def _machine_id() -> str:
    """The running system and the namespace of process numbers, which each container has for itself."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return secrets.token_hex(16)


def _process_start_time(pid: int) -> str:
    """Start of a process in ticks of the kernel, which tells it from a later process of the same number."""
    stat = Path(f"/proc/{pid}/stat").read_text()
    return stat.rpartition(")")[2].split()[19]

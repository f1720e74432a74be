"""Files of an output on a file system of fsspec, each written from front to back.

fsspec has no common way to send a file in parts from several processes. A file is therefore one stream, into which
parts go in order; a part that comes early waits for those before it, in the buffer that it was made in.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from ckpt_tools.errors import StoreError, UsageError
from ckpt_tools.stores.destination import Destination
from ckpt_tools.stores.fsspec.store import asked
from ckpt_tools.stores.source import Buffer, checked_name


@dataclass(slots=True)
class _Stream:
    """A file being written from front to back."""

    file: Any
    next: int = 0
    turn: threading.Condition = field(default_factory=threading.Condition)


@dataclass(slots=True)
class FsspecDestination(Destination):
    """Files below ``root``, each one stream. It cannot be sent to another process."""

    fs: Any
    root: str
    _streams: dict[str, _Stream] = field(default_factory=dict, repr=False)
    _errors: list[BaseException] = field(default_factory=list, repr=False)

    def begin(self, path: str, size_bytes: int) -> str:
        full = f"{self.root}/{checked_name(path)}"

        def make() -> Any:
            self.fs.makedirs(full.rpartition("/")[0], exist_ok=True)
            return self.fs.open(full, "wb")

        self._streams[path] = _Stream(asked(full, make))
        return ""

    def write(self, path: str, handle: str, number: int, offset: int, data: Buffer) -> str:
        stream = self._streams[path]
        with stream.turn:
            stream.turn.wait_for(lambda: stream.next == number or self._errors)
            if self._errors:
                raise self._errors[0]
            # Not tried again: a stream does not say how much of a failed write it took.
            _failing(path, lambda: stream.file.write(data))
            stream.next += 1
            stream.turn.notify_all()
        return ""

    def fail(self, error: BaseException) -> None:
        self._errors.append(error)
        for stream in list(self._streams.values()):
            with stream.turn:
                stream.turn.notify_all()

    def holds(self, path: str, handle: str, number: int, offset: int, num_bytes: int, crc: int, part_tag: str) -> bool:
        """Never: a stream ends with the process that wrote it."""
        return False

    def finish(self, path: str, handle: str, part_tags: Sequence[str]) -> None:
        _failing(path, self._streams.pop(path).file.close)

    def abandon(self) -> None:
        for stream in self._streams.values():
            with suppress(Exception):
                stream.file.discard() if hasattr(stream.file, "discard") else stream.file.close()
        self._streams.clear()

    def __reduce__(self) -> tuple[object, ...]:
        raise UsageError("only one process can write to this destination; name a path or an s3:// URL")


def _failing(path: str, call: Callable[[], object]) -> None:
    try:
        call()
    except Exception as error:
        raise StoreError(f"writing failed: {error or type(error).__name__}", path=path) from error


@dataclass(slots=True)
class FsspecLog:
    """Forgets at once what it is told: unfinished streams cannot be taken up by a later run."""

    def read(self) -> bytes:
        return b""

    def append(self, data: bytes) -> None:
        """Does nothing: the log is never read."""

    def clear(self) -> None:
        """Does nothing: the log is empty."""

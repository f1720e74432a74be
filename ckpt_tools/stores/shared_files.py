"""Checks that another machine sees the same files before it is given work.

A path means the same on every node of a cluster only if they share the file system it lies on. One that does not would
find a checkpoint incomplete, or write files that are never read.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ckpt_tools.errors import StoreError
from ckpt_tools.stores.destination import Destination
from ckpt_tools.stores.file_destination import StoreDestination
from ckpt_tools.stores.local.store import LocalStore
from ckpt_tools.stores.marker_files import TOKEN_NAME
from ckpt_tools.stores.source import Store, StoreWrapper


@dataclass(frozen=True, slots=True)
class SharedFiles:
    """Called in another process, it raises StoreError unless these files are seen there as they are here."""

    sizes: tuple[tuple[Path, int], ...] = ()
    contents: tuple[tuple[Path, bytes], ...] = ()

    def __call__(self) -> None:
        for path, size in self.sizes:
            with _seeing(path):
                _same(path.stat().st_size, size)
        for path, content in self.contents:
            with _seeing(path.parent):
                _same(path.read_bytes(), content)


def _same(found: object, wanted: object) -> None:
    if found != wanted:
        raise OSError("another file of that name")


@contextmanager
def _seeing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreError(
            f"the worker on {socket.gethostname()} does not see the same {path} as this machine; name a "
            "folder that all machines share, or an object store"
        ) from error


@contextmanager
def shared_files(source: Store, target: Destination) -> Iterator[SharedFiles]:
    """Files of a run's source and target that all machines must see; empty for stores that are not local folders."""
    reading, writing = _local(source), _local(target.store) if isinstance(target, StoreDestination) else None
    sizes = () if reading is None else ((reading.root / path, size) for path, size in [*reading.list().items()][:1])
    if writing is None:
        yield SharedFiles(tuple(sizes))
        return
    token = writing.root.with_name(TOKEN_NAME)
    content = secrets.token_bytes(16)
    try:
        token.write_bytes(content)
        yield SharedFiles(tuple(sizes), ((token, content),))
    finally:
        with suppress(OSError):
            token.unlink(missing_ok=True)


def _local(store: Store) -> LocalStore | None:
    if isinstance(store, StoreWrapper):
        return _local(store.store)
    return store if isinstance(store, LocalStore) else None

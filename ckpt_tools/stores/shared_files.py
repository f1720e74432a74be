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
from ckpt_tools.stores.destination import Destination, StoreDestination
from ckpt_tools.stores.local.store import LocalStore
from ckpt_tools.stores.output_names import SHARED_TOKEN_NAME
from ckpt_tools.stores.source import Store, StoreWrapper


@dataclass(frozen=True, slots=True)
class SharedFilesCheck:
    """Called in another process, it raises StoreError unless these files are seen there as they are here."""

    sizes: tuple[tuple[Path, int], ...] = ()
    contents: tuple[tuple[Path, bytes], ...] = ()

    def __call__(self) -> None:
        for path, size in self.sizes:
            with _explain_unshared(path):
                _require_same(path.stat().st_size, size)
        for path, content in self.contents:
            with _explain_unshared(path.parent):
                _require_same(path.read_bytes(), content)


def _require_same(seen_here: object, seen_by_driver: object) -> None:
    if seen_here != seen_by_driver:
        raise OSError("another file of that name")


@contextmanager
def _explain_unshared(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreError(
            f"the worker on {socket.gethostname()} does not see the same {path} as this machine; name a "
            "folder that all machines share, or an object store"
        ) from error


@contextmanager
def prepare_shared_files_check(source: Store, target: Destination) -> Iterator[SharedFilesCheck]:
    """Files of a run's source and target that all machines must see; empty for stores that are not local folders."""
    sizes: tuple[tuple[Path, int], ...] = ()
    if (source_store := _find_local_store(source)) is not None:
        sizes = tuple((source_store.root / path, size) for path, size in [*source_store.list().items()][:1])
    target_store = _find_local_store(target.store) if isinstance(target, StoreDestination) else None
    if target_store is None:
        yield SharedFilesCheck(sizes)
        return
    token_path = target_store.root.with_name(SHARED_TOKEN_NAME)
    token_bytes = secrets.token_bytes(16)
    try:
        token_path.write_bytes(token_bytes)
        yield SharedFilesCheck(sizes, ((token_path, token_bytes),))
    finally:
        with suppress(OSError):
            token_path.unlink(missing_ok=True)


def _find_local_store(store: Store) -> LocalStore | None:
    if isinstance(store, StoreWrapper):
        return _find_local_store(store.store)
    return store if isinstance(store, LocalStore) else None

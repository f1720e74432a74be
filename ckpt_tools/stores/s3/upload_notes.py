"""Notes of a run in a bucket, by which the run after a kill finds the objects of that run and its progress.

Before an upload is begun, its key and a token are noted; the finished object carries the token. Before anything is made
visible, the file that comes last is noted, with the objects that were there. So after a kill at any moment the notes
tell which open uploads are ours, whether the output was published, and which objects belong to half of one.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from ckpt_tools.stores.s3.client import Bucket, Found

Item = TypeVar("Item")
Result = TypeVar("Result")

TOKEN_FORM = re.compile(r"[0-9a-f]{16}")
"""Form of a token. A note by another name is ignored."""

_NOTE = re.compile(rf"{TOKEN_FORM.pattern}/.+", re.DOTALL)
"""Form of the name of an upload, below ``begun/``."""

TOKEN = "ckpt-tools-upload"
"""The metadata by which a finished object is known to be of a certain upload."""

NUM_REQUESTS = 8
"""Small requests under way at once."""


def in_parallel(call: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """The results in the order of the items. Raises the first error."""
    pool, is_waited_for = ThreadPoolExecutor(NUM_REQUESTS), True
    try:
        return list(pool.map(call, items))
    except KeyboardInterrupt:
        is_waited_for = False  # a request that hangs gives up after minutes
        raise
    finally:
        pool.shutdown(wait=is_waited_for, cancel_futures=True)


@dataclass(frozen=True, slots=True)
class UploadNotes:
    """Notes below ``prefix`` on objects below ``root``; both end with a slash, unless the root is the bucket itself.

    Every method raises StoreError. The note of an upload is an empty object whose name has all facts, so that one
    listing reads a thousand of them.
    """

    bucket: Bucket
    prefix: str
    root: str

    def begin(self, key: str) -> str:
        """Note that an upload of ``key`` begins; its token."""
        token = secrets.token_hex(8)
        self.bucket.put(f"{self.prefix}begun/{token}/{key.removeprefix(self.root)}", b"")
        return token

    def publish(self, last: str, token: str, old: Sequence[Found]) -> None:
        """Note that the output is about to be published in the place of ``old``: ``last`` and its token come last."""
        note = {"last": last, "token": token, "old": {found.key: found.etag for found in old}}
        self.bucket.put(f"{self.prefix}publishing", json.dumps(note).encode())

    def begun(self) -> dict[str, str]:
        """The key of each token."""
        notes = (key.removeprefix(f"{self.prefix}begun/") for key in self._notes())
        return {token: self.root + path for token, _, path in (note.partition("/") for note in notes)}

    def _notes(self) -> list[str]:
        """The keys of the notes of uploads."""
        prefix = f"{self.prefix}begun/"
        keys = (found.key for found in self.bucket.objects(prefix))
        return [key for key in keys if _NOTE.fullmatch(key.removeprefix(prefix))]

    def open_uploads(self) -> list[tuple[str, str]]:
        """Keys and ids of our uploads that are neither completed nor aborted."""
        keys = set(self.begun().values())
        return [(key, upload) for key, upload in self.bucket.uploads(self.root) if key in keys] if keys else []

    def partial_objects(self) -> list[str]:
        """Keys of visible objects that belong to an incomplete output, or to the replaced one."""
        content = self.bucket.get(f"{self.prefix}publishing")
        if content is None:
            return []
        try:
            note = json.loads(content.data)
        except ValueError:  # of a process that was killed while it wrote it, so that nothing had begun
            return []
        if self.token(note["last"]) == note["token"]:
            return []
        tokens = {(key, token) for token, key in self.begun().items()}
        keys = list(dict.fromkeys(key for key, _ in tokens))
        found = zip(keys, in_parallel(self.token, keys), strict=True)
        ours = [key for key, token in found if token is not None and (key, token) in tokens]
        return ours + [key for key in self._remains(note["old"]) if key not in set(ours)]

    def token(self, key: str) -> str | None:
        """Token of the upload that made the object at ``key``; None if there is no object or no upload of a run."""
        return (self.bucket.metadata(key) or {}).get(TOKEN)

    def _remains(self, old: Mapping[str, str]) -> list[str]:
        """Old objects that are left; empty if all of them are."""
        found = dict(zip(old, in_parallel(self.bucket.head, old), strict=True))
        left = [key for key, each in found.items() if each is not None and each.etag == old[key]]
        return left if len(left) < len(old) else []

    def remove(self) -> None:
        """Remove all objects and uploads of the notes, and the notes."""
        in_parallel(lambda upload: self.bucket.abort(*upload), self.open_uploads())
        self.bucket.delete(self.partial_objects())
        self.bucket.delete(self._notes())
        self.bucket.delete([f"{self.prefix}publishing"])  # last, as ``partial_objects`` reads it

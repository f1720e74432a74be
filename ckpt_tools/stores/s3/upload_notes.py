"""Notes of a run in a bucket, by which the run after a kill finds the objects of that run and its progress.

Before an upload is begun, its key and a token are noted; the finished object carries the token. Before anything is made
visible, the file that comes last is noted, with the files that have no upload and the objects that were there. So after
a kill at any moment the notes tell which open uploads are ours, whether the output was published, and which objects
belong to half of one.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ckpt_tools.stores.parallel import map_in_parallel
from ckpt_tools.stores.s3.client import Bucket, ListedObject

TOKEN_FORM = re.compile(r"[0-9a-f]{16}")
"""Form of a token. A note by another name is ignored."""

_NOTE_NAME_FORM = re.compile(rf"{TOKEN_FORM.pattern}/.+", re.DOTALL)
"""Form of the name of an upload, below ``begun/``."""

TOKEN_METADATA_KEY = "ckpt-tools-upload"
"""The metadata by which a finished object is known to be of a certain upload."""


def make_token() -> str:
    return secrets.token_hex(8)


@dataclass(frozen=True, slots=True)
class UploadNotes:
    """Notes below ``prefix`` on objects below ``root``; both end with a slash, unless the root is the bucket itself.

    Every method raises StoreError. The note of an upload is an empty object whose name has all facts, so that one
    listing reads a thousand of them.
    """

    bucket: Bucket
    prefix: str
    root: str

    @property
    def publishing_key(self) -> str:
        return f"{self.prefix}publishing"

    def note_upload(self, key: str, token: str) -> None:
        """Note that an upload of ``key`` begins, whose object will have ``token``."""
        self.bucket.put_object(f"{self.prefix}begun/{token}/{key.removeprefix(self.root)}", b"")

    def note_publishing(
        self, last_key: str, token: str, old_objects: Sequence[ListedObject], held_keys: Mapping[str, str]
    ) -> None:
        """Note that the output is about to be published in the place of ``old_objects``. ``last_key`` becomes visible
        last, as an object with ``token``. ``held_keys`` has the keys of files that were not uploaded, by token."""
        old_etags = {found.key: found.etag for found in old_objects}
        note = {"last": last_key, "token": token, "old": old_etags, "held": dict(held_keys)}
        self.bucket.put_object(self.publishing_key, json.dumps(note).encode())

    def list_noted_uploads(self) -> dict[str, str]:
        """The key of each token."""
        notes = (key.removeprefix(f"{self.prefix}begun/") for key in self._list_note_keys())
        return {token: self.root + path for token, _, path in (note.partition("/") for note in notes)}

    def _list_note_keys(self) -> list[str]:
        """The keys of the notes of uploads."""
        prefix = f"{self.prefix}begun/"
        keys = (found.key for found in self.bucket.list_objects(prefix))
        return [key for key in keys if _NOTE_NAME_FORM.fullmatch(key.removeprefix(prefix))]

    def list_open_uploads(self) -> list[tuple[str, str]]:
        """Keys and ids of our uploads that are neither completed nor aborted."""
        keys = set(self.list_noted_uploads().values())
        return [(key, upload) for key, upload in self.bucket.list_uploads(self.root) if key in keys] if keys else []

    def list_partial_objects(self) -> list[str]:
        """Keys of visible objects that belong to an output that was not published completely: its own, and those that
        are left of the output that it replaces. Empty if publishing has not begun, or has ended."""
        note_object = self.bucket.get_object(self.publishing_key)
        if note_object is None:
            return []
        try:
            note = json.loads(note_object.data)
        except ValueError:  # of a process that was killed while it wrote it, so that nothing had begun
            return []
        if self.get_object_token(note["last"]) == note["token"]:
            return []
        tokens = {(key, token) for token, key in {**self.list_noted_uploads(), **note.get("held", {})}.items()}
        keys = list(dict.fromkeys(key for key, _ in tokens))
        current_tokens = zip(keys, map_in_parallel(self.get_object_token, keys), strict=True)
        own_keys = [key for key, token in current_tokens if token is not None and (key, token) in tokens]
        return own_keys + [key for key in self._list_remaining_keys(note["old"]) if key not in set(own_keys)]

    def get_object_token(self, key: str) -> str | None:
        """Token of the upload that made the object at ``key``; None if there is no object or no upload of a run."""
        return (self.bucket.get_metadata(key) or {}).get(TOKEN_METADATA_KEY)

    def _list_remaining_keys(self, old_etags: Mapping[str, str]) -> list[str]:
        """Keys of old objects that are left; empty if all of them are, since then their removal has not begun."""
        current_objects = dict(zip(old_etags, map_in_parallel(self.bucket.head_object, old_etags), strict=True))
        remaining_keys = [
            key for key, each in current_objects.items() if each is not None and each.etag == old_etags[key]
        ]
        return remaining_keys if len(remaining_keys) < len(old_etags) else []

    def remove_all(self) -> None:
        """Remove all objects and uploads of the notes, and the notes."""
        map_in_parallel(lambda upload: self.bucket.abort_upload(*upload), self.list_open_uploads())
        self.bucket.delete_objects(self.list_partial_objects())
        self.bucket.delete_objects(self._list_note_keys())
        self.bucket.delete_objects([self.publishing_key])  # last, as ``list_partial_objects`` reads it

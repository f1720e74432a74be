"""A key of an S3 bucket as the location of an output that is absent, old, or complete.

Publishing completes the uploads, the marker file last. Small objects below ``.ckpt-tools-partial/`` are the lock of the
process that writes, its log, and its notes. They are removed when the output is published.

S3 cannot rename, so an existing checkpoint cannot be swapped for another in one step. Its marker file is removed first,
then its other files, then the new files are completed, the marker last: meanwhile there is no checkpoint. Only objects
that the caller names are removed. Empty objects whose names end in a slash, which tools make for folders, stay.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import PurePosixPath

from ckpt_tools.core.option_names import format_option
from ckpt_tools.core.part_rules import PartRules
from ckpt_tools.errors import CkptError, DestinationExistsError
from ckpt_tools.process.signals import allow_signals, defer_signals
from ckpt_tools.stores.destination import (
    NO_FILES,
    Claim,
    DestinationContents,
    Leftover,
    OutputLocation,
    check_free,
    check_no_unexpected_files,
    list_parent_folders,
)
from ckpt_tools.stores.object_lock import ObjectLock, is_lock_held
from ckpt_tools.stores.output_names import FolderForm, OutputKind, SingleFileForm, is_marker
from ckpt_tools.stores.s3.client import Bucket, ListedObject
from ckpt_tools.stores.s3.destination import (
    LOG_NAME_FORM,
    S3Destination,
    S3Log,
    part_rules_of,
)
from ckpt_tools.stores.s3.store import S3Store
from ckpt_tools.stores.s3.upload_notes import TOKEN_FORM, UploadNotes, map_in_parallel


@dataclass(slots=True)
class S3Claim(Claim):
    """A location that this process alone writes to, as long as its lock says so."""

    location: S3OutputLocation
    destination: S3Destination
    log: S3Log
    lock: ObjectLock
    overwrite: bool
    keeps_uploads: bool
    """True if output that was not published is kept for a run with ``resume``."""

    def publish_files(self, paths: Sequence[str], replaced: Mapping[str, int] = NO_FILES) -> None:
        """Make the finished files visible, the last of ``paths`` last, and remove ``replaced``.

        Once anything was removed, the uploads are all there is, and are kept if the service fails.

        Raises:
            DestinationExistsError: another process wrote there meanwhile. StoreError: the service failed, or
            another process took over.
        """
        # 1. Visible objects of a killed run are removed: its note says that they are not a whole output.
        # 2. The old objects are found.
        # 3. The last key, its token and the ETags of the old objects are noted.
        # 4. The old objects are removed, markers first.
        # 5. The uploads are completed, the last key last.
        # After a kill, the token at the last key says whether 5 has ended, and the ETags whether 4 had begun.
        self.lock.check_still_held()
        self.location.check_free(overwrite=self.overwrite)
        check_no_unexpected_files(self.location.list_contents(), self.location.url, replaced)
        *data_paths, last_path = paths
        tokens_by_key = dict(map(self.destination.get_key_and_token, paths))
        # Incomplete objects of a killed run are removed, except those that it completed for this one.
        partial_objects = self.destination.notes.list_partial_objects()
        completed_keys = self._find_completed_keys(tokens_by_key, partial_objects)
        self.location.bucket.delete_objects([key for key in partial_objects if key not in completed_keys])
        old_objects = self._find_replaced_objects(tokens_by_key, replaced)
        self.destination.notes.note_publishing(*self.destination.get_key_and_token(last_path), old_objects)
        try:
            # In two requests: the folder is not a checkpoint once its markers are removed.
            for are_markers in (True, False):
                self.location.bucket.delete_objects(
                    [each.key for each in old_objects if is_marker(each.key) is are_markers]
                )
            map_in_parallel(self.destination.complete_file, data_paths)
            self.destination.complete_file(last_path)
        except CkptError as error:
            if old_objects and not self.keeps_uploads:
                error.message += (
                    "; the old checkpoint is being replaced, and the uploads of the new one are kept: the same command "
                    f"with {format_option('resume', True)} continues"
                )
                self.keeps_uploads = True
            raise
        self.keeps_uploads = False

    def publish_companion_file(self, path: str) -> None:
        self.lock.check_still_held()
        self.destination.complete_file(path)

    def _find_completed_keys(self, tokens_by_key: Mapping[str, str], keys: Iterable[str]) -> set[str]:
        """Those of ``keys`` whose objects have the token of ``tokens_by_key``: a killed run completed them for this
        one."""
        known_keys = [key for key in keys if key in tokens_by_key]
        tokens = map_in_parallel(self.destination.notes.get_object_token, known_keys)
        return {key for key, token in zip(known_keys, tokens, strict=True) if token == tokens_by_key[key]}

    def _find_replaced_objects(
        self, tokens_by_key: Mapping[str, str], replaced: Mapping[str, int]
    ) -> list[ListedObject]:
        """Objects to remove; a single file is replaced in one step instead, and the digests beside it are removed."""
        if isinstance(self.location.form, SingleFileForm):
            self.location.bucket.delete_objects(
                [self.location.sibling_prefix + path for path in replaced if path != self.location.name]
            )
            return []
        replaced_keys = {self.location.folder_prefix + path for path in replaced}
        old_objects = [each for each in self.location.list_objects() if each.key in replaced_keys]
        if len(tokens_by_key) == 1 and {each.key for each in old_objects} <= tokens_by_key.keys():
            return []
        if not self.keeps_uploads:
            return old_objects
        completed_keys = self._find_completed_keys(tokens_by_key, (each.key for each in old_objects))
        return [each for each in old_objects if each.key not in completed_keys]


@dataclass(frozen=True, slots=True)
class S3OutputLocation(OutputLocation):
    """A key of a bucket, without a slash at its end, as the location of an output."""

    bucket: Bucket
    key: str

    @property
    def url(self) -> str:
        return self.bucket.url(self.key)

    @property
    def name(self) -> str:
        return PurePosixPath(self.key).name or self.bucket.name

    @property
    def part_rules(self) -> PartRules:
        return part_rules_of(self.bucket)

    @property
    def folder_prefix(self) -> str:
        """Prefix of the files in it as a folder."""
        return f"{self.key}/" if self.key else ""

    @property
    def sibling_prefix(self) -> str:
        """Prefix of the keys beside it."""
        return self.key.removesuffix(self.name)

    @property
    def _root_prefix(self) -> str:
        """The prefix of the names that an output's files have in its layout."""
        return self.sibling_prefix if isinstance(self.form, SingleFileForm) else self.folder_prefix

    @property
    def _partial_prefix(self) -> str:
        return f"{self._root_prefix}{self.form.partial_name}/"

    def list_objects(self) -> list[ListedObject]:
        """Contents of the folder without unfinished output."""
        folder_location = self.with_form(FolderForm())
        partial_keys = set(folder_location._upload_notes.list_partial_objects())
        partial_prefix = folder_location._partial_prefix
        found = self.bucket.list_objects(self.folder_prefix)
        return [each for each in found if each.key not in partial_keys and not each.key.startswith(partial_prefix)]

    @property
    def _upload_notes(self) -> UploadNotes:
        return UploadNotes(self.bucket, f"{self._partial_prefix}notes/", self._root_prefix)

    @property
    def lock(self) -> ObjectLock:
        return ObjectLock(self.bucket, f"{self._partial_prefix}lock", self.url)

    def list_contents(self) -> DestinationContents | None:
        if isinstance(self.form, FolderForm):
            return self._list_folder()
        found = self.bucket.head_object(self.key) if self.key else None
        if found is None:
            return None
        return DestinationContents(S3Store(self.bucket, self.sibling_prefix, self.name), {self.name: found.size})

    def _list_folder(self) -> DestinationContents | None:
        """Contents as a folder. The empty objects that stand for the folder itself, and for folders with files in
        them, are left out."""
        sizes = {each.key.removeprefix(self.folder_prefix): each.size for each in self.list_objects()}
        files = {path: size for path, size in sizes.items() if path and not path.endswith("/")}
        nonempty_folders = {"", *(f"{folder}/" for folder in list_parent_folders(files))}
        others = [
            path or "/" for path, size in sizes.items() if path not in files and (size or path not in nonempty_folders)
        ]
        return DestinationContents(S3Store(self.bucket, self.folder_prefix), files, others) if files or others else None

    def check_free(self, *, overwrite: bool) -> None:
        """Raises DestinationExistsError if the location may not, or cannot, be taken."""
        single_file = self.bucket.head_object(self.key) if self.key else None
        existing: dict[OutputKind, bool] = {"file": single_file is not None, "folder": self._list_folder() is not None}
        existing_kinds = [kind for kind, found in existing.items() if found]
        check_free(
            self.url, self.form.kind, is_taken=bool(existing_kinds), existing_kinds=existing_kinds, overwrite=overwrite
        )

    @contextmanager
    def claim(self, *, overwrite: bool, resume: bool, fsync: bool = False) -> Iterator[S3Claim]:
        """As ``OutputLocation.claim`` says. S3 answers when bytes are safe, so ``fsync`` changes nothing."""
        self.check_free(overwrite=overwrite)
        claim = self.make_claim(overwrite=overwrite, keeps_uploads=resume)
        # A signal interrupts the block, but not taking and leaving the location.
        with defer_signals(), ExitStack() as exit_stack:
            claim.lock.acquire_lock()
            exit_stack.callback(_ignore_store_errors, claim.lock.release_lock)
            exit_stack.enter_context(claim.lock.keep_alive())
            with allow_signals():
                self.check_free(overwrite=overwrite)
                # After publishing, what is left are notes, and uploads begun twice because an answer was lost.
                exit_stack.callback(_remove_unless_kept, claim)
                if not resume:
                    _remove_noted_objects(claim)
                yield claim

    def make_claim(self, *, overwrite: bool, keeps_uploads: bool = False) -> S3Claim:
        destination = S3Destination(self.bucket, self._root_prefix, self._upload_notes)
        return S3Claim(
            self, destination, S3Log(self.bucket, f"{self._partial_prefix}log/"), self.lock, overwrite, keeps_uploads
        )

    def _locations_of_both_forms(self) -> list[S3OutputLocation]:
        """The location as a folder and as a file, because the form of an earlier output is unknown. A whole bucket is
        a folder alone."""
        return [self.with_form(FolderForm()), *([self.as_single_file()] if self.key else [])]

    def list_leftovers(self) -> Sequence[Leftover]:
        leftovers: list[Leftover] = []
        for location in self._locations_of_both_forms():
            if is_lock_held(self.bucket.get_object(location.lock.key)):
                raise DestinationExistsError(f"another process is writing to {self.url}; wait for it to end")
            leftovers += location._list_leftovers_of_form()
        return leftovers

    def _list_leftovers_of_form(self) -> Iterator[Leftover]:
        notes, partial = self._upload_notes, self._partial_prefix
        for key, upload in notes.list_open_uploads():
            num_bytes = sum(part.size for part in self.bucket.list_parts(key, upload).values())
            yield Leftover("open upload", self.bucket.url(key), num_bytes)
        for key in notes.list_partial_objects():
            listed_object = self.bucket.head_object(key)
            yield Leftover("half an output", self.bucket.url(key), 0 if listed_object is None else listed_object.size)
        for each in self.bucket.list_objects(partial):
            kind = next(
                (kind for kind, form in _LEFTOVER_NAME_FORMS.items() if form.fullmatch(each.key.removeprefix(partial))),
                None,
            )
            if kind is not None:
                yield Leftover(kind, self.bucket.url(each.key), each.size)

    def remove_leftovers(self) -> Sequence[Leftover]:
        leftovers = self.list_leftovers()
        for location in self._locations_of_both_forms():
            if self.bucket.has_any_object(location._partial_prefix):
                claim = location.make_claim(overwrite=False)
                claim.lock.acquire_lock()
                try:
                    _remove_noted_objects(claim)
                finally:
                    claim.lock.release_lock()
        return leftovers

    def remove_files(self, batches: Sequence[Sequence[str]]) -> None:
        for batch in batches:
            self.bucket.delete_objects([self.folder_prefix + name for name in batch])


_LEFTOVER_NAME_FORMS = {
    "log": re.compile(rf"log/{LOG_NAME_FORM.pattern}"),
    "lock": re.compile("lock"),
    "note": re.compile(rf"notes/(begun/{TOKEN_FORM.pattern}/.+|publishing)", re.DOTALL),
}
"""Objects below ``.ckpt-tools-partial/`` that runs make."""


def _remove_noted_objects(claim: S3Claim) -> None:
    """Objects that a killed run made and noted: uploads, log and notes."""
    claim.log.clear()
    claim.destination.notes.remove_all()


def _remove_unless_kept(claim: S3Claim) -> None:
    if not claim.keeps_uploads:
        _ignore_store_errors(lambda: _remove_noted_objects(claim))


def _ignore_store_errors(call: Callable[[], None]) -> None:
    """Ignore errors: ``clean`` can remove the rest later, and an earlier error is the one to report."""
    with suppress(CkptError):
        call()

"""A key of an S3 bucket as the place of an output that is absent, old, or complete.

Publishing completes the uploads, the marker file last. Small objects below ``.ckpt-tools-partial/`` are the lock of the
process that writes, its log, and its notes. They are removed when the output is published.

S3 cannot rename, so an existing checkpoint cannot be swapped for another in one step. Its marker file is removed first,
then its other files, then the new files are completed, the marker last: meanwhile there is no checkpoint. Only objects
that the caller names are removed. Empty objects whose names end in a slash, which tools make for folders, stay.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import PurePosixPath

from ckpt_tools.core.option_names import format_option
from ckpt_tools.errors import CkptError, DestinationExistsError
from ckpt_tools.signals import allow_signals, defer_signals
from ckpt_tools.stores.destination import Claim, Leftover, PartRules, Place
from ckpt_tools.stores.marker_files import is_marker
from ckpt_tools.stores.output_form import Folder, Kind, SingleFile
from ckpt_tools.stores.present import NOTHING, Present, check_free, check_only, folders_of
from ckpt_tools.stores.s3.client import Bucket, Found
from ckpt_tools.stores.s3.destination import LOG_NUMBER, MAX_PARTS, PART_BYTES, S3Destination, S3Log, copying_rules
from ckpt_tools.stores.s3.lock import ObjectLock, is_held
from ckpt_tools.stores.s3.store import S3Store
from ckpt_tools.stores.s3.upload_notes import TOKEN_FORM, UploadNotes, in_parallel


@dataclass(slots=True)
class S3Claim(Claim):
    """A place that this process alone writes to, as long as its lock says so."""

    place: S3Place
    destination: S3Destination
    log: S3Log
    lock: ObjectLock
    overwrite: bool
    is_kept: bool
    """True if output that was not published is kept for a run with ``resume``."""

    def publish(self, paths: Sequence[str], replaced: Mapping[str, int] = NOTHING) -> None:
        """Make the finished files visible, the last of ``paths`` last, and remove ``replaced``.

        Once anything was removed, the uploads are all there is, and are kept if the service fails.

        Raises:
            DestinationExistsError: another process wrote there meanwhile. StoreError: the service failed, or
            another process took over.
        """
        self.lock.check()
        self.place.check_free(overwrite=self.overwrite)
        check_only(self.place.present(), self.place.url, replaced)
        *data, last = paths
        marks = dict(map(self.destination.mark, paths))
        # Incomplete objects of a killed run are removed, except those that it completed for this one.
        partial_objects = self.destination.notes.partial_objects()
        completed = self._completed(marks, partial_objects)
        self.place.bucket.delete([key for key in partial_objects if key not in completed])
        old = self._old(marks, replaced)
        self.destination.notes.publish(*self.destination.mark(last), old)
        try:
            # In two requests: the folder is not a checkpoint once its markers are removed.
            for are_markers in (True, False):
                self.place.bucket.delete([each.key for each in old if is_marker(each.key) is are_markers])
            in_parallel(self.destination.complete, data)
            self.destination.complete(last)
        except CkptError as error:
            if old and not self.is_kept:
                error.message += (
                    "; the old checkpoint is being replaced, and the uploads of the new one are kept: the same command "
                    f"with {format_option('resume', True)} continues"
                )
                self.is_kept = True
            raise
        self.is_kept = False

    def add(self, path: str) -> None:
        self.lock.check()
        self.destination.complete(path)

    def _completed(self, marks: Mapping[str, str], keys: Iterable[str]) -> set[str]:
        """Those of ``keys`` whose objects have the token of ``marks``: a killed run completed them for this one."""
        known = [key for key in keys if key in marks]
        tokens = in_parallel(self.destination.notes.token, known)
        return {key for key, token in zip(known, tokens, strict=True) if token == marks[key]}

    def _old(self, marks: Mapping[str, str], replaced: Mapping[str, int]) -> list[Found]:
        """Objects to remove; a single file is replaced in one step instead, and the digests beside it are removed."""
        if isinstance(self.place.form, SingleFile):
            self.place.bucket.delete([self.place.beside + path for path in replaced if path != self.place.name])
            return []
        names = {self.place.inside + path for path in replaced}
        old = [each for each in self.place.objects() if each.key in names]
        if len(marks) == 1 and {each.key for each in old} <= marks.keys():
            return []
        completed = self._completed(marks, (each.key for each in old)) if self.is_kept else set()
        return [each for each in old if each.key not in completed]


@dataclass(frozen=True, slots=True)
class S3Place(Place):
    """A key of a bucket, without a slash at its end, as the place of an output."""

    bucket: Bucket
    key: str

    @property
    def url(self) -> str:
        return self.bucket.url(self.key)

    @property
    def name(self) -> str:
        return PurePosixPath(self.key).name or self.bucket.name

    @property
    def parts(self) -> PartRules:
        return PartRules(PART_BYTES, MAX_PARTS, copying_rules(self.bucket))

    @property
    def inside(self) -> str:
        """Prefix of the files in it as a folder."""
        return f"{self.key}/" if self.key else ""

    @property
    def beside(self) -> str:
        """Prefix of the keys beside it."""
        return self.key.removesuffix(self.name)

    @property
    def _root(self) -> str:
        """The prefix of the names that an output's files have in its layout."""
        return self.beside if isinstance(self.form, SingleFile) else self.inside

    @property
    def _partial(self) -> str:
        return f"{self._root}{self.form.partial_name}/"

    def objects(self) -> list[Found]:
        """Contents of the folder without unfinished output."""
        folder = self.taken_as(Folder())
        partial_objects = set(folder._notes.partial_objects())
        found = self.bucket.objects(self.inside)
        return [each for each in found if each.key not in partial_objects and not each.key.startswith(folder._partial)]

    @property
    def _notes(self) -> UploadNotes:
        return UploadNotes(self.bucket, f"{self._partial}notes/", self._root)

    @property
    def lock(self) -> ObjectLock:
        return ObjectLock(self.bucket, f"{self._partial}lock", self.url)

    def present(self) -> Present | None:
        if isinstance(self.form, Folder):
            return self._folder()
        found = self.bucket.head(self.key) if self.key else None
        return None if found is None else Present(S3Store(self.bucket, self.beside, self.name), {self.name: found.size})

    def _folder(self) -> Present | None:
        """The folder's own mark, and those of folders that hold files, say nothing more than these."""
        sizes = {each.key.removeprefix(self.inside): each.size for each in self.objects()}
        files = {path: size for path, size in sizes.items() if path and not path.endswith("/")}
        full = {"", *(f"{folder}/" for folder in folders_of(files))}
        others = [path or "/" for path, size in sizes.items() if path not in files and (size or path not in full)]
        return Present(S3Store(self.bucket, self.inside), files, others) if files or others else None

    def check_free(self, *, overwrite: bool) -> None:
        """Raises DestinationExistsError where the place may not, or cannot, be taken."""
        single = self.bucket.head(self.key) if self.key else None
        is_there: dict[Kind, bool] = {"file": single is not None, "folder": self._folder() is not None}
        kinds = [kind for kind, found in is_there.items() if found]
        check_free(self.url, self.form.kind, is_taken=bool(kinds), kinds=kinds, overwrite=overwrite)

    def claim(self, *, overwrite: bool, resume: bool, fsync: bool = False) -> AbstractContextManager[S3Claim]:
        """Like ``Place.claim``. S3 answers when bytes are safe, so ``fsync`` changes nothing."""
        return claimed(self, overwrite=overwrite, resume=resume)

    def new_claim(self, *, overwrite: bool, is_kept: bool = False) -> S3Claim:
        destination = S3Destination(self.bucket, self._root, self._notes)
        return S3Claim(self, destination, S3Log(self.bucket, f"{self._partial}log/"), self.lock, overwrite, is_kept)

    def _ways(self) -> list[S3Place]:
        """The place as a folder and as a file, because the form of an earlier output is unknown. A bucket is a
        folder."""
        return [self.taken_as(Folder()), *([self.as_file()] if self.key else [])]

    def leftovers(self) -> Sequence[Leftover]:
        found: list[Leftover] = []
        for way in self._ways():
            if is_held(self.bucket.get(way.lock.key)):
                raise DestinationExistsError(f"another process is writing to {self.url}; wait for it to end")
            found += way._left()
        return found

    def _left(self) -> Iterator[Leftover]:
        notes, partial = self._notes, self._partial
        for key, upload in notes.open_uploads():
            num_bytes = sum(part.size for part in self.bucket.parts(key, upload).values())
            yield Leftover("open upload", self.bucket.url(key), num_bytes)
        for key in notes.partial_objects():
            found = self.bucket.head(key)
            yield Leftover("half an output", self.bucket.url(key), 0 if found is None else found.size)
        for each in self.bucket.objects(partial):
            kind = next((kind for kind, form in _KINDS.items() if form.fullmatch(each.key.removeprefix(partial))), None)
            if kind is not None:
                yield Leftover(kind, self.bucket.url(each.key), each.size)

    def remove_leftovers(self) -> Sequence[Leftover]:
        found = self.leftovers()
        for way in self._ways():
            if self.bucket.holds_any(way._partial):
                claim = way.new_claim(overwrite=False)
                claim.lock.take()
                try:
                    _remove_earlier(claim)
                finally:
                    claim.lock.release()
        return found

    def remove_files(self, batches: Sequence[Sequence[str]]) -> None:
        for batch in batches:
            self.bucket.delete([self.inside + name for name in batch])


_KINDS = {
    "log": re.compile(rf"log/{LOG_NUMBER.pattern}"),
    "lock": re.compile("lock"),
    "note": re.compile(rf"notes/(begun/{TOKEN_FORM.pattern}/.+|publishing)", re.DOTALL),
}
"""Objects below ``.ckpt-tools-partial/`` that runs make."""


@contextmanager
def claimed(place: S3Place, *, overwrite: bool, resume: bool) -> Iterator[S3Claim]:
    """The place, taken; on leaving, everything that was not published is removed. With ``resume`` it is kept.

    Raises:
        DestinationExistsError: something is there and ``overwrite`` is False, or another process is writing.
        StoreError: the service failed.
    """
    place.check_free(overwrite=overwrite)
    claim = place.new_claim(overwrite=overwrite, is_kept=resume)
    # A signal interrupts the block, but not taking and leaving the place.
    with defer_signals(), ExitStack() as leaving:
        claim.lock.take()
        leaving.callback(_quietly, claim.lock.release)
        leaving.enter_context(claim.lock.beating())
        with allow_signals():
            place.check_free(overwrite=overwrite)
            # Once published, these are notes, and uploads that were begun twice because an answer was lost.
            leaving.callback(_forget, claim)
            if not resume:
                _remove_earlier(claim)
            yield claim


def _remove_earlier(claim: S3Claim) -> None:
    """Objects that a killed run made and noted: uploads, log and notes."""
    claim.log.clear()
    claim.destination.notes.remove()


def _forget(claim: S3Claim) -> None:
    if not claim.is_kept:
        _quietly(lambda: _remove_earlier(claim))


def _quietly(call: Callable[[], None]) -> None:
    """Ignore errors: ``clean`` can remove the rest later, and the first error is the one to report."""
    with suppress(CkptError):
        call()

"""An S3 bucket: what lies below a prefix as a source, and as a destination that is absent, old, or complete.

Every output file is a multipart upload, of which nobody sees anything until it is completed; a task is one part of it.
Publishing completes the uploads, the last file last. Beside unfinished output, below ``.ckpt-tools-partial/``, lie
small objects of ours: the lock of the process that writes, the log of what it did, and its notes. They are gone when
the output is published.

S3 renames nothing, so that an existing checkpoint cannot be swapped for another in one step. Its last file goes first,
then the rest of it, then the new files come, the last of them last: whoever looks meanwhile finds no checkpoint.
The objects that go are those that the caller names, and no other. Marks that tools make for folders, empty objects with
a slash at the end of their names, are never ours, and stay.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import PurePosixPath

from ckpt_tools.errors import CkptError, DestinationExistsError, IncompleteError, SourceNotFoundError, StoreError
from ckpt_tools.signals import held_back, let_through
from ckpt_tools.stores.destination import CopyingRules, Leftover, PartRules
from ckpt_tools.stores.marker_files import PARTIAL, is_marker, is_shown
from ckpt_tools.stores.present import NOTHING, Present, check_only, folders_of
from ckpt_tools.stores.s3.client import Bucket, Copied, Found, Part, RefusedError, S3Options
from ckpt_tools.stores.s3.lock import ObjectLock, is_held
from ckpt_tools.stores.s3.upload_notes import TOKEN, TOKEN_FORM, UploadNotes, in_parallel
from ckpt_tools.stores.source import Buffer, ServiceFile, checked_name

PART_BYTES = 8 << 20
"""Of a file that is uploaded: 8 MiB are what S3's own tools use."""

MAX_PARTS = 10_000
"""Of one upload, the service's limit."""

_LOG_NUMBER = re.compile(r"\d{12}")

MIN_COPY_BYTES = 5 << 20
"""Of a part that the service copies itself, and of any but a file's last: its own limit."""


@dataclass(slots=True)
class S3Store:
    """The objects below ``prefix``, which is empty or ends with a slash; with ``only``, a single one of them."""

    bucket: Bucket
    prefix: str
    only: str | None = None
    _etags: dict[str, str] = field(default_factory=dict, repr=False)

    @property
    def url(self) -> str:
        return self.bucket.url(self.prefix + (self.only or "")).rstrip("/")

    def list(self) -> Mapping[str, int]:
        found = {each.key.removeprefix(self.prefix): each for each in self._objects()}
        if self.only is not None and not found:
            raise SourceNotFoundError(f"there is no file {self.url}")
        self._etags = {path: each.etag for path, each in found.items()}
        return {path: each.size for path, each in found.items()}

    def _objects(self) -> Iterator[Found]:
        """Hidden folders and the marks that tools make for empty ones are left out."""
        if self.only is not None:
            single = self.bucket.head(self.prefix + self.only)
            return iter(() if single is None else (single,))
        return (each for each in self.bucket.objects(self.prefix) if is_shown(each.key.removeprefix(self.prefix)))

    def read_into(self, path: str, start: int, buffer: memoryview) -> None:
        key = self.prefix + checked_name(path)
        if len(buffer):
            self.bucket.read_into(key, start, buffer, etag=self._etags.get(path))
            return
        size = self._found(path).size
        if start > size:
            raise IncompleteError(f"the file ends at byte {size:,}", path=self.bucket.url(key))

    def _found(self, path: str) -> Found:
        found = self.bucket.head(self.prefix + checked_name(path))
        if found is None:
            raise IncompleteError("this file of the checkpoint is missing", path=self.bucket.url(self.prefix + path))
        return found

    def version(self, path: str) -> str:
        return self._etags.get(path) or self._found(path).etag

    def locate(self, path: str) -> ServiceFile | None:
        return ServiceFile(self.bucket.options, f"{self.bucket.name}/{self.prefix}{path}", self.version(path))


@dataclass(slots=True)
class S3Destination:
    """Uploads of files below ``prefix``. In another process it writes parts of uploads that were begun here.

    A handle is a token, which the finished object carries, and the upload's id. A part tag is its ETag, after a ``+``
    where the service copied the part itself, so that its size has to be looked at.
    """

    bucket: Bucket
    prefix: str
    notes: UploadNotes
    finished: dict[str, tuple[str, str]] = field(default_factory=dict, repr=False)
    """By path: the handle and the parts' ETags, joined, as a large output has millions of them."""
    _held: dict[tuple[str, str], Mapping[int, Part] | None] = field(default_factory=dict, repr=False)

    def begin(self, path: str, size_bytes: int) -> str:
        key = self.prefix + checked_name(path)
        token = self.notes.begin(key)
        return f"{token}/{self.bucket.create_upload(key, {TOKEN: token})}"

    def write(self, path: str, handle: str, number: int, offset: int, data: Buffer) -> str:
        return self.bucket.upload_part(self.prefix + path, _upload(handle), number + 1, data)

    def can_copy(self, source: ServiceFile, num_bytes: int) -> bool:
        return source.service == self.bucket.options and num_bytes >= MIN_COPY_BYTES

    def copy(self, path: str, handle: str, number: int, source: ServiceFile, start: int, stop: int) -> str:
        bucket, _, key = source.name.partition("/")
        copied = Copied(bucket, key, start, stop, source.version)
        etag = self.bucket.copy_part(self.prefix + path, _upload(handle), number + 1, copied)
        return f"{stop - start}+{etag}"

    def holds(self, path: str, handle: str, number: int, offset: int, num_bytes: int, crc: int, part_tag: str) -> bool:
        found = self._parts(path, handle)
        return found is None or found.get(number + 1) == Part(_etag(part_tag), num_bytes)

    def _parts(self, path: str, handle: str) -> Mapping[int, Part] | None:
        """What an upload of an earlier run holds; None where it was completed, nothing where it is gone."""
        if (path, handle) not in self._held:
            key = self.prefix + path
            try:
                self._held[path, handle] = self.bucket.parts(key, _upload(handle))
            except RefusedError:
                is_complete = self.bucket.metadata(key) == {TOKEN: handle.partition("/")[0]}
                self._held[path, handle] = None if is_complete else {}
        return self._held[path, handle]

    def finish(self, path: str, handle: str, part_tags: Sequence[str]) -> None:
        if any("+" in part_tag for part_tag in part_tags):
            self._check_copied(path, handle, part_tags)
        self.finished[path] = (handle, "\n".join(map(_etag, part_tags)))
        self._held.pop((path, handle), None)

    def _check_copied(self, path: str, handle: str, part_tags: Sequence[str]) -> None:
        """Raises StoreError where a copied part has another size than it should."""
        found = self.bucket.parts(self.prefix + path, _upload(handle))
        for number, part_tag in enumerate(part_tags, 1):
            size, mark, etag = part_tag.rpartition("+")
            if mark and found.get(number) != Part(etag, int(size)):
                raise StoreError(
                    f"the service copied part {number} wrongly: {found.get(number)} instead of {size} bytes",
                    path=self.bucket.url(self.prefix + path),
                )

    def complete(self, path: str) -> None:
        """Make a finished file visible. Raises StoreError."""
        handle, etags = self.finished[path]
        token, _, upload = handle.partition("/")
        self.bucket.complete(self.prefix + path, upload, etags.split("\n"), {TOKEN: token})

    def mark(self, path: str) -> tuple[str, str]:
        """The key of a finished file, and the token that its object will carry."""
        return self.prefix + path, self.finished[path][0].partition("/")[0]

    def abandon(self) -> None:
        """Nothing is open on this side."""

    def __reduce__(self) -> tuple[object, ...]:
        return S3Destination, (self.bucket, self.prefix, self.notes)


def _upload(handle: str) -> str:
    return handle.partition("/")[2]


def _etag(part_tag: str) -> str:
    return part_tag.rpartition("+")[2]


@dataclass(slots=True)
class S3Log:
    """An object for each append, numbered."""

    bucket: Bucket
    prefix: str
    _next: Iterator[int] | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def read(self) -> bytes:
        pieces = in_parallel(self.bucket.get, self._keys())
        return b"".join(piece.data for piece in pieces if piece is not None)

    def append(self, data: bytes) -> None:
        with self._lock:
            if self._next is None:
                last = max(self._keys(), default=None)
                self._next = count(0 if last is None else int(last.removeprefix(self.prefix)) + 1)
            number = next(self._next)
        self.bucket.put(f"{self.prefix}{number:012d}", data)

    def clear(self) -> None:
        self.bucket.delete(self._keys())

    def _keys(self) -> list[str]:
        keys = [found.key for found in self.bucket.objects(self.prefix)]
        return [key for key in keys if _LOG_NUMBER.fullmatch(key.removeprefix(self.prefix))]


@dataclass(slots=True)
class S3Claim:
    """A place that this process alone writes to, as long as its lock says so."""

    place: S3Place
    destination: S3Destination
    log: S3Log
    lock: ObjectLock
    is_file: bool
    overwrite: bool
    published: bool = False

    def publish(self, paths: Sequence[str], replaced: Mapping[str, int] = NOTHING) -> None:
        """Make the finished files visible, the last of ``paths`` last, and ``replaced`` go.

        Raises:
            DestinationExistsError: somebody else put something there meanwhile. StoreError: the service failed, or
            another process took over.
        """
        self.lock.check()
        self.place.check_free(is_file=self.is_file, overwrite=self.overwrite)
        check_only(self.place.present(is_file=self.is_file), self.place.url, replaced)
        *data, last = paths
        self._remove_debris(paths)
        old = self._old([self.destination.prefix + path for path in paths], replaced)
        self.destination.notes.publish(*self.destination.mark(last), old)
        self._remove(old)
        in_parallel(self.destination.complete, data)
        self.destination.complete(last)
        self.published = True
        _quietly(self._tidy)

    def _remove_debris(self, paths: Sequence[str]) -> None:
        """What a killed run left half made, but for the files that it completed for us."""
        notes = self.destination.notes
        if partial_objects := notes.partial_objects():
            marks = dict(map(self.destination.mark, paths))
            kept = {key for key in partial_objects if key in marks and notes.token(key) == marks[key]}
            self.place.bucket.delete([key for key in partial_objects if key not in kept])

    def _old(self, new: Sequence[str], replaced: Mapping[str, int]) -> list[Found]:
        """What has to go; but a single file is replaced as it is, in one step."""
        names = {self.place.inside + path for path in replaced}
        old = [] if self.is_file else [each for each in self.place.objects() if each.key in names]
        return [] if len(new) == 1 and {each.key for each in old} <= set(new) else old

    def _remove(self, old: Sequence[Found]) -> None:
        """What makes it a checkpoint first."""
        keys = [each.key for each in old]
        self.place.bucket.delete([key for key in keys if is_marker(key)])
        self.place.bucket.delete([key for key in keys if not is_marker(key)])

    def _tidy(self) -> None:
        """Uploads that were begun twice, as an answer was lost, and the notes."""
        self.log.clear()
        self.destination.notes.remove()


@dataclass(frozen=True, slots=True)
class S3Place:
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
        return PartRules(PART_BYTES, MAX_PARTS, CopyingRules(self.bucket.options, MIN_COPY_BYTES))

    @property
    def inside(self) -> str:
        """The prefix of what is in it as a folder."""
        return f"{self.key}/" if self.key else ""

    @property
    def beside(self) -> str:
        """The prefix of what lies where it lies itself."""
        return self.key.removesuffix(self.name)

    def _partial(self, *, is_file: bool) -> str:
        return f"{self.beside}.{self.name}{PARTIAL}/" if is_file else f"{self.inside}{PARTIAL}/"

    def objects(self) -> list[Found]:
        """What is in the folder, but for what is ours alone."""
        partial = self._partial(is_file=False)
        partial_objects = set(self._traces(is_file=False).partial_objects())
        found = self.bucket.objects(self.inside)
        return [each for each in found if each.key not in partial_objects and not each.key.startswith(partial)]

    def _root(self, *, is_file: bool) -> str:
        """The prefix of the names that an output's files have in its layout."""
        return self.beside if is_file else self.inside

    def _traces(self, *, is_file: bool) -> UploadNotes:
        return UploadNotes(self.bucket, f"{self._partial(is_file=is_file)}notes/", self._root(is_file=is_file))

    def _lock(self, *, is_file: bool) -> ObjectLock:
        return ObjectLock(self.bucket, f"{self._partial(is_file=is_file)}lock", self.url)

    def lock(self) -> ObjectLock:
        """Of the folder, for whoever writes there otherwise than by a claim."""
        return self._lock(is_file=False)

    def _log(self, *, is_file: bool) -> S3Log:
        return S3Log(self.bucket, f"{self._partial(is_file=is_file)}log/")

    def present(self, *, is_file: bool) -> Present | None:
        return self._file() if is_file else self._folder()

    def _file(self) -> Present | None:
        found = self.bucket.head(self.key) if self.key else None
        return None if found is None else Present(S3Store(self.bucket, self.beside, self.name), {self.name: found.size})

    def _folder(self) -> Present | None:
        """The folder's own mark, and those of folders that hold files, say nothing more than these."""
        sizes = {each.key.removeprefix(self.inside): each.size for each in self.objects()}
        files = {path: size for path, size in sizes.items() if path and not path.endswith("/")}
        full = {"", *(f"{folder}/" for folder in folders_of(files))}
        others = [path or "/" for path, size in sizes.items() if path not in files and (size or path not in full)]
        return Present(S3Store(self.bucket, self.inside), files, others) if files or others else None

    def check_free(self, *, is_file: bool, overwrite: bool) -> None:
        """Raises DestinationExistsError where the place may not, or cannot, be taken."""
        single = self.bucket.head(self.key) if self.key else None
        inside = self._folder() is not None
        if (single is not None or inside) and not overwrite:
            raise DestinationExistsError(
                f"{self.url} exists; choose another destination, or replace it with --overwrite"
            )
        if inside if is_file else single is not None and not self.key.endswith("/"):
            kind = "folder" if is_file else "file"
            raise DestinationExistsError(f"{self.url} is a {kind}, which this output cannot replace; remove it first")

    def claim(
        self, *, is_file: bool, overwrite: bool, resume: bool, fsync: bool = False
    ) -> AbstractContextManager[S3Claim]:
        """As ``Place.claim``. S3 answers when bytes are safe, so that ``fsync`` asks for nothing more."""
        return claimed(self, is_file=is_file, overwrite=overwrite, resume=resume)

    def new_claim(self, *, is_file: bool, overwrite: bool) -> S3Claim:
        destination = S3Destination(self.bucket, self._root(is_file=is_file), self._traces(is_file=is_file))
        log, lock = self._log(is_file=is_file), self._lock(is_file=is_file)
        return S3Claim(self, destination, log, lock, is_file, overwrite)

    def _ways(self) -> list[bool]:
        """As a folder or as a file: how it was written to is not said. A bucket itself is a folder."""
        return [False, True] if self.key else [False]

    def leftovers(self) -> Sequence[Leftover]:
        found: list[Leftover] = []
        for is_file in self._ways():
            if is_held(self.bucket.get(self._lock(is_file=is_file).key)):
                raise DestinationExistsError(f"another process is writing to {self.url}; wait for it to end")
            found += self._left(is_file=is_file)
        return found

    def _left(self, *, is_file: bool) -> Iterator[Leftover]:
        notes, partial = self._traces(is_file=is_file), self._partial(is_file=is_file)
        for key, upload in notes.open_uploads():
            num_bytes = sum(part.size for part in self.bucket.parts(key, upload).values())
            yield Leftover("open upload", self.bucket.url(key), num_bytes)
        for key in notes.partial_objects():
            partial_objects = self.bucket.head(key)
            yield Leftover(
                "half an output", self.bucket.url(key), 0 if partial_objects is None else partial_objects.size
            )
        for each in self.bucket.objects(partial):
            kind = next((kind for kind, form in _KINDS.items() if form.fullmatch(each.key.removeprefix(partial))), None)
            if kind is not None:
                yield Leftover(kind, self.bucket.url(each.key), each.size)

    def remove_leftovers(self) -> Sequence[Leftover]:
        found = self.leftovers()
        for is_file in self._ways():
            if self.bucket.holds_any(self._partial(is_file=is_file)):
                self._remove_left(is_file=is_file)
        return found

    def _remove_left(self, *, is_file: bool) -> None:
        lock = self._lock(is_file=is_file)
        lock.take()
        try:
            self._traces(is_file=is_file).remove()
            self._log(is_file=is_file).clear()
        finally:
            lock.release()


_KINDS = {
    "log": re.compile(rf"log/{_LOG_NUMBER.pattern}"),
    "lock": re.compile("lock"),
    "note": re.compile(rf"notes/(begun/{TOKEN_FORM.pattern}/.+|publishing)", re.DOTALL),
}
"""The objects below ``.ckpt-tools-partial/`` that are ours."""


@contextmanager
def claimed(place: S3Place, *, is_file: bool, overwrite: bool, resume: bool) -> Iterator[S3Claim]:
    """The place, taken; on leaving, what was not published is gone. With ``resume`` it is kept.

    Raises:
        DestinationExistsError: something is there and ``overwrite`` is False, or another process is writing.
        StoreError: the service failed.
    """
    place.check_free(is_file=is_file, overwrite=overwrite)
    claim = place.new_claim(is_file=is_file, overwrite=overwrite)
    # A signal ends what is done at the place, and neither taking it nor leaving it.
    with held_back(), ExitStack() as leaving:
        claim.lock.take()
        leaving.callback(_quietly, claim.lock.release)
        leaving.enter_context(claim.lock.beating())
        with let_through():
            place.check_free(is_file=is_file, overwrite=overwrite)
            if not resume:
                leaving.callback(_forget, claim)
                _remove_earlier(claim)
            yield claim


def _remove_earlier(claim: S3Claim) -> None:
    claim.destination.notes.remove()
    claim.log.clear()


def _forget(claim: S3Claim) -> None:
    if not claim.published:
        _quietly(lambda: _remove_earlier(claim))


def _quietly(call: Callable[[], None]) -> None:
    """What cannot be removed now, ``clean`` removes later; the error that brought us here is the one to tell."""
    with suppress(CkptError):
        call()


def open_s3_store(bucket: Bucket, key: str) -> S3Store | None:
    """What is at ``key``: an object, or what lies below it; None where there is nothing.

    Raises:
        SourceNotFoundError: there is no such bucket. StoreError: it cannot be asked.
    """
    key = key.rstrip("/")
    if key and bucket.head(key) is not None:
        folder, _, name = key.rpartition("/")
        return S3Store(bucket, f"{folder}/" if folder else "", only=name)
    prefix = f"{key}/" if key else ""
    return S3Store(bucket, prefix) if bucket.holds_any(prefix) else None


def bucket_of(url: str, options: S3Options) -> tuple[Bucket, str]:
    """The bucket of an ``s3://`` URL, and the key in it, without slashes at its ends."""
    name, _, key = url.partition("://")[2].partition("/")
    return Bucket(options, name), key.strip("/")

"""A key of an S3 bucket as the location of an output that is absent, old, or complete.

Publishing completes the uploads, the marker file last. Small objects below ``.ckpt-tools-partial/`` are the lock of the
process that writes, its log, and its notes. They are removed when the output is published.

S3 cannot rename, so an existing checkpoint cannot be swapped for another in one step. Its marker file is removed first,
then its other files, then the new files are completed, the marker last: meanwhile there is no checkpoint. Only objects
that the caller names are removed. Empty objects whose names end in a slash, which tools make for folders, stay.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from ckpt_tools.core.option_names import format_option
from ckpt_tools.core.part_number import PartNumber
from ckpt_tools.core.part_rules import PartRules
from ckpt_tools.errors import DestinationExistsError
from ckpt_tools.process.signals import allow_signals
from ckpt_tools.stores.destination import JournalLog
from ckpt_tools.stores.object_lock import ObjectLock, is_lock_held
from ckpt_tools.stores.output_names import OutputForm
from ckpt_tools.stores.parallel import map_in_parallel
from ckpt_tools.stores.publishing import DestinationContents, OutputLocation, list_parent_folders
from ckpt_tools.stores.s3.client import Bucket, ListedObject
from ckpt_tools.stores.s3.destination import LOG_NAME_FORM, MAX_HELD_BYTES, S3Destination, S3Log, part_rules_of
from ckpt_tools.stores.s3.store import S3Store
from ckpt_tools.stores.s3.upload_notes import TOKEN_FORM, UploadNotes
from ckpt_tools.stores.staging import JoinedLog, Leftover, PartStaging, Staging, check_part_counts


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
    def root_prefix(self) -> str:
        """The prefix of the names that an output's files have in its layout."""
        return self.folder_prefix if self.form.file_name is None else self.key.removesuffix(self.name)

    def list_objects(self) -> list[ListedObject]:
        """Contents of the folder without unfinished output."""
        staging = self.with_form(OutputForm()).stage()
        found, notes = list(self.bucket.list_objects(self.folder_prefix)), staging.destination.notes
        is_noted = any(each.key == notes.publishing_key for each in found)
        partial_keys = {*(notes.list_partial_objects() if is_noted else ())}
        return [
            each for each in found if each.key not in partial_keys and not each.key.startswith(staging.partial_prefix)
        ]

    def list_contents(self) -> DestinationContents | None:
        if self.form.file_name is None:
            return self._list_folder()
        found = self.bucket.head_object(self.key) if self.key else None
        if found is None:
            return None
        return DestinationContents(S3Store(self.bucket, self.root_prefix, self.name), {self.name: found.size})

    def _list_folder(self) -> DestinationContents | None:
        """Contents as a folder. The empty objects that stand for the folder itself, and for folders with files in
        them, are left out."""
        sizes = {each.key.removeprefix(self.folder_prefix): each.size for each in self.list_objects()}
        files = {path: size for path, size in sizes.items() if path and not path.endswith("/")}
        nonempty_folders = {"", *(f"{folder}/" for folder in list_parent_folders(files))}
        others = [
            path or "/" for path, size in sizes.items() if path not in files and (size or path not in nonempty_folders)
        ]
        return DestinationContents.of_folder(S3Store(self.bucket, self.folder_prefix), files, others)

    def stage(self, *, resume: bool = False, fsync: bool = False) -> S3Staging:
        return S3Staging(self, is_resumed=resume)

    def stage_part(self, part: PartNumber) -> PartStaging:
        return S3PartStaging(self, is_resumed=True, part=part)

    def stage_both_forms(self) -> Sequence[Staging]:
        """A whole bucket is a folder alone."""
        return OutputLocation.stage_both_forms(self)[: 2 if self.key else 1]

    def remove_files(self, batches: Sequence[Sequence[str]]) -> None:
        for batch in batches:
            self.bucket.delete_objects([self.root_prefix + name for name in batch])


_LEFTOVER_NAME_FORM = re.compile(
    rf"(?P<log>log/(?:\d+-of-\d+/)?{LOG_NAME_FORM.pattern})|(?P<lock>lock)|(?P<note>notes/(?:begun/{TOKEN_FORM.pattern}/.+|publishing))",
    re.DOTALL,
)
"""Objects below ``.ckpt-tools-partial/`` that runs make."""


@dataclass(slots=True)
class S3Staging(Staging):
    """Uploads of an output, not visible yet, and the lock, log and notes of their run, below ``partial_prefix``.

    After a kill, the token at the last key says whether publishing has ended, and the ETags of the old objects, which
    are noted before, whether their removal had begun.
    """

    location: S3OutputLocation
    is_resumed: bool
    partial_prefix: str = field(init=False)
    destination: S3Destination = field(init=False)
    log: JournalLog = field(init=False)
    lock: ObjectLock = field(init=False)

    def __post_init__(self) -> None:
        bucket, root = self.location.bucket, self.location.root_prefix
        self.partial_prefix = f"{root}{self.location.form.partial_name}/"
        notes = UploadNotes(bucket, f"{self.partial_prefix}notes/", root)
        self.destination = S3Destination(bucket, root, notes, self.max_held_bytes)
        self.log = S3Log(bucket, self.log_prefix)
        self.lock = ObjectLock(bucket, f"{self.partial_prefix}lock", self.location.url)

    @property
    def bucket(self) -> Bucket:
        return self.location.bucket

    @property
    def max_held_bytes(self) -> int:
        """The most bytes of small files that this process holds until they are published."""
        return MAX_HELD_BYTES

    @property
    def log_prefix(self) -> str:
        """Prefix of the log, and of the logs of parts."""
        return f"{self.partial_prefix}log/"

    @property
    def rescue_hint(self) -> str:
        return f"the uploads of the new one are kept: the same command with {format_option('resume', True)} continues"

    def hold(self) -> AbstractContextManager[None]:
        return self.lock.hold()

    def discard(self) -> None:
        """Remove what a run made and noted: its log, uploads, objects of half an output, and the notes."""
        names = (each.key.removeprefix(self.partial_prefix) for each in self.bucket.list_objects(self.partial_prefix))
        kind_by_name = {name: match.lastgroup for name in names if (match := _LEFTOVER_NAME_FORM.fullmatch(name))}
        self.bucket.delete_objects([self.partial_prefix + name for name, kind in kind_by_name.items() if kind == "log"])
        if "note" in kind_by_name.values():
            self.destination.notes.remove_all()

    def list_leftovers(self) -> Iterator[Leftover]:
        if is_lock_held(self.bucket.get_object(self.lock.key)):
            raise DestinationExistsError(f"another process is writing to {self.location.url}; wait for it to end")
        notes, partial = self.destination.notes, self.partial_prefix
        for key, upload in notes.list_open_uploads():
            num_bytes = sum(part.size for part in self.bucket.list_parts(key, upload).values())
            yield Leftover("open upload", self.bucket.url(key), num_bytes)
        for key in notes.list_partial_objects():
            listed_object = self.bucket.head_object(key)
            yield Leftover("half an output", self.bucket.url(key), 0 if listed_object is None else listed_object.size)
        for each in self.bucket.list_objects(partial):
            if (match := _LEFTOVER_NAME_FORM.fullmatch(each.key.removeprefix(partial))) is not None:
                yield Leftover(match.lastgroup or "", self.bucket.url(each.key), each.size)

    def begin_publishing(self) -> None:
        self.lock.check_still_held()

    def note_publishing(self, paths: Sequence[str], replaced: Mapping[str, int]) -> Collection[str]:
        """Visible objects of a killed run are removed first, as its notes say that they are not a whole output; those
        that it completed for this one stay."""
        notes, tokens_by_key = self.destination.notes, dict(map(self.destination.get_key_and_token, paths))
        partial_objects = notes.list_partial_objects()
        completed_keys = self._find_completed_keys(tokens_by_key, partial_objects)
        self.bucket.delete_objects([key for key in partial_objects if key not in completed_keys])
        file_name = self.location.form.file_name
        old_objects = [] if file_name is not None else self._find_replaced_objects(tokens_by_key, replaced)
        last_key, token = self.destination.get_key_and_token(paths[-1])
        notes.note_publishing(last_key, token, old_objects, self.destination.list_held_files())
        if file_name is not None:
            return replaced.keys() - {file_name}
        return [each.key.removeprefix(self.location.root_prefix) for each in old_objects]

    def _find_completed_keys(self, tokens_by_key: Mapping[str, str], keys: Iterable[str]) -> set[str]:
        """Those of ``keys`` whose objects have the token of ``tokens_by_key``: a killed run completed them for this
        one."""
        known_keys = [key for key in keys if key in tokens_by_key]
        tokens = map_in_parallel(self.destination.notes.get_object_token, known_keys)
        return {key for key, token in zip(known_keys, tokens, strict=True) if token == tokens_by_key[key]}

    def _find_replaced_objects(
        self, tokens_by_key: Mapping[str, str], replaced: Mapping[str, int]
    ) -> list[ListedObject]:
        """Objects of a folder to remove. A single one is replaced in one step instead."""
        replaced_keys = {self.location.root_prefix + path for path in replaced}
        old_objects = [each for each in self.location.list_objects() if each.key in replaced_keys]
        if len(tokens_by_key) == 1 and {each.key for each in old_objects} <= tokens_by_key.keys():
            return []
        if not self.is_resumed:
            return old_objects
        completed_keys = self._find_completed_keys(tokens_by_key, (each.key for each in old_objects))
        return [each for each in old_objects if each.key not in completed_keys]

    def show_files(self, paths: Sequence[str], replaced: Mapping[str, int]) -> None:
        *data_paths, last_path = paths
        map_in_parallel(self.destination.complete_file, data_paths)
        self.destination.complete_file(last_path)


POLL_SECONDS = 1.0
"""Between two looks at the lock of another part that publishes."""

_PART_FOLDER_FORM = re.compile(r"(?P<number>\d+)-of-(?P<count>\d+)/\d{12}")


@dataclass(slots=True)
class S3PartStaging(S3Staging, PartStaging):
    """The uploads of an output that several processes make, each of which writes whole files of it.

        .ckpt-tools-partial/log/3-of-64/000000000000    the journal of a part
        .ckpt-tools-partial/lock                        of the part that publishes, renewed while it lives

    Used in two steps: ``join`` to write the part, then a ``Claim`` to publish. No part is locked: a second process of
    the same number continues the same uploads with the same bytes.
    """

    part: PartNumber = field(kw_only=True)

    @property
    def max_held_bytes(self) -> int:
        """A share of them: the part that publishes holds those of all parts."""
        return MAX_HELD_BYTES // self.part.count

    @property
    def own_log(self) -> S3Log:
        return S3Log(self.bucket, f"{self.log_prefix}{self.part.number}-of-{self.part.count}/")

    @contextmanager
    def join(self, paths: Sequence[str]) -> Iterator[None]:
        if is_lock_held(self.bucket.get_object(self.lock.key)):
            raise DestinationExistsError(
                f"another process is writing to {self.location.url}, or publishes it; wait for it to end"
            )
        if self.log.read():
            raise DestinationExistsError(
                f"{self.location.url} has what a run without {format_option('part')} left; remove it with: ckpt-tools "
                f"clean {self.location.url}"
            )
        yield

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Be the one that publishes; wait while another part does."""
        with ExitStack() as stack:
            while True:
                try:
                    stack.enter_context(self.lock.hold())
                    break
                except DestinationExistsError:
                    if not self.read_logs():
                        raise  # published, and cleaned up
                    with allow_signals():
                        time.sleep(POLL_SECONDS)
            yield

    def read_logs(self) -> Mapping[int, bytes]:
        keys = [each.key.removeprefix(self.log_prefix) for each in self.bucket.list_objects(self.log_prefix)]
        matches = [match for match in map(_PART_FOLDER_FORM.fullmatch, keys) if match is not None]
        check_part_counts((int(match["count"]) for match in matches), self.part, self.location.url)
        numbers = sorted({int(match["number"]) for match in matches})
        return {
            number: S3Log(self.bucket, f"{self.log_prefix}{number}-of-{self.part.count}/").read() for number in numbers
        }

    def prepare(self, *, resume: bool) -> None:
        """Keep what the parts wrote."""
        self.log = JoinedLog(self)

    def forget_part(self) -> None:
        self.own_log.clear()

    def sync_log(self) -> None:
        """Nothing: the service answers when bytes are safe."""

"""The hidden folder beside a destination, shared by processes that each write a part of its output.

    .out.ckpt-tools-partial/      locked by all parts that write, shared; by the one that publishes, alone
        output/                   the files, each made by whichever part comes to it first
        names                     the names of the files, the same from every part
        3-of-64.log               the journal of a part, locked by the process that writes the part

The locks are the kernel's, which end with their process. Each part notes its end in its log before it looks at the
logs of the others, so that at least the last one sees that all have ended. If several see it, one publishes and the
others find that the folder is gone.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from ckpt_tools.core.option_names import format_option
from ckpt_tools.core.part_number import PartNumber
from ckpt_tools.errors import DestinationExistsError
from ckpt_tools.process.signals import allow_signals, defer_signals
from ckpt_tools.stores.local.contents import check_path_free, is_real_folder
from ckpt_tools.stores.local.renames import fsync_folders
from ckpt_tools.stores.local.staging_folder import PART_FILE_FORM, LocalLog, LocalStaging, OwnedNames
from ckpt_tools.stores.local.store import LocalFileWriter, LocalStore, wrap_os_errors
from ckpt_tools.stores.output_names import SHARED_TOKEN_NAME
from ckpt_tools.stores.source import check_file_name
from ckpt_tools.stores.staging import JoinedLog, PartStaging, check_part_counts

POLL_SECONDS = 0.1
"""Between two tries to be the one that publishes, while other parts end."""


@dataclass(slots=True)
class _SharedOutputStore(LocalStore):
    """An output folder whose files several processes fill."""

    def create(self, path: str, size_bytes: int) -> LocalFileWriter:
        target = self.root / check_file_name(path)
        with wrap_os_errors("creating failed", target):
            target.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        writer = LocalFileWriter(target, descriptor, self.fsync)
        if os.fstat(descriptor).st_size != size_bytes:
            writer.allocate_space(size_bytes)
        return self.open_direct_writer(writer, size_bytes)

    def __reduce__(self) -> tuple[object, ...]:
        return _SharedOutputStore, (self.root, self.only_file, self.replaces_existing, self.fsync, self.is_direct)


@dataclass(slots=True)
class _PartLog(LocalLog):
    """The log of a part. It stays when it is cleared: it is what a process locks that writes the part, and by which
    others see that there are parts."""

    def clear(self) -> None:
        with wrap_os_errors("writing failed", self.path), suppress(FileNotFoundError):
            os.truncate(self.path, 0)


@dataclass(slots=True)
class LocalPartStaging(LocalStaging, PartStaging):
    """The staging of one part. Used in two steps: ``join`` to write the part, then a ``Claim`` to publish."""

    part: PartNumber = field(kw_only=True)
    _is_joining: bool = field(default=False, init=False)

    def _make_store(self) -> LocalStore:
        return _SharedOutputStore(self.output, fsync=self.fsync)

    @property
    def own_log(self) -> LocalLog:
        return _PartLog(self.path / f"{self.part.number}-of-{self.part.count}.log")

    @contextmanager
    def join(self, paths: Sequence[str]) -> Iterator[None]:
        with defer_signals():
            self._is_joining = True
            with wrap_os_errors("cannot write there", self.target.parent):
                descriptors = [self._create_and_lock()]
            try:
                # A part that published may have been killed before it cleaned up.
                with wrap_os_errors("cannot write there", self.target.parent):
                    check_path_free(self.target, self.form, overwrite=False)
                    self._refuse_other_output()
                    descriptors.append(self._lock_part())
                    self._write_names(paths)
                    self.output.mkdir(exist_ok=True)
                with allow_signals():
                    yield
            finally:
                self._is_joining = False
                self.destination.close_open_files()
                for descriptor in descriptors:
                    with suppress(OSError):
                        os.close(descriptor)

    def forget_part(self) -> None:
        with wrap_os_errors("removing failed", self.path):
            self.own_log.path.unlink(missing_ok=True)

    def _lock(self, descriptor: int) -> None:
        """Beside other parts while this one writes; alone, and waiting for those that end, to publish."""
        while True:
            try:
                fcntl.flock(descriptor, (fcntl.LOCK_SH if self._is_joining else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            except BlockingIOError as error:
                if self._is_joining:
                    raise DestinationExistsError(
                        f"another process is writing into {self.path}, or publishes it; wait for it to end"
                    ) from error
                with allow_signals():
                    time.sleep(POLL_SECONDS)
            else:
                return

    def _lock_part(self) -> int:
        descriptor = os.open(self.own_log.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(descriptor)
            raise DestinationExistsError(f"another process is writing part {self.part} of {self.target}") from error
        return descriptor

    def _refuse_other_output(self) -> None:
        """Raises DestinationExistsError if a run without parts left output there, which is not shared."""
        # A part makes its log before all else. A listing may miss the log that is made meanwhile, but not the one that
        # was there before it began.
        names = [path.name for path in self.path.iterdir()]
        if any(name != SHARED_TOKEN_NAME for name in names) and not any(
            PART_FILE_FORM.fullmatch(path.name) for path in self.path.iterdir()
        ):
            raise DestinationExistsError(
                f"{self.path} is what a run without {format_option('part')} left; remove it with: ckpt-tools clean "
                f"{self.target}"
            )

    def _write_names(self, paths: Sequence[str]) -> None:
        """Replace the list of names by the same list: appended by several machines, lines could be lost."""
        own_names = OwnedNames(self.path / f"{self.part.number}-of-{self.part.count}.names")
        own_names.path.unlink(missing_ok=True)
        own_names.add_names(paths)
        own_names.path.rename(self.owned_names.path)

    def read_logs(self) -> Mapping[int, bytes]:
        logs: dict[int, bytes] = {}
        with wrap_os_errors("reading failed", self.path), suppress(FileNotFoundError):
            for path in list(self.path.iterdir()):
                match = PART_FILE_FORM.fullmatch(path.name)
                if match is not None and match["kind"] == "log":
                    check_part_counts([int(match["count"])], self.part, str(self.target))
                    logs[int(match["number"])] = LocalLog(path).read()
        return logs

    def prepare(self, *, resume: bool) -> None:
        """Keep what the parts wrote."""
        with wrap_os_errors("cannot write there", self.target.parent):
            self.refuse_unknown_files()
            self.log = JoinedLog(self)

    def sync_log(self) -> None:
        """The log of this part, and that it is there, outlive a power failure."""
        with wrap_os_errors("writing failed", self.path):
            descriptor = os.open(self.own_log.path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            fsync_folders(self.path, *([self.output] if is_real_folder(self.output) else []))

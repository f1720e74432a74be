"""Repositories and buckets of the Hugging Face Hub, through huggingface_hub's file system.

A source is the commit that its revision names when it is opened, so that a branch that moves does not mix two versions.

An output is written to a temporary folder and sent as one commit, after which its branch has all of it. Its parent is
the commit whose files were looked at: if another commit came between, the Hub refuses it. A bucket has no commits and
takes several files one after the other (huggingface_hub 2.4, ``HfApi.batch_bucket_files``: "non-transactional"), so it
is a source only.
"""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckpt_tools.errors import DestinationExistsError, UsageError
from ckpt_tools.stores.destination import StoreDestination
from ckpt_tools.stores.fsspec.location import FsspecOutputLocation, NullLog
from ckpt_tools.stores.fsspec.store import (
    NO_RETRY,
    FsspecStore,
    call_with_retry,
    kind_of_path,
    open_file_system,
    open_store_at,
)
from ckpt_tools.stores.local.store import LocalStore
from ckpt_tools.stores.publishing import DestinationContents
from ckpt_tools.stores.source import Store
from ckpt_tools.stores.staging import Leftover, Staging

BUCKETS_PREFIX = "buckets/"

_URL_FORMS = "hf://ORG/NAME or hf://ORG/NAME@REVISION/PATH"

_REPOSITORY_FILES = frozenset({".gitattributes", "README.md"})
"""Files at the root that belong to the repository itself: the Hub makes the first, its page shows the second."""


@dataclass(frozen=True, slots=True)
class _Repository:
    """A branch or commit of a repository, and a ``path`` in it that may be empty."""

    api: Any
    name: str
    kind: str
    path_root: str
    """The repository in the paths of the file system, without a revision."""
    revision: str
    path: str

    def api_arguments(self) -> dict[str, str]:
        return {"repo_id": self.name, "repo_type": self.kind, "revision": self.revision}

    def resolve_commit(self, url: str) -> str:
        """The commit that the revision names now. Raises StoreError, FileNotFoundError."""
        return str(call_with_retry(url, lambda: self.api.repo_info(**self.api_arguments()).sha))


def _resolve_repository(fs: Any, path: str, url: str) -> _Repository:
    """Raises UsageError: it is not the path of a repository. FileNotFoundError, StoreError."""
    from huggingface_hub import HfApi

    def resolve_path() -> Any:
        with suppress(ValueError, NotImplementedError):
            return fs.resolve_path(path)
        # Without the library's reason, which quotes parts of the URL, a password among them.
        raise UsageError(f"{url} names no repository; write {_URL_FORMS}")

    resolved_path = call_with_retry(url, resolve_path)
    api = HfApi(endpoint=fs.endpoint, token=fs.token)
    root = resolved_path.root.partition("@")[0]
    return _Repository(
        api, resolved_path.repo_id, resolved_path.repo_type, root, resolved_path.revision, resolved_path.path_in_repo
    )


def open_hub_store(url: str, options: Mapping[str, Any]) -> FsspecStore | None:
    """Store at ``url``, pinned to a commit; None if nothing exists there. Raises as ``open_fsspec_store``."""
    fs, path = open_file_system(url, options)
    fs.invalidate_cache()
    if not path.startswith(BUCKETS_PREFIX):
        try:
            repository = _resolve_repository(fs, path, url)
            path = f"{repository.path_root}@{repository.resolve_commit(url)}/{repository.path}".rstrip("/")
        except FileNotFoundError:
            return None
    # Without fsspec's reading ahead, which fetches 5 MiB more each time: each range is one request.
    return open_store_at(fs, path, url, cache_type="none")


@dataclass(slots=True)
class _TemporaryDestination(StoreDestination):
    """Files of a temporary folder. It cannot be sent to another process, which may be on another machine."""

    def __reduce__(self) -> tuple[object, ...]:
        raise UsageError("only one process can write to this destination; name a path or an s3:// URL")


@dataclass(frozen=True, slots=True)
class HubOutputLocation(FsspecOutputLocation):
    """A path in a repository, as the location of an output."""

    @classmethod
    def of(cls, url: str, options: Mapping[str, Any]) -> HubOutputLocation:
        fs, path = open_file_system(url, options)
        if path.startswith(BUCKETS_PREFIX):
            raise UsageError(
                f"{url}: a bucket takes files one after the other, so that others could read half a checkpoint; write "
                f"to a folder, then run: hf buckets sync FOLDER {url}"
            )
        if "/" not in path:
            raise UsageError(f"{url}: nothing can be written there; write {_URL_FORMS}")
        return cls(fs, path)

    def open_repository(self) -> _Repository:
        """Raises UsageError if it is absent, or has a .gitignore."""
        try:
            repository = _resolve_repository(self.fs, self.path, self.url)
        except FileNotFoundError as error:
            raise UsageError(f"{self.url}: there is no such repository or branch; run: hf repos create") from error
        if kind_of_path(
            self.fs, f"{repository.path_root}@{repository.revision.replace('/', '%2F')}/.gitignore", self.url
        ):
            raise UsageError(
                f"{self.url}: the Hub leaves out files that the repository's .gitignore names; remove .gitignore"
            )
        return repository

    def _list_folder(self) -> DestinationContents | None:
        contents = FsspecOutputLocation._list_folder(self)
        if contents is None or self.fs.resolve_path(self.path).path_in_repo:
            return contents
        files = {name: size for name, size in contents.files.items() if name not in _REPOSITORY_FILES}
        return DestinationContents.of_folder(contents.store, files, contents.others)

    def stage(self, *, resume: bool = False, fsync: bool = False) -> Staging:
        return HubStaging(self)


@dataclass(slots=True)
class HubStaging(Staging):
    """Files in a temporary folder, to be sent as one commit after ``parent_commit``, whose files were looked at."""

    location: HubOutputLocation
    repository: _Repository = field(init=False)
    parent_commit: str = field(init=False)
    destination: _TemporaryDestination = field(init=False)
    log: NullLog = field(default_factory=NullLog, init=False)

    @property
    def finished_store(self) -> Store:
        return self.destination.store

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Another commit before that of ``show_files`` makes it fail. Raises UsageError if there is no repository."""
        self.location.fs.invalidate_cache()
        self.location.open_repository()
        with tempfile.TemporaryDirectory(prefix="ckpt-tools-") as folder:
            output_folder = Path(folder, "output")
            output_folder.mkdir()
            self.destination = _TemporaryDestination(LocalStore(output_folder, replaces_existing=True))
            yield

    def discard(self) -> None:
        """Does nothing: ``hold`` removes the folder."""

    def list_leftovers(self) -> Sequence[Leftover]:
        """None: an unfinished output is on this machine alone."""
        return ()

    def begin_publishing(self) -> None:
        self.repository = self.location.open_repository()
        self.parent_commit = self.repository.resolve_commit(self.location.url)

    def note_publishing(self, paths: Sequence[str], replaced: Mapping[str, int]) -> Collection[str]:
        return ()

    def show_files(self, paths: Sequence[str], replaced: Mapping[str, int]) -> None:
        """Add and remove files of the location in one commit.

        Raises:
            DestinationExistsError: the branch has another commit now. StoreError.
        """
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete
        from huggingface_hub.errors import HfHubHTTPError

        location, repository = self.location, self.repository
        root = location.form.root_folder_of(repository.path)
        path_prefix = f"{root}/" if root else ""
        operations = [
            *(CommitOperationAdd(f"{path_prefix}{name}", f"{self.destination.store.url}/{name}") for name in paths),
            *(CommitOperationDelete(f"{path_prefix}{name}") for name in sorted(replaced.keys() - {*paths})),
        ]

        def send_commit() -> None:
            try:
                with _without_progress_bars():
                    repository.api.create_commit(
                        operations=operations,
                        commit_message="Write a checkpoint with ckpt-tools",
                        parent_commit=self.parent_commit,
                        **repository.api_arguments(),
                    )
            except RuntimeError as error:  # around the answer to the upload of one file
                raise error.__cause__ or error from None
            except HfHubHTTPError as error:
                if error.response.status_code == _PRECONDITION_FAILED:
                    raise DestinationExistsError(
                        f"{location.url} has a new commit of another program; nothing was replaced; run this again"
                    ) from error
                raise

        call_with_retry(location.url, send_commit, NO_RETRY)
        location.fs.invalidate_cache()


_PRECONDITION_FAILED = 412
"""The Hub's answer where the branch is no longer at the parent of a commit."""


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    """huggingface_hub shows no progress of its own within the block."""
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    was_disabled = are_progress_bars_disabled()
    disable_progress_bars()
    try:
        yield
    finally:
        if not was_disabled:
            enable_progress_bars()

"""Repositories and buckets of the Hugging Face Hub, through huggingface_hub's file system.

A source is the commit that its revision names when it is opened, so that a branch that moves does not mix two versions.

An output is written to a temporary folder and sent as one commit, after which its branch has all of it. Its parent is
the commit whose files were looked at: if another commit came between, the Hub refuses it. A bucket has no commits and
takes several files one after the other (huggingface_hub 2.4, ``HfApi.batch_bucket_files``: "non-transactional"), so it
is a source only.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ckpt_tools.core.option_names import format_option
from ckpt_tools.errors import DestinationExistsError, UsageError
from ckpt_tools.signals import allow_signals, defer_signals
from ckpt_tools.stores.destination import Claim, Leftover
from ckpt_tools.stores.file_destination import StoreDestination
from ckpt_tools.stores.fsspec.place import FsspecPlace
from ckpt_tools.stores.fsspec.store import FsspecStore, asked, file_system, kind_at, once
from ckpt_tools.stores.local.place import LocalLog, LocalPlace, Staging
from ckpt_tools.stores.output_form import SingleFile
from ckpt_tools.stores.present import NOTHING, Present, check_only
from ckpt_tools.stores.source import Store

BUCKETS = "buckets/"

_FORMS = "hf://ORG/NAME or hf://ORG/NAME@REVISION/PATH"

_REPOSITORYS_OWN = frozenset({".gitattributes", "README.md"})
"""Files at the root that belong to the repository itself: the Hub makes the first, its page shows the second."""


@dataclass(frozen=True, slots=True)
class _Repository:
    """A branch or commit of a repository, and a ``path`` in it that may be empty."""

    api: Any
    name: str
    kind: str
    root: str
    """The repository in the paths of the file system, without a revision."""
    revision: str
    path: str

    def asking(self) -> dict[str, str]:
        return {"repo_id": self.name, "repo_type": self.kind, "revision": self.revision}

    def commit(self, url: str) -> str:
        """The commit that the revision names now. Raises StoreError, FileNotFoundError."""
        return str(asked(url, lambda: self.api.repo_info(**self.asking()).sha))


def _repository(fs: Any, path: str, url: str) -> _Repository:
    """Raises UsageError: it is not the path of a repository. FileNotFoundError, StoreError."""
    from huggingface_hub import HfApi

    def resolve() -> Any:
        try:
            return fs.resolve_path(path)
        except (ValueError, NotImplementedError) as error:
            raise UsageError(f"{url}: {str(error).rstrip('.')}; write {_FORMS}") from error

    found = asked(url, resolve)
    api = HfApi(endpoint=fs.endpoint, token=fs.token)
    root = found.root.partition("@")[0]
    return _Repository(api, found.repo_id, found.repo_type, root, found.revision, found.path_in_repo)


@dataclass(slots=True)
class HubStore(FsspecStore):
    """Files of the Hub. Each range is one request."""

    def fetched(self, full: str, start: int, stop: int) -> bytes:
        """Without fsspec's reading ahead, which fetches 5 MiB more each time."""
        data: bytes = self.fs.cat_file(full, start=start, end=stop, cache_type="none")
        return data


def open_hub_store(url: str, options: Mapping[str, Any]) -> HubStore | None:
    """Store at ``url``, pinned to a commit; None if nothing exists there. Raises as ``open_fsspec_store``."""
    fs, path = file_system(url, options)
    fs.invalidate_cache()
    if not path.startswith(BUCKETS):
        try:
            repository = _repository(fs, path, url)
            path = f"{repository.root}@{repository.commit(url)}/{repository.path}".rstrip("/")
        except FileNotFoundError:
            return None
    kind = kind_at(fs, path, url)
    if kind == "file":
        folder, _, name = path.rpartition("/")
        return HubStore(fs, folder, name)
    return None if kind is None else HubStore(fs, path)


@dataclass(slots=True)
class _Staged(StoreDestination):
    """Files of a temporary folder. It cannot be sent to another process, which may be on another machine."""

    def __reduce__(self) -> tuple[object, ...]:
        raise UsageError("only one process can write to this destination; name a path or an s3:// URL")


@dataclass(slots=True)
class HubClaim(Claim):
    """An output in a temporary folder, to be sent as one commit."""

    place: HubPlace
    inner: Staging
    overwrite: bool
    destination: _Staged = field(init=False)
    log: LocalLog = field(init=False)

    def __post_init__(self) -> None:
        self.destination = _Staged(self.inner.store)
        self.log = self.inner.log

    @property
    def finished(self) -> Store:
        return self.inner.finished

    def publish(self, paths: Sequence[str], replaced: Mapping[str, int] = NOTHING) -> None:
        place = self.place
        repository = place.repository()
        parent = repository.commit(place.url)
        place.check_free(overwrite=self.overwrite)
        check_only(place.present(), place.url, replaced)
        self.inner.publish(paths)
        folder = self.inner.target.parent if isinstance(place.form, SingleFile) else self.inner.target
        place.commit(repository, parent, {path: folder / path for path in paths}, {*replaced} - {*paths})


@dataclass(frozen=True, slots=True)
class HubPlace(FsspecPlace):
    """A path in a repository, as the place of an output."""

    @classmethod
    def of(cls, url: str, options: Mapping[str, Any]) -> HubPlace:
        fs, path = file_system(url, options)
        if path.startswith(BUCKETS):
            raise UsageError(
                f"{url}: a bucket takes files one after the other, so that others could read half a checkpoint; write "
                f"to a folder, then run: hf buckets sync FOLDER {url}"
            )
        if "/" not in path:
            raise UsageError(f"{url}: nothing can be written there; write {_FORMS}")
        return cls(fs, path)

    def repository(self) -> _Repository:
        """Raises UsageError if it is absent, or has a .gitignore."""
        try:
            found = _repository(self.fs, self.path, self.url)
        except FileNotFoundError as error:
            raise UsageError(f"{self.url}: there is no such repository or branch; run: hf repos create") from error
        if kind_at(self.fs, f"{found.root}@{found.revision.replace('/', '%2F')}/.gitignore", self.url):
            raise UsageError(
                f"{self.url}: the Hub leaves out files that the repository's .gitignore names; remove .gitignore"
            )
        return found

    def _folder(self) -> Present | None:
        found = FsspecPlace._folder(self)
        if found is None or self.fs.resolve_path(self.path).path_in_repo:
            return found
        files = {name: size for name, size in found.files.items() if name not in _REPOSITORYS_OWN}
        return replace(found, files=files) if files or found.others else None

    @contextmanager
    def claim(self, *, overwrite: bool, resume: bool, fsync: bool = False) -> Iterator[HubClaim]:
        """Take the place; another commit before that of ``publish`` makes it fail.

        Raises:
            UsageError: ``resume``, or there is no such repository.
        """
        if resume:
            raise UsageError(
                f"{format_option('resume', True)}: what was written to {self.url} cannot be continued, "
                "only to paths and s3:// URLs"
            )
        self.fs.invalidate_cache()
        self.repository()
        self.check_free(overwrite=overwrite)
        with defer_signals(), tempfile.TemporaryDirectory(prefix="ckpt-tools-") as folder:
            local = LocalPlace(Path(folder) / self.name, form=self.form)
            with local.claim(overwrite=False, resume=False) as inner, allow_signals():
                yield HubClaim(self, inner, overwrite)

    def commit(self, repository: _Repository, parent: str, added: Mapping[str, Path], removed: set[str]) -> None:
        """Add and remove files of this place in one commit after ``parent``.

        Raises:
            DestinationExistsError: the branch has another commit now. StoreError.
        """
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete
        from huggingface_hub.errors import HfHubHTTPError

        root = self.form.root_of(repository.path)
        inside = f"{root}/" if root else ""
        operations = [
            *(CommitOperationAdd(f"{inside}{name}", str(path)) for name, path in added.items()),
            *(CommitOperationDelete(f"{inside}{name}") for name in sorted(removed)),
        ]

        def send() -> None:
            try:
                with _without_bars():
                    repository.api.create_commit(
                        operations=operations,
                        commit_message="Write a checkpoint with ckpt-tools",
                        parent_commit=parent,
                        **repository.asking(),
                    )
            except RuntimeError as error:  # around the answer to the upload of one file
                raise error.__cause__ or error from None
            except HfHubHTTPError as error:
                if error.response.status_code == _MOVED:
                    raise DestinationExistsError(
                        f"{self.url} has a new commit of another program; nothing was replaced; run this again"
                    ) from error
                raise

        once(self.url, send)
        self.fs.invalidate_cache()

    def leftovers(self) -> Sequence[Leftover]:
        """None: an unfinished output is on this machine alone."""
        return ()

    def remove_leftovers(self) -> Sequence[Leftover]:
        return ()


_MOVED = 412
"""The Hub's answer where the branch is no longer at the parent of a commit."""


@contextmanager
def _without_bars() -> Iterator[None]:
    """huggingface_hub shows no progress of its own within the block."""
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    was_disabled = are_progress_bars_disabled()
    disable_progress_bars()
    try:
        yield
    finally:
        if not was_disabled:
            enable_progress_bars()

"""``prune`` removes old checkpoints of a run: files that trainers write, of checkpoints that ``ls`` lists, and nothing
else.

A checkpoint whose folder holds anything else stays, and so do those that a link or a file ``latest`` names. The files
without which nothing takes the rest for whole go first, so that a removal that is killed leaves what ``ls`` calls
incomplete. Before anything goes, the newest complete checkpoints are opened, and compared with two that would go.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import ClassVar

from ckpt_tools.core.showing import DisplayableResult
from ckpt_tools.errors import (
    CkptError,
    DestinationExistsError,
    SourceNotFoundError,
    StoreError,
    UsageError,
)
from ckpt_tools.runs.comparing import compared
from ckpt_tools.runs.files import in_order_of_removal, strangers
from ckpt_tools.runs.listing import found_in, listing, read
from ckpt_tools.runs.metrics import metrics_of, named_best
from ckpt_tools.runs.naming import named_by_file
from ckpt_tools.runs.report import RunCheckpoint
from ckpt_tools.runs.rules import Best, Facts, PruneRules, reasons, relied
from ckpt_tools.stores.claims import claim
from ckpt_tools.stores.destination import OutputLocation
from ckpt_tools.stores.output_form import FolderForm
from ckpt_tools.stores.present import DestinationContents, format_names
from ckpt_tools.stores.source import Source
from ckpt_tools.stores.urls import StorageOptions, is_remote, local_path, open_output_location, open_run_source
from ckpt_tools.trainers.run_folders import Member, parent_of

RECENT_SECONDS = 3600
"""A save of the largest models takes minutes. One that wrote nothing for an hour is over."""

LOCK_NAME = ".lock"
"""What a run of ours locks in its folder while it lives."""

CHECKPOINTS = "checkpoints"
"""Where a run of ours keeps its checkpoints, in the folder or store that it locks."""


@dataclass(frozen=True, slots=True, repr=False)
class Pruned(DisplayableResult):
    """One checkpoint of the run: whether it stays, and why."""

    name: str
    stays: bool
    reason: str
    num_files: int
    file_bytes: int


@dataclass(frozen=True, slots=True, repr=False)
class PruneReport(DisplayableResult):
    """The checkpoints of ``source``, the newest first. Those that do not stay are gone if ``is_removed``."""

    SHOWN: ClassVar[tuple[str, ...]] = ("source", "num_staying", "num_going", "is_removed", "file_bytes")
    JSON_PROPERTIES: ClassVar[tuple[str, ...]] = ("num_files", "file_bytes")

    source: str
    checkpoints: Sequence[Pruned]
    is_removed: bool

    @property
    def num_staying(self) -> int:
        return sum(each.stays for each in self.checkpoints)

    @property
    def num_going(self) -> int:
        """Checkpoints that do not stay."""
        return len(self.checkpoints) - self.num_staying

    @property
    def num_files(self) -> int:
        """Number of files of the checkpoints that do not stay."""
        return sum(each.num_files for each in self.checkpoints if not each.stays)

    @property
    def file_bytes(self) -> int:
        return sum(each.file_bytes for each in self.checkpoints if not each.stays)


def prune_run(url: str | Path, rules: PruneRules, *, yes: bool, storage_options: StorageOptions) -> PruneReport:
    """What goes and what stays; with ``yes``, what goes is gone.

    Raises:
        SourceNotFoundError: there are no checkpoints. UsageError: it is one checkpoint, or holds several runs.
        DestinationExistsError: a run of ours is writing there. FormatError: the newest complete one cannot be opened.
    """
    with _alone(url, storage_options) if yes else nullcontext():
        run = _Run.open(url, storage_options)
        judged = run.judged(rules)
        if yes:
            run.remove([member for member, pruned in judged if not pruned.stays])
        return PruneReport(str(url), tuple(pruned for _, pruned in judged), is_removed=yes)


@dataclass(frozen=True, slots=True)
class _Run:
    """A run as it was listed: what a reader sees of it, and all that is there."""

    url: str
    place: OutputLocation
    source: Source
    present: DestinationContents
    members: Sequence[Member]
    shown: Mapping[str, RunCheckpoint]
    storage_options: StorageOptions

    @classmethod
    def open(cls, url: str | Path, storage_options: StorageOptions) -> _Run:
        source = open_run_source(url, storage_options)
        shown = listing(source, url=str(url)).checkpoints
        members = found_in(source, str(url))
        _check_run(str(url), members)
        place = open_output_location(url, storage_options).with_form(FolderForm())
        present = place.list_contents()
        if present is None:
            raise SourceNotFoundError(f"there is no folder {url}")
        return cls(str(url), place, source, present, members, {each.name: each for each in shown}, storage_options)

    def judged(self, rules: PruneRules) -> list[tuple[Member, Pruned]]:
        if not any(each.is_complete for each in self.shown.values()):
            raise SourceNotFoundError(f"{self.url} has no complete checkpoint; nothing is removed from such a run")
        best = None if rules.keep_best is None else self._best(rules.keep_best)
        named = named_best(self.members, self.source)
        facts = [self._facts(member, named) for member in self.members]
        stays = reasons(facts, rules, best)
        complete = [each for each in self.members if each.is_numbered and self.shown[each.name].is_complete]
        kept = compared(complete, self.source, relied(facts, stays, rules))
        return [(member, self._pruned(member, stays[member.name] or kept.get(member.name))) for member in self.members]

    def _pruned(self, member: Member, reason: str | None) -> Pruned:
        shown = self.shown[member.name]
        goes = "older than those that stay" if shown.problem is None else f"not complete: {shown.problem}"
        return Pruned(member.name, reason is not None, reason or goes, shown.num_files, shown.file_bytes)

    def _best(self, best: Best) -> str:
        complete = (member for member in self.members if self.shown[member.name].is_complete)
        return best.choose({member.name: metrics_of(member.saved(self.source)) for member in complete})

    def _facts(self, member: Member, named: Mapping[str, str]) -> Facts:
        shown = self.shown[member.name]
        return Facts(
            shown,
            number=member.number if member.is_numbered else "",
            held=self._named(member) or named.get(member.name) or self._strangers(member),
            is_recent=_is_recent(shown),
        )

    def _named(self, member: Member) -> str | None:
        """A link, or the file ``latest``, leads there."""
        if named_by_file(self.source) == member.name:
            return "the file latest names it"
        if is_remote(self.url):
            return None
        root = local_path(self.url)
        target = os.path.realpath(root / member.name)
        links = (name for name in self.present.others if (root / name).is_symlink())
        found = next((name for name in links if f"{os.path.realpath(root / name)}/".startswith(f"{target}/")), None)
        return None if found is None else f"the link {found} leads to it"

    def _strangers(self, member: Member) -> str | None:
        if member.is_file:
            return None if member.name in self.present.files else "it is a link"
        start = f"{member.name}/"
        inside = {path[len(start) :] for path in self.present.files if path.startswith(start)}
        others = strangers(inside)
        if others:
            others -= self._own_files(member)
        others |= {path[len(start) :] for path in self.present.others if path.startswith(start)}
        others |= {path[len(start) :] for path in member.files if path not in self.present.files}
        return f"it holds what no trainer writes: {format_names(sorted(others))}" if others else None

    def _own_files(self, member: Member) -> frozenset[str]:
        saved = member.saved(self.source)
        try:
            found, manifest = read(saved)
            return found.own_files(saved.source, manifest) | (manifest.files & saved.files.keys())
        except StoreError:
            raise
        except CkptError:
            return frozenset()

    def remove(self, going: Sequence[Member]) -> None:
        """Removes the oldest first. Raises DestinationExistsError if a conversion is writing to one of them."""
        if not going:
            return
        for member in reversed(going):
            open_output_location(f"{self.url.rstrip('/')}/{member.name}", self.storage_options).list_leftovers()
        for member in reversed(going):
            self.place.remove_files(in_order_of_removal(member.files))


def _check_run(url: str, members: Sequence[Member]) -> None:
    if any(member.is_run or (member.is_file and url.endswith(f"/{member.name}")) for member in members):
        raise UsageError(f"{url} is itself one checkpoint; name the folder of the run that holds it")
    parents = sorted({parent_of(member.name) for member in members if member.is_numbered})
    if len(parents) > 1:
        raise UsageError(
            f"{url} holds checkpoints of several runs ({format_names([each or url for each in parents])}); name one "
            f"of them"
        )
    if not parents:
        raise UsageError(f"no checkpoint in {url} has a step in its name, so none of them is known to be old")


def _is_recent(shown: RunCheckpoint) -> bool:
    """True if the store cannot tell."""
    if shown.time is None:
        return True
    return time.time() - datetime.fromisoformat(shown.time).timestamp() < RECENT_SECONDS


@contextmanager
def _alone(url: str | Path, storage_options: StorageOptions) -> Iterator[None]:
    """While inside, no run of ours writes to the run. Raises DestinationExistsError if one does."""
    base = str(url).rstrip("/")
    folder, _, name = base.rpartition("/")
    homes = [base, folder] if name == CHECKPOINTS else [base]
    with ExitStack() as held:
        for home in homes:
            if is_remote(url):
                held.enter_context(claim(home, storage_options=storage_options))
            else:
                held.enter_context(_locked(local_path(home)))
        yield


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """A lock that is there is taken; none is made."""
    path = folder / LOCK_NAME
    if path.is_symlink() or not path.is_file():
        yield
        return
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise DestinationExistsError(f"a run is writing to {folder} (it holds {path}); wait for it to end") from error
    finally:
        os.close(descriptor)

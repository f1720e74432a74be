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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import ClassVar

from ckpt_tools.arguments import is_remote
from ckpt_tools.core.manifest import Manifest
from ckpt_tools.core.option_names import format_option
from ckpt_tools.errors import UNREADABLE, DestinationExistsError, DifferenceError, SourceNotFoundError, UsageError
from ckpt_tools.messages.showing import DisplayableResult
from ckpt_tools.runs.comparing import check_kept_steps, read_manifest
from ckpt_tools.runs.files import batch_for_removal, find_unknown_files
from ckpt_tools.runs.listing import RunCheckpoint, check_is_one_run, list_members, read_plain_manifest
from ckpt_tools.runs.metrics import find_recorded_best, read_metrics
from ckpt_tools.runs.naming import read_latest_name
from ckpt_tools.runs.rules import PruneCandidate, PruneRules, choose_compared_steps, find_keep_reasons
from ckpt_tools.stores.output_names import OutputForm
from ckpt_tools.stores.publishing import DestinationContents, format_names
from ckpt_tools.stores.remote import claim
from ckpt_tools.stores.source import Store
from ckpt_tools.stores.urls import StorageOptions, local_path, open_output_location, open_run_source
from ckpt_tools.trainers.saved import SavedCheckpoint

RECENT_SECONDS = 3600
"""A save of the largest models takes minutes. One that wrote nothing for an hour is over."""

LOCK_NAME = ".lock"
"""What a run of ours locks in its folder while it lives."""

CHECKPOINTS_FOLDER = "checkpoints"
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


IsFinite = Callable[[Store, Manifest], bool]
"""Reads the tensors of a checkpoint, and tells whether all of its values are finite."""


def prune_run(
    url: str | Path,
    rules: PruneRules,
    *,
    yes: bool,
    storage_options: StorageOptions,
    is_finite: IsFinite | None = None,
) -> PruneReport:
    """Decide which checkpoints go and which stay, and with ``yes`` remove those that go. With ``is_finite``, the newest
    step for which it is true stays.

    Raises:
        SourceNotFoundError: there are no checkpoints. UsageError: it is one checkpoint, or holds several runs.
        DestinationExistsError: a run of ours is writing there. FormatError: the newest complete one cannot be opened.
        DifferenceError: no complete checkpoint is finite.
    """
    with _lock_run(url, storage_options) if yes else nullcontext():
        run = open_run_source(url, storage_options)
        listed = list_members(run, str(url))
        _check_is_run(str(url), [member for member, _ in listed])
        destination = open_output_location(url, storage_options).with_form(OutputForm())
        contents = destination.list_contents()
        if contents is None:
            raise SourceNotFoundError(f"there is no folder {url}")
        if not any(shown.is_complete for _, shown in listed):
            raise SourceNotFoundError(f"{url} has no complete checkpoint; nothing is removed from such a run")
        recorded_best = find_recorded_best([member for member, _ in listed])
        candidates = []
        for member, shown in listed:
            protection_reason = (
                _describe_pointer(member, str(url), contents)
                or recorded_best.get(member.name)
                or _describe_unknown_files(member, contents)
            )
            candidates.append(PruneCandidate(member, shown, protection_reason, _is_recent(shown)))
        keep_reasons = _decide_what_stays(candidates, rules)
        if is_finite is not None:
            finite_reasons = _find_newest_finite(candidates, keep_reasons, is_finite)
            keep_reasons = {name: reason or finite_reasons.get(name) for name, reason in keep_reasons.items()}
        going = [each.member for each in candidates if keep_reasons[each.name] is None]
        if yes and going:
            for member in going:  # refused if a conversion is writing to one of them
                location = open_output_location(f"{str(url).rstrip('/')}/{member.name}", storage_options)
                location.clean(dry_run=True)
            for member in reversed(going):  # the oldest first
                destination.remove_files(batch_for_removal(member.run_files))
        return PruneReport(str(url), tuple(_make_pruned(each, keep_reasons[each.name]) for each in candidates), yes)


def _decide_what_stays(candidates: Sequence[PruneCandidate], rules: PruneRules) -> dict[str, str | None]:
    """Why each checkpoint stays, by name; None for those that go. Raises as :func:`prune_run`."""
    # First the pure rules, then the step that reads: the checkpoints that stay are opened, and the command is refused
    # if one that goes holds more. That step may also keep the newest with optimizer state.
    complete_members = [each.member for each in candidates if each.shown.is_complete]
    best_name = None
    if rules.keep_best is not None:
        best_name = rules.keep_best.choose_best({each.name: read_metrics(each) for each in complete_members})
    keep_reasons = find_keep_reasons(candidates, rules, best_name)
    compared_steps = choose_compared_steps(candidates, keep_reasons, rules)
    optimizer_reasons = check_kept_steps((each for each in complete_members if each.is_numbered), compared_steps)
    return {name: reason or optimizer_reasons.get(name) for name, reason in keep_reasons.items()}


def _find_newest_finite(
    candidates: Sequence[PruneCandidate], keep_reasons: Mapping[str, str | None], is_finite: IsFinite
) -> Mapping[str, str]:
    """The newest checkpoints of one step that are finite, and the reason to keep them; none if nothing goes. One that
    cannot be read is not known to be finite. Raises DifferenceError if there is none."""
    complete = [each for each in candidates if each.shown.is_complete and each.step_key]
    if all(keep_reasons[each.name] for each in complete):
        return {}
    for step_key in dict.fromkeys(each.step_key for each in complete):
        members = [each.member for each in complete if each.step_key == step_key]
        if all(_has_finite_values(each, is_finite) for each in members):
            return {each.name: "the newest whose values are all finite" for each in members}
    raise DifferenceError(
        "no complete checkpoint is known to have finite values alone, so that none can be relied on; nothing was "
        f"removed; leave out {format_option('healthy', True)} to prune without reading them"
    )


def _has_finite_values(member: SavedCheckpoint, is_finite: IsFinite) -> bool:
    try:
        source, manifest = read_manifest(member)
        return bool(manifest.tensors) and is_finite(source.store, manifest)
    except UNREADABLE:
        return False


def _make_pruned(candidate: PruneCandidate, keep_reason: str | None) -> Pruned:
    shown = candidate.shown
    removal_reason = "older than those that stay" if shown.problem is None else f"not complete: {shown.problem}"
    reason = keep_reason or removal_reason
    return Pruned(candidate.name, keep_reason is not None, reason, shown.num_files, shown.file_bytes)


def _describe_pointer(member: SavedCheckpoint, url: str, contents: DestinationContents) -> str | None:
    """Why it is protected, if a link or the file ``latest`` leads to it."""
    if read_latest_name(member.run) == member.name:
        return "the file latest names it"
    if is_remote(url):
        return None
    root = local_path(url)
    target = os.path.realpath(root / member.name)
    links = (name for name in contents.others if (root / name).is_symlink())
    link_name = next((name for name in links if f"{os.path.realpath(root / name)}/".startswith(f"{target}/")), None)
    return None if link_name is None else f"the link {link_name} leads to it"


def _describe_unknown_files(member: SavedCheckpoint, contents: DestinationContents) -> str | None:
    if member.is_file:
        return None if member.name in contents.files else "it is a link"
    prefix = f"{member.name}/"
    unknown_paths = find_unknown_files({path[len(prefix) :] for path in contents.files if path.startswith(prefix)})
    if unknown_paths:
        unknown_paths -= _read_own_files(member)
    unseen_paths = (path for path in member.run_files if path not in contents.files)
    unknown_paths |= {path[len(prefix) :] for path in (*contents.others, *unseen_paths) if path.startswith(prefix)}
    return f"it holds what no trainer writes: {format_names(sorted(unknown_paths))}" if unknown_paths else None


def _read_own_files(member: SavedCheckpoint) -> frozenset[str]:
    """The files that its reader names; none if it cannot be read."""
    try:
        reader, manifest = read_plain_manifest(member)
        return reader.own_files(member.source, manifest) | (manifest.files & member.files.keys())
    except UNREADABLE:
        return frozenset()


def _check_is_run(url: str, members: Sequence[SavedCheckpoint]) -> None:
    if any(member.is_run or (member.is_file and url.endswith(f"/{member.name}")) for member in members):
        raise UsageError(f"{url} is itself one checkpoint; name the folder of the run that holds it")
    numbered_names = [member.name for member in members if member.is_numbered]
    check_is_one_run(url, numbered_names)
    if not numbered_names:
        raise UsageError(f"no checkpoint in {url} has a step in its name, so none of them is known to be old")


def _is_recent(checkpoint: RunCheckpoint) -> bool:
    """Whether a file of it was written within the last hour. True if the store cannot tell."""
    if checkpoint.time is None:
        return True
    return time.time() - datetime.fromisoformat(checkpoint.time).timestamp() < RECENT_SECONDS


@contextmanager
def _lock_run(url: str | Path, storage_options: StorageOptions) -> Iterator[None]:
    """While inside, no run of ours writes to the run. Raises DestinationExistsError if one does."""
    run_url = str(url).rstrip("/")
    folder, _, name = run_url.rpartition("/")
    locked_urls = [run_url, folder] if name == CHECKPOINTS_FOLDER else [run_url]
    with ExitStack() as locks:
        for home in locked_urls:
            if is_remote(url):
                locks.enter_context(claim(home, storage_options=storage_options))
            else:
                locks.enter_context(_lock_folder(local_path(home)))
        yield


@contextmanager
def _lock_folder(folder: Path) -> Iterator[None]:
    """Hold the lock of ``folder`` while inside, if there is a file for it; none is made."""
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

"""Every checkpoint of a run, each converted once: those that are there, and those that a training still saves.

    look ──▶ complete? chosen? ──▶ for each, in the order of steps: published already? ──▶ convert ──▶ one line
      ▲                                                                                                  │
      └───────────── wait, if the run is followed ◀──────────────────────────────────────────────────────┘

No state is kept but the outputs: each is published whole or not at all, so that the next call continues with those that
are missing. The run is only read. A trainer may remove or rewrite a checkpoint while it is read, so the versions of its
files are noted before it is judged to be complete, and have to be the same before its output is published. In a run
that is followed they have to be the same at two looks, too, so that the last file of a save is not missed where no file
says that the save is over.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import ClassVar

from ckpt_tools.conversion.convert import run_conversion
from ckpt_tools.conversion.published import is_published
from ckpt_tools.conversion.report import ConvertReport
from ckpt_tools.core.option_names import format_option
from ckpt_tools.core.options import ConvertRequest
from ckpt_tools.errors import CkptError, IncompleteError, SourceNotFoundError, StoreError, UsageError
from ckpt_tools.messages.progress import log_warning
from ckpt_tools.messages.showing import DisplayableResult
from ckpt_tools.messages.wording import join_names, join_newest
from ckpt_tools.runs.listing import RunCheckpoint, check_is_one_run, describe_checkpoint
from ckpt_tools.runs.steps import DestinationTemplate, StepSelection
from ckpt_tools.stores.source import Source
from ckpt_tools.stores.urls import StorageOptions, check_not_nested, open_run_source
from ckpt_tools.trainers.run_folders import find_members, is_deepspeed_tag
from ckpt_tools.trainers.saved import SavedCheckpoint, is_checkpoint_name

Versions = Mapping[str, str]
"""The versions of a checkpoint's files, by their paths in it."""


class StepOutcome(StrEnum):
    """Outcome of one checkpoint of a run."""

    WRITTEN = "written"
    PUBLISHED = "published"
    """Its output was there before."""
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True, repr=False)
class ConvertedCheckpoint(DisplayableResult):
    """One checkpoint of the run and its output. ``reason`` says why it was skipped; ``report`` is that of its
    conversion, if it was written."""

    SHOWN: ClassVar[tuple[str, ...]] = ("name", "step", "destination", "outcome", "reason")

    name: str
    url: str
    step: int | None
    destination: str | None
    outcome: StepOutcome
    reason: str | None = None
    report: ConvertReport | None = None


@dataclass(frozen=True, slots=True, repr=False)
class ConvertRunReport(DisplayableResult):
    """The checkpoints of the run at ``source`` that were chosen, in the order in which they were converted."""

    SHOWN: ClassVar[tuple[str, ...]] = ("source", "num_written", "num_published", "num_skipped")
    JSON_PROPERTIES: ClassVar[tuple[str, ...]] = ("num_written", "num_published", "num_skipped")

    source: str
    checkpoints: Sequence[ConvertedCheckpoint]

    @property
    def num_written(self) -> int:
        return self._count_with(StepOutcome.WRITTEN)

    @property
    def num_published(self) -> int:
        """Checkpoints whose output was there before."""
        return self._count_with(StepOutcome.PUBLISHED)

    @property
    def num_skipped(self) -> int:
        return self._count_with(StepOutcome.SKIPPED)

    def _count_with(self, outcome: StepOutcome) -> int:
        return sum(each.outcome is outcome for each in self.checkpoints)


@dataclass(frozen=True, slots=True)
class Following:
    """Following of a run: it is listed every ``poll_seconds``, until a checkpoint of the step ``until`` or a later one
    was converted. Raises UsageError."""

    poll_seconds: float
    until: int | None = None

    def __post_init__(self) -> None:
        if not self.poll_seconds > 0:
            raise UsageError(f"{format_option('poll', self.poll_seconds)} is not a number of seconds above 0")


@dataclass(frozen=True, slots=True)
class CompleteCheckpoint:
    """A complete checkpoint, and the versions that its files had before it was found to be complete."""

    shown: RunCheckpoint
    versions: Versions


class SourceChangedError(StoreError):
    """The trainer wrote a checkpoint again while it was read."""


def convert_whole_run(
    request: ConvertRequest,
    selection: StepSelection,
    following: Following | None,
    on_checkpoint: Callable[[ConvertedCheckpoint], None],
) -> ConvertRunReport:
    """Convert the chosen checkpoints of the run ``request.src`` to what the template ``request.dst`` makes of each.

    Raises:
        UsageError: the run is one checkpoint; the template does not fit. SourceNotFoundError: there is nothing to
            convert, or a step that is named is missing. DestinationExistsError: something else is at a destination.
        CkptError: the first conversion that fails; those before it are published.
    """
    conversion = _RunConversion(request, selection, DestinationTemplate(str(request.dst)), on_checkpoint)
    check_not_nested(request.src, request.dst, request.storage_options)
    if following is None:
        conversion.list_run(is_followed=False)
        conversion.check_found()
        conversion.convert_chosen(is_followed=False)
        conversion.report_unfinished()
    else:
        while True:
            conversion.list_run(is_followed=True)
            conversion.convert_chosen(is_followed=True)
            if conversion.is_over(following.until):
                break
            time.sleep(following.poll_seconds)
    return ConvertRunReport(str(request.src), tuple(conversion.results.values()))


@dataclass(slots=True)
class _RunConversion:
    """State of the run, by the names of its checkpoints: those that are complete, those that are not, and
    what became of those that were converted."""

    request: ConvertRequest
    selection: StepSelection
    template: DestinationTemplate
    on_checkpoint: Callable[[ConvertedCheckpoint], None]
    complete: dict[str, CompleteCheckpoint] = field(default_factory=dict)
    unfinished: dict[str, ConvertedCheckpoint] = field(default_factory=dict)
    last_versions: dict[str, Versions] = field(default_factory=dict)
    results: dict[str, ConvertedCheckpoint] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return str(self.request.src)

    def list_run(self, *, is_followed: bool) -> None:
        """List the run, and judge its checkpoints that are not known to be complete. With ``is_followed``, those whose
        files are the same as at the last look."""
        run = open_run_source(self.url, self.request.storage_options)
        members = _list_numbered_members(run, self.url)
        self.complete = {name: self.complete[name] for name in members if name in self.complete}
        self.unfinished = {}
        versions_by_name: dict[str, Versions] = {}
        for name, member in members.items():
            if name in self.complete:
                continue
            url = f"{self.url.rstrip('/')}/{name}"
            versions = versions_by_name[name] = read_versions(url, self.request.storage_options)
            skipped = ConvertedCheckpoint(name, url, member.step, None, StepOutcome.SKIPPED)
            if versions.keys() != member.files.keys() or (is_followed and versions != self.last_versions.get(name)):
                self.unfinished[name] = replace(skipped, reason="being written or removed")
                continue
            shown = describe_checkpoint(self.url, member)
            if shown.problem is None:
                self.complete[name] = CompleteCheckpoint(shown, versions)
            else:
                self.unfinished[name] = replace(skipped, reason=f"not complete: {shown.problem}")
        self.last_versions = versions_by_name

    def check_found(self) -> None:
        """Raises SourceNotFoundError if nothing is to be converted, or a step that is named is missing."""
        if not self.complete:
            why = next((f"; {each.name} is {each.reason}" for each in reversed(self.unfinished.values())), "")
            raise SourceNotFoundError(f"{self.url} has no complete checkpoint with a step in its name{why}")
        steps = sorted(each.shown.step for each in self.complete.values() if each.shown.step is not None)
        missing_steps = [str(each) for each in self.selection.steps if each not in steps]
        if missing_steps or not self._choose_checkpoints():
            what = f"step {join_names(missing_steps)}" if missing_steps else "such a step"
            has = join_newest([str(each) for each in reversed(steps)])
            raise SourceNotFoundError(f"{self.url} has no complete checkpoint of {what}; it has the steps {has}")

    def _choose_checkpoints(self) -> list[CompleteCheckpoint]:
        return self.selection.choose_items(list(self.complete.values()), lambda each: each.shown.step)

    def convert_chosen(self, *, is_followed: bool) -> None:
        """Convert what is chosen and was not yet. A checkpoint that was written again meanwhile is an error, or is left
        for the next look if the run is followed."""
        chosen = self._choose_checkpoints()
        destinations = self._make_destinations(chosen)
        for each in chosen:
            if each.shown.name in self.results:
                continue
            try:
                self._add_result(self._convert_checkpoint(each, destinations[each.shown.name]))
            except SourceChangedError as error:
                if not is_followed:
                    raise
                log_warning("runs", f"{error}; it is converted once it stays the same")
                del self.complete[each.shown.name]

    def _make_destinations(self, chosen: Sequence[CompleteCheckpoint]) -> dict[str, str]:
        """The destinations by name. Raises UsageError if two checkpoints have the same, or one has no step though the
        selection or the template asks for it."""
        for each in self.complete.values():
            if each.shown.step is None and self.selection.needs_steps:
                raise UsageError(f"{each.shown.name} says no step, so it cannot be chosen by it")
        destinations: dict[str, str] = {}
        name_by_destination: dict[str, str] = {}
        for each in chosen:
            name = each.shown.name
            destination = destinations[name] = self.template.make_destination(each.shown.step, name)
            other_name = name_by_destination.setdefault(destination, name)
            if other_name != name:
                raise UsageError(
                    f"{other_name} and {name} would both become {destination}; convert each by itself, or write "
                    f"{{name}} in {self.template.text} if their names differ"
                )
        return destinations

    def _convert_checkpoint(self, checkpoint: CompleteCheckpoint, destination: str) -> ConvertedCheckpoint:
        """Raises SourceChangedError if the checkpoint was written again since it was found complete; CkptError."""
        shown = checkpoint.shown
        request = replace(self.request, src=shown.url, dst=destination)
        result = ConvertedCheckpoint(shown.name, shown.url, shown.step, destination, StepOutcome.PUBLISHED)

        def check_source() -> None:
            versions = read_versions(shown.url, self.request.storage_options)
            if not checkpoint.versions.keys() <= versions.keys():
                raise _SourceGoneError(f"{shown.name} was removed while it was read")
            if checkpoint.versions != versions:
                raise SourceChangedError(f"{shown.name} was written again while it was read")

        try:
            check_source()
            if is_published(request):
                return result
            report = run_conversion(request, check_source=check_source)
            return replace(result, outcome=StepOutcome.WRITTEN, report=report)
        except _SourceGoneError:
            pass
        except CkptError:
            # An error of a checkpoint that is being removed says nothing about the conversion.
            try:
                check_source()
            except _SourceGoneError:
                pass
            else:
                raise
        reason = "the trainer removed it while it was read"
        return replace(result, outcome=StepOutcome.SKIPPED, destination=None, reason=reason)

    def _add_result(self, result: ConvertedCheckpoint) -> None:
        self.results[result.name] = result
        self.on_checkpoint(result)

    def report_unfinished(self) -> None:
        """Name the checkpoints that may have been meant, and are not complete."""
        for each in self.unfinished.values():
            if each.step is None or self.selection.includes(each.step):
                self._add_result(each)

    def is_over(self, until: int | None) -> bool:
        """Whether a run that is followed has come to ``until``, or all steps that are named were converted."""
        steps = {each.step for each in self.results.values()}
        if self.selection.steps and steps.issuperset(self.selection.steps):
            return True
        return until is not None and any((each.shown.step or 0) >= until for each in self.complete.values())


class _SourceGoneError(IncompleteError):
    """The trainer removed a checkpoint, or a part of it, since it was found to be complete."""


def read_versions(url: str, storage_options: StorageOptions) -> Versions:
    """The versions of the files of the checkpoint at ``url``, without those that go meanwhile; empty if it is gone.
    Raises StoreError."""
    try:
        source = open_run_source(url, storage_options)
    except SourceNotFoundError:
        return {}
    versions: dict[str, str] = {}
    for path in source.files:
        with suppress(IncompleteError):
            versions[path] = source.store.version(path)
    return versions


def _list_numbered_members(run: Source, url: str) -> dict[str, SavedCheckpoint]:
    """The checkpoints of the run whose names say a step or an epoch, the oldest first. Others, such as Lightning's
    ``last.ckpt``, are written again under the same name. Raises UsageError for one checkpoint, and for several runs."""
    members = {each.name: each for each in reversed(find_members(run)) if each.is_numbered}
    has_steps = not all(map(is_deepspeed_tag, members))
    if run.is_one_file or (is_checkpoint_name(url.rstrip("/").rpartition("/")[2]) and not has_steps):
        raise UsageError(f"{url} is one checkpoint, and not a run; convert converts it")
    check_is_one_run(url, members)
    return members

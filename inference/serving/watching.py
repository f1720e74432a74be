"""Polls sources for newer or replaced checkpoints (``--watch``) and loads them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import ckpt_tools
from ckpt_tools.errors import (
    CkptError,
    DifferenceError,
    FormatError,
    IncompleteError,
    SourceNotFoundError,
    UnsafeError,
    UsageError,
)

from ..common.errors import describe_any_error
from ..models.checkpoint_files import CheckpointFiles
from ..models.predictor import Predictor
from .repository import UNLOADED, ModelRepository, ModelsEndedError, ModelSlot, ModelVersion

MAX_RETRY_SECONDS = 300.0

LASTING_ERRORS = (FormatError, UsageError, UnsafeError, DifferenceError)
"""Errors of loading that last as long as the files are the same; but what is missing may come."""


@dataclass(slots=True)
class PendingCheckpoint:
    """Files that are not the loaded ones: since when they are so, and what became of loading them."""

    files: CheckpointFiles
    seen_at: float
    num_failures: int = 0
    next_try: float = 0.0  # infinite after a failure of the files

    def is_due(self, quiet_time: float) -> bool:
        return time.monotonic() >= max(self.seen_at + quiet_time, self.next_try)


@dataclass(slots=True)
class CheckpointWatcher:
    """Checks every source each ``interval`` seconds in a thread. Use as a context manager. Create it before models are
    loaded, which then wait for the quiet time too.

    A checkpoint whose files are not those that the model was loaded from is loaded once nothing has changed for
    ``quiet_time`` seconds. If its files are wrong, it is tried again when they change; after any other failure also
    without a change, after 2, 4, 8, ... times ``interval``, at most ``MAX_RETRY_SECONDS``.
    """

    repository: ModelRepository
    interval: float
    quiet_time: float
    print_notice: Callable[[str], None]
    _pending: dict[ModelSlot, PendingCheckpoint] = field(default_factory=dict, init=False)
    _last_notices: dict[ModelSlot, str] = field(default_factory=dict, init=False)
    _end_event: threading.Event = field(default_factory=threading.Event, init=False)

    def __post_init__(self) -> None:
        self.repository.load_if_quiet = self.load_if_quiet

    def __enter__(self) -> CheckpointWatcher:
        self._end_event.clear()
        threading.Thread(target=self._run_checks, name="watcher", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end_event.set()

    def load_if_quiet(self, slot: ModelSlot) -> bool:
        """Load a model that does not answer, if its files are those of the last version, or have not changed for the
        quiet time; whether it was loaded. Raises ``CkptError`` if it cannot be loaded."""
        pending, quiet_time = self._find_pending(slot), self.quiet_time
        if pending is None or pending.is_due(quiet_time) or _count_quiet_seconds(pending.files) >= quiet_time:
            with slot.change_lock:
                return slot.reason != UNLOADED and self._serve_unchanged(
                    slot, self.repository.read_model(slot), pending
                )
        url = slot.source.url
        self._print_once(slot, f"{slot.source.name}: waits until {url} has not changed for {quiet_time:g} seconds")
        return False

    def _run_checks(self) -> None:
        short_interval = min(self.interval, self.quiet_time or self.interval)
        while not self._end_event.wait(short_interval if self._pending else self.interval):
            for slot in self.repository.slots:
                with suppress(Exception):  # of ``print_notice``, when standard error is closed
                    self.check_slot(slot)

    def check_slot(self, slot: ModelSlot) -> None:
        """Check once, and load a new checkpoint. A model that was unloaded stays so. Raises as ``print_notice``."""
        if not self.repository.is_answering(slot):
            return
        version = slot.version
        try:
            pending = self._find_pending(slot)
        except Exception as error:
            self.repository.note_failure(slot, "look at the checkpoint", error)
            self._print_once(
                slot, f"{slot.source.name}: {slot.source.url} cannot be looked at: {describe_any_error(error)}"
            )
            return
        if pending is None:
            self.repository.forget_failure(slot)
            self._forget_pending(slot)
        elif pending.is_due(self.quiet_time):
            self._load_pending(slot, version, pending)

    def _find_pending(self, slot: ModelSlot) -> PendingCheckpoint | None:
        """The files at the source and how long they are so; None if they are those of the last version."""
        if slot.files is not None and slot.files.refresh() == slot.files:
            return None
        config = slot.source.options.reading.config
        files, pending = CheckpointFiles.from_url(slot.source.url, config=config), self._pending.get(slot)
        if pending is None or files != pending.files:
            pending = self._pending[slot] = PendingCheckpoint(files, time.monotonic())
        return pending

    def _load_pending(self, slot: ModelSlot, version: ModelVersion | None, pending: PendingCheckpoint) -> None:
        name, url = slot.source.name, pending.files.weights.url
        try:
            with slot.change_lock:
                if slot.version is version and self._serve_unchanged(slot, self._read_complete(slot, url), pending):
                    self._forget_pending(slot)
                    self.print_notice(f"{name}: serves {url}")
        except ModelsEndedError:
            return  # All models are loaded again.
        except Exception as error:
            pending.num_failures += 1
            delay = min(self.interval * 2 ** min(pending.num_failures, 20), max(self.interval, MAX_RETRY_SECONDS))
            is_lasting = isinstance(error, LASTING_ERRORS) and not isinstance(error, IncompleteError)
            pending.next_try = float("inf") if is_lasting else time.monotonic() + delay
            what = "the new checkpoint cannot be loaded, the old one keeps answering"
            self._print_once(slot, f"{name}: {what}: {describe_any_error(error)}")

    def _read_complete(self, slot: ModelSlot, url: str) -> Predictor:
        try:
            _check_complete(url)
        except CkptError as error:
            self.repository.note_failure(slot, "load", error)
            raise
        return self.repository.read_model(slot)

    def _serve_unchanged(self, slot: ModelSlot, predictor: Predictor, pending: PendingCheckpoint | None) -> bool:
        """Serve a model, unless its files changed between the last look and its loading."""
        was_quiet = predictor.files == (pending.files if pending else slot.files)
        if was_quiet:
            self.repository.serve_predictor(slot, predictor)
        return was_quiet

    def _forget_pending(self, slot: ModelSlot) -> None:
        self._pending.pop(slot, None)
        self._last_notices.pop(slot, None)

    def _print_once(self, slot: ModelSlot, sentence: str) -> None:
        """Print it, unless it was the last that was printed of this model."""
        if self._last_notices.get(slot) != sentence:
            self.print_notice(sentence)
        self._last_notices[slot] = sentence


def _count_quiet_seconds(files: CheckpointFiles) -> float:
    """Seconds since the last change, by the clock of the file system; 0 if that is not known."""
    return 0.0 if files.weights.changed is None else time.time() - files.weights.changed


def _check_complete(url: str) -> None:
    """Raises IncompleteError if the trainer's or the format's marker says so; CkptError if the store fails."""
    try:
        checkpoints = ckpt_tools.ls(url).checkpoints
    except SourceNotFoundError:
        return  # Not every file that can be read has a name of a checkpoint.
    problem = next((each.problem for each in checkpoints if each.url.rstrip("/") == url.rstrip("/")), None)
    if problem is not None:
        raise IncompleteError(f"{url} is not complete: {problem}")

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

from ..common.errors import as_sentence
from ..models.predictor import Predictor
from ..models.steady import CheckpointFiles
from .repository import UNLOADED, ModelsEndedError, Repository, Slot, Version

MAX_RETRY_SECONDS = 300.0

OF_THE_FILES = (FormatError, UsageError, UnsafeError, DifferenceError)
"""Errors of loading that last as long as the files are the same; but what is missing may come."""

Tell = Callable[[str], None]


@dataclass(slots=True)
class Waiting:
    """Files that are not the loaded ones: since when they are so, and what became of loading them."""

    files: CheckpointFiles
    since: float
    num_failures: int = 0
    next_try: float = 0.0  # infinite after a failure of the files

    def is_due(self, quiet: float) -> bool:
        return time.monotonic() >= max(self.since + quiet, self.next_try)


@dataclass(slots=True)
class Watcher:
    """Checks every source each ``seconds`` in a thread. Use as a context manager. Create it before models are loaded,
    which then wait for the quiet time too.

    A checkpoint whose files are not those that the model was loaded from is loaded once nothing has changed for
    ``quiet`` seconds. If its files are wrong, it is tried again when they change; after any other failure also without
    a change, after 2, 4, 8, ... times ``seconds``, at most ``MAX_RETRY_SECONDS``.
    """

    repository: Repository
    seconds: float
    quiet: float
    tell: Tell
    _waiting: dict[Slot, Waiting] = field(default_factory=dict, init=False)
    _told: dict[Slot, str] = field(default_factory=dict, init=False)
    _ending: threading.Event = field(default_factory=threading.Event, init=False)

    def __post_init__(self) -> None:
        self.repository.load_quiet = self.load_quiet

    def __enter__(self) -> Watcher:
        self._ending.clear()
        threading.Thread(target=self._run, name="watcher", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()

    def load_quiet(self, slot: Slot) -> bool:
        """Load a model that does not answer, if its files are those of the last version, or have not changed for the
        quiet time; whether it was loaded. Raises ``CkptError`` if it cannot be loaded."""
        waiting = self._look(slot)
        if waiting is None or waiting.is_due(self.quiet) or _seconds_unchanged(waiting.files) >= self.quiet:
            with slot.is_changing:
                return slot.reason != UNLOADED and self._serve(slot, self.repository.read(slot), waiting)
        url = slot.source.url
        self._tell(slot, f"{slot.source.name}: waits until {url} has not changed for {self.quiet:g} seconds")
        return False

    def _run(self) -> None:
        while not self._ending.wait(min(self.seconds, self.quiet or self.seconds) if self._waiting else self.seconds):
            for slot in self.repository.slots:
                with suppress(Exception):  # of ``tell``, when standard error is closed
                    self.visit(slot)

    def visit(self, slot: Slot) -> None:
        """Check once, and load a new checkpoint. A model that was unloaded stays so. Raises what ``tell`` raises."""
        if not self.repository.is_answering(slot):
            return
        version = slot.version
        try:
            waiting = self._look(slot)
        except Exception as error:
            self.repository.note_failure(slot, "look at the checkpoint", error)
            self._tell(slot, f"{slot.source.name}: {slot.source.url} cannot be looked at: {as_sentence(error)}")
            return
        if waiting is None:
            self.repository.forget_failure(slot)
            self._settle(slot)
        elif waiting.is_due(self.quiet):
            self._load(slot, version, waiting)

    def _look(self, slot: Slot) -> Waiting | None:
        """The files at the source and how long they are so; None if they are those of the last version."""
        if slot.files is not None and slot.files.again() == slot.files:
            return None
        config = slot.source.options.reading.config
        files, waiting = CheckpointFiles.of_checkpoint(slot.source.url, config=config), self._waiting.get(slot)
        if waiting is None or files != waiting.files:
            waiting = self._waiting[slot] = Waiting(files, time.monotonic())
        return waiting

    def _load(self, slot: Slot, version: Version | None, waiting: Waiting) -> None:
        name, url = slot.source.name, waiting.files.weights.url
        try:
            with slot.is_changing:
                if slot.version is version and self._serve(slot, self._read(slot, url), waiting):
                    self._settle(slot)
                    self.tell(f"{name}: serves {url}")
        except ModelsEndedError:
            return  # All models are loaded again.
        except Exception as error:
            waiting.num_failures += 1
            again = min(self.seconds * 2 ** min(waiting.num_failures, 20), max(self.seconds, MAX_RETRY_SECONDS))
            lasts = isinstance(error, OF_THE_FILES) and not isinstance(error, IncompleteError)
            waiting.next_try = float("inf") if lasts else time.monotonic() + again
            what = "the new checkpoint cannot be loaded, the old one keeps answering"
            self._tell(slot, f"{name}: {what}: {as_sentence(error)}")

    def _read(self, slot: Slot, url: str) -> Predictor:
        try:
            _check_complete(url)
        except CkptError as error:
            self.repository.note_failure(slot, "load", error)
            raise
        return self.repository.read(slot)

    def _serve(self, slot: Slot, predictor: Predictor, waiting: Waiting | None) -> bool:
        """Serve a model, unless its files changed between the last look and its loading."""
        was_quiet = predictor.files == (waiting.files if waiting else slot.files)
        if was_quiet:
            self.repository.put(slot, predictor)
        return was_quiet

    def _settle(self, slot: Slot) -> None:
        self._waiting.pop(slot, None)
        self._told.pop(slot, None)

    def _tell(self, slot: Slot, sentence: str) -> None:
        """Tell it, unless it was the last that was told of this model."""
        if self._told.get(slot) != sentence:
            self.tell(sentence)
        self._told[slot] = sentence


def _seconds_unchanged(files: CheckpointFiles) -> float:
    """Seconds since the last change, by the clock of the file system; 0 if that is not known."""
    return 0.0 if files.weights.changed is None else time.time() - files.weights.changed


def _check_complete(url: str) -> None:
    """Raises IncompleteError if the trainer's or the format's marker says so; CkptError if the store fails."""
    try:
        found = ckpt_tools.ls(url).checkpoints
    except SourceNotFoundError:
        return  # Not every file that can be read has a name of a checkpoint.
    problem = next((each.problem for each in found if each.url.rstrip("/") == url.rstrip("/")), None)
    if problem is not None:
        raise IncompleteError(f"{url} is not complete: {problem}")

"""The models of a service: names, versions, and a batcher for each; they can change while it serves.

A request keeps the version it began with. A new version is loaded beside the old one, then replaces it in one step; the
old one is closed after its last request. So no request fails, and no answer mixes two models.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from ckpt_tools.errors import CkptError, UsageError

from ..common.errors import to_ckpt_error
from ..models.checkpoint_files import CheckpointFiles
from ..models.predictor import Prediction, Predictor
from ..models.results import ModelInput
from .batching import Batcher
from .metrics import ServiceMetrics, VersionMetrics
from .sources import NamedSource as NamedSource

MAX_WAITING = 256
"""Rows that may wait for one model, about nine forward passes. With a full queue, clients get 503 at once."""

READY, LOADING, UNAVAILABLE = "READY", "LOADING", "UNAVAILABLE"
WAITING_SECONDS = 0.5  # between looks at files of a model that may not be loaded yet
MAX_RETRY_DELAY = 30.0  # seconds between attempts to load a model again
UNLOADED = "unloaded"  # reason of a model that was unloaded on request


LoadModel = Callable[[NamedSource], Predictor]  # loads the model at a source


class UnknownModelError(Exception):
    """The model or version does not exist."""


class NotReadyError(Exception):
    """The model exists and is not loaded; ``is_unloaded`` if that was requested."""

    def __init__(self, name: str, *, is_unloaded: bool) -> None:
        super().__init__(f"the model {name} is {'not loaded' if is_unloaded else 'being loaded'}")
        self.is_unloaded = is_unloaded


class ModelsEndedError(CkptError):
    """The process of the models ended. The message says how; it is started again."""


@dataclass(eq=False, slots=True)
class ModelVersion:
    """A loaded model. ``is_retired`` once replaced; it is closed after its last user."""

    name: str
    number: int
    predictor: Predictor
    batcher: Batcher[ModelInput, Prediction]
    metrics: VersionMetrics
    loaded_at: float = field(default_factory=time.time)
    num_users: int = 0
    is_retired: bool = False


@dataclass(eq=False, slots=True)
class ModelSlot:
    """A source and the version that answers for it, if any; ``reason`` why there is none, or none newer. ``files`` is
    the state of the files that the last version was loaded from."""

    source: NamedSource
    version: ModelVersion | None = None
    files: CheckpointFiles | None = None
    state: str = UNAVAILABLE
    reason: str = ""
    change_lock: threading.Lock = field(default_factory=threading.Lock)


class ModelRepository:
    """All models of the service. Methods are thread-safe; :meth:`load` blocks while it reads."""

    def __init__(
        self, sources: Sequence[NamedSource], load: LoadModel, *, max_waiting: int = MAX_WAITING, max_delay: float = 0.0
    ) -> None:
        if not sources:
            raise UsageError("there is no model to serve; name one")
        self.slots = tuple(ModelSlot(source) for source in sources)
        self._load = load
        self.load_if_quiet: Callable[[ModelSlot], bool] = self._load_now  # loads if nothing has changed for some time
        self.metrics = ServiceMetrics()
        self._max_waiting, self._max_delay = max_waiting, max_delay
        self._last_numbers: dict[str, int] = {}
        self._batchers: list[Batcher[ModelInput, Prediction]] = []
        self._lock = threading.Lock()
        self._close_event = threading.Event()

    @property
    def is_closed(self) -> bool:
        return self._close_event.is_set()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(slot.source.name for slot in self.slots))

    def load_all(self) -> None:
        """Load all models, each once it may be. Raises ``CkptError`` for the first that cannot be loaded."""
        for slot in self.slots:
            while not self.load_if_quiet(slot):
                time.sleep(WAITING_SECONDS)

    def load(self, name: str) -> None:
        """(Re)load all versions of a model. ``UnknownModelError`` or ``CkptError``; old versions keep answering."""
        for slot in self._find_slots(name):
            self._load_now(slot)

    def _load_now(self, slot: ModelSlot) -> bool:
        """Load what is at the source now, then replace the version that answers. Raises as :meth:`load`."""
        with slot.change_lock:
            self.serve_predictor(slot, self.read_model(slot))
        return True

    def read_model(self, slot: ModelSlot) -> Predictor:
        """Load what is at the source now, without serving it. Raises ``CkptError``, whatever the loader raises; the old
        version keeps answering."""
        slot.state = READY if slot.version else LOADING
        try:
            return self._load(slot.source)
        except Exception as error:
            self.note_failure(slot, "load", error)
            if isinstance(error, CkptError):
                raise
            raise to_ckpt_error(error, slot.source.url) from error

    def is_answering(self, slot: ModelSlot) -> bool:
        return slot.version is not None

    def note_failure(self, slot: ModelSlot, what: str, error: Exception) -> None:
        """Set state and reason of a model after the last ``what`` failed."""
        slot.state = READY if self.is_answering(slot) else UNAVAILABLE
        slot.reason = f"the last {what} failed ({type(error).__name__}); the log of the service says why"

    def forget_failure(self, slot: ModelSlot) -> None:
        """The model that answers is the one at the source."""
        with self._lock:
            if self.is_answering(slot):
                slot.reason = ""

    def serve_predictor(self, slot: ModelSlot, predictor: Predictor) -> None:
        """Serve ``predictor`` as the next version of the model."""
        name = slot.source.name
        with self._lock:
            number = self._last_numbers[name] = self._last_numbers.get(name, 0) + 1
        metrics = VersionMetrics(self.metrics, name, number, predictor.identity)
        num_threads = 2 if predictor.is_elsewhere else 1
        batcher = Batcher(
            *(predictor.predict, predictor.max_batch, self._max_waiting),
            *(metrics.count_execution, num_threads, self._max_delay),
        )
        metrics.pending_rows.set_function(lambda: batcher.num_waiting)
        self._replace_version(slot, ModelVersion(name, number, predictor, batcher.__enter__(), metrics))
        slot.files = predictor.files

    def drop_models(self, reason: str) -> None:
        """Drop all models, because the process that held them ended. :meth:`reload_dropped_models` loads them again."""
        for slot in self.slots:
            if slot.version is not None:
                self._replace_version(slot, None)
                slot.state, slot.reason = LOADING, reason

    def reload_dropped_models(self, print_notice: Callable[[str], None]) -> None:
        """Load all models that were dropped, again and again until each is loaded. ``print_notice`` is called with a
        sentence for each that cannot be loaded. Returns early if the process ends again."""
        # One that the ended process had just loaded came in after the others were dropped.
        self.drop_models("the process of the models is started again")
        delay, printed = 1.0, set[str]()
        while dropped := [slot for slot in self.slots if slot.version is None and slot.reason != UNLOADED]:
            for slot in dropped:
                try:
                    self.load_if_quiet(slot)
                except ModelsEndedError:
                    return
                except CkptError as error:
                    if (sentence := f"{slot.source.name} cannot be loaded again: {error}") not in printed:
                        printed.add(sentence)
                        print_notice(sentence)
            if any(slot.version is None for slot in dropped) and self._close_event.wait(delay):
                return
            delay = min(2 * delay, MAX_RETRY_DELAY)

    def unload(self, name: str) -> None:
        """Stop serving a model; requests that have begun are answered. Raises ``UnknownModelError``."""
        for slot in self._find_slots(name):
            with slot.change_lock:
                self._replace_version(slot, None)
                slot.reason = UNLOADED

    def close(self) -> None:
        """Unload everything and wait for running batches: a thread still in torch at exit would abort the process."""
        self._close_event.set()
        for slot in self.slots:
            self._replace_version(slot, None)
        for batcher in self._batchers:
            batcher.close()
            batcher.join_threads()

    def get_version(self, name: str, number: str | None = None) -> ModelVersion:
        """The version of that number, or the newest. Raises ``UnknownModelError`` or ``NotReadyError``."""
        with self._lock:
            return self._find_version(name, number)

    @contextmanager
    def hold_version(self, name: str, number: str | None = None) -> Iterator[ModelVersion]:
        """The version of :meth:`get_version`, kept loaded within the block."""
        with self._lock:
            version = self._find_version(name, number)
            version.num_users += 1
        try:
            yield version
        finally:
            with self._lock:
                version.num_users -= 1
                self._close_unused(version)

    def list_versions(self) -> list[ModelVersion]:
        with self._lock:
            return [slot.version for slot in self.slots if slot.version is not None]

    def list_model_versions(self, name: str) -> list[ModelVersion]:
        """Versions of a model, the oldest first. Raises ``UnknownModelError``."""
        self._find_slots(name)
        return sorted((each for each in self.list_versions() if each.name == name), key=lambda each: each.number)

    @property
    def is_ready(self) -> bool:
        """Whether every model answers, except those unloaded on request."""
        return all(slot.version or slot.reason == UNLOADED for slot in self.slots)

    def list_index(self) -> list[dict[str, str]]:
        """Name, version, state and reason of each model, as the protocol has them."""
        with self._lock:
            return [
                {
                    "name": slot.source.name,
                    "version": str(slot.version.number) if slot.version else "",
                    "state": slot.state,
                    "reason": slot.reason,
                }
                for slot in self.slots
            ]

    def _find_slots(self, name: str) -> list[ModelSlot]:
        slots = [slot for slot in self.slots if slot.source.name == name]
        if not slots:
            raise UnknownModelError(f"there is no model {name[:100]!r}; the models are {', '.join(self.names)}")
        return slots

    def _find_version(self, name: str, number: str | None) -> ModelVersion:
        loaded = [slot.version for slot in self._find_slots(name) if slot.version is not None]
        if not loaded:
            raise NotReadyError(name, is_unloaded=all(slot.reason == UNLOADED for slot in self._find_slots(name)))
        if number is None:
            return max(loaded, key=lambda each: each.number)
        for version in loaded:
            if str(version.number) == number:
                return version
        numbers = ", ".join(str(version.number) for version in loaded)
        raise UnknownModelError(f"the model {name} has no version {number[:100]!r}; it has {numbers}")

    def _replace_version(self, slot: ModelSlot, version: ModelVersion | None) -> None:
        with self._lock:
            old_version, slot.version = slot.version, version
            new_batchers = [] if version is None else [version.batcher]
            self._batchers = [batcher for batcher in self._batchers if batcher.is_running] + new_batchers
            slot.state, slot.reason = (READY if version else UNAVAILABLE), ""
            if old_version is not None:
                old_version.is_retired = True
                self.metrics.remove_version(old_version.name, old_version.number)
                self._close_unused(old_version)

    def _close_unused(self, version: ModelVersion) -> None:
        if version.is_retired and not version.num_users:
            version.batcher.close()

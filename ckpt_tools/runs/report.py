"""The checkpoints of a run as values: what ``ls`` shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ckpt_tools.messages.showing import DisplayableResult, dataclass_to_json


@dataclass(frozen=True, slots=True, repr=False)
class RunCheckpoint(DisplayableResult):
    """One checkpoint of a run.

    ``name`` is its path in the run, ``.`` if the run is itself one checkpoint. ``time`` is when its newest file was
    written (UTC). ``problem`` says why it is not complete, by the marker of the trainer that wrote it; None if it is.
    """

    SHOWN: ClassVar[tuple[str, ...]] = (
        "name",
        "step",
        "time",
        "file_bytes",
        "format",
        "world_size",
        "is_complete",
        "problem",
    )
    JSON_PROPERTIES: ClassVar[tuple[str, ...]] = ("is_complete",)

    name: str
    url: str
    step: int | None
    time: str | None
    num_files: int
    file_bytes: int
    format: str
    world_size: int | None
    problem: str | None

    @property
    def is_complete(self) -> bool:
        return self.problem is None


@dataclass(frozen=True, slots=True, repr=False)
class RunListing(DisplayableResult):
    """The checkpoints of the run at ``source``, the newest first."""

    SHOWN: ClassVar[tuple[str, ...]] = ("source", "checkpoints", "num_complete", "latest")

    source: str
    checkpoints: Sequence[RunCheckpoint]

    @property
    def num_complete(self) -> int:
        return sum(each.is_complete for each in self.checkpoints)

    @property
    def latest(self) -> RunCheckpoint | None:
        """The newest that is complete: the one that ``RUN@latest`` means."""
        return next((each for each in self.checkpoints if each.is_complete), None)

    def to_json(self) -> dict[str, Any]:
        json_object = dataclass_to_json(self)
        return {**json_object, "latest": None if self.latest is None else self.latest.name}

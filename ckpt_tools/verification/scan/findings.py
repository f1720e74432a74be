"""Findings of a scan, and their collector."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import StrEnum

from ckpt_tools.core.showing import Shown
from ckpt_tools.core.wording import printable
from ckpt_tools.errors import UnsupportedError
from ckpt_tools.serialization.pickle.proof import Proof

MAX_FINDINGS = 1000
"""Findings kept; more are counted."""


class Danger(StrEnum):
    """The kind of a finding."""

    RUNS = "runs"
    """Code that a loader would run or import."""
    COULD_RUN = "could run"
    """A program, or a name that is used as no genuine checkpoint uses it."""
    OUTSIDE = "outside"
    """A name of a file that leads out of the checkpoint."""
    NOT_UNDERSTOOD = "not understood"
    """Data that is not as its format says, or as no writer writes it."""
    NOT_LOOKED_INTO = "not looked into"
    """Data of a kind that is not read: compressed, encrypted, or unknown."""


class NotLookedIntoError(UnsupportedError):
    """Data of a kind that is not read at all, or beyond what a scan spends on it."""


@dataclass(frozen=True, slots=True, repr=False)
class Finding(Shown):
    """``what`` is the reason; ``place`` says which pickle of the file, and where in it."""

    file: str
    place: str
    danger: Danger
    what: str

    def __str__(self) -> str:
        return ": ".join(part for part in (self.file, self.place, self.what) if part)


class FindingCollector:
    """Collects findings and what was proved. ``allowed`` are the names that the user vouches for.

    ``met`` are those of them that were met, and ``names`` those that could be vouched for.
    """

    def __init__(self, allowed: Collection[str] = ()) -> None:
        self.allowed = frozenset(allowed)
        self.findings: list[Finding] = []
        self.num_findings = 0
        self.num_pickles = 0
        self.num_files = 0
        self.num_bytes = 0
        self.met: set[str] = set()
        self.names: dict[str, None] = {}

    def add(self, file: str, place: str, danger: Danger, what: str, *, count: int = 1) -> None:
        self.num_findings += count
        if len(self.findings) < MAX_FINDINGS:
            self.findings.append(Finding(printable(file), printable(place), danger, printable(what)))

    def note(self, proof: Proof) -> None:
        """Count a pickle that was read, proven or not; its refusals are findings of their own."""
        self.num_pickles += not proof.refusals
        self.met.update(proof.uses_allowed)
        self.suggest(refusal.name for refusal in proof.refusals)

    def suggest(self, names: Iterable[str | None]) -> None:
        for name in names:
            if name and len(self.names) < MAX_FINDINGS:
                self.names[printable(name)] = None

    def proved(self, num_bytes: int) -> None:
        """Count a file of which every byte was accounted for."""
        self.num_files += 1
        self.num_bytes += num_bytes

"""The results of a scan."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from ckpt_tools.core.json_fields import json_of
from ckpt_tools.core.showing import Shown
from ckpt_tools.core.wording import printable

MAX_FINDINGS = 1000
"""Findings kept; more are counted."""


class Danger(StrEnum):
    """The kind of a finding."""

    RUNS = "runs"
    """Code that a loader would run or import."""
    OUTSIDE = "outside"
    """A name of a file that leads out of the checkpoint."""
    UNREADABLE = "unreadable"
    """Data that cannot be checked: damaged, of an unknown kind, or made to resist it."""


@dataclass(frozen=True, slots=True, repr=False)
class Finding(Shown):
    """``what`` is the call, or the reason; ``place`` says which pickle of the file, and where in it."""

    file: str
    place: str
    danger: Danger
    what: str

    def shown(self) -> dict[str, object]:
        return {
            "file": self.file,
            "place": self.place,
            "danger": self.danger.value,
            "what": self.what,
        }

    def __str__(self) -> str:
        return ": ".join(part for part in (self.file, self.place, self.what) if part)


@dataclass(frozen=True, slots=True, repr=False)
class ScanReport(Shown):
    """The findings, ``num_findings`` in all, in ``num_pickles`` pickles of ``num_files`` files."""

    source: str
    num_files: int
    num_pickles: int
    num_findings: int
    findings: tuple[Finding, ...] = field(repr=False)
    unsafe: bool

    @property
    def clean(self) -> bool:
        return not self.num_findings

    def shown(self) -> dict[str, object]:
        return {
            "source": self.source,
            "clean": self.clean,
            "unsafe": self.unsafe,
            "num_findings": self.num_findings,
            "num_pickles": self.num_pickles,
            "num_files": self.num_files,
        }

    def to_json(self) -> dict[str, Any]:
        return json_of(self, "clean")


class FindingCollector:
    """Collects findings."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []
        self.num_findings = 0
        self.num_pickles = 0
        self.unsafe = False

    def add(self, file: str, place: str, danger: Danger, what: str, *, count: int = 1) -> None:
        self.num_findings += count
        self.unsafe |= danger is not Danger.UNREADABLE
        if len(self.findings) < MAX_FINDINGS:
            self.findings.append(Finding(printable(file), printable(place), danger, printable(what)))

    def report(self, source: str, num_files: int) -> ScanReport:
        return ScanReport(
            source, num_files, self.num_pickles, self.num_findings, tuple(self.findings), unsafe=self.unsafe
        )

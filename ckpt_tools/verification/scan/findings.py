"""Findings of a scan, their collector, and the report: as text, JSON or SARIF."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar

from ckpt_tools.errors import UnsafeError, UnsupportedError
from ckpt_tools.messages.showing import DisplayableResult
from ckpt_tools.messages.wording import escape_unprintable
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
    CONFIGURATION = "configuration"
    """A text with names that the program that reads it may import or call."""
    NOT_UNDERSTOOD = "not understood"
    """Data that is not as its format says, or as no writer writes it."""
    NOT_LOOKED_INTO = "not looked into"
    """Data of a kind that is not read: compressed, encrypted, or unknown."""

    @property
    def rule_id(self) -> str:
        """The id of its rule in SARIF."""
        return self.value.replace(" ", "-")


class NotLookedIntoError(UnsupportedError):
    """Data of a kind that is not read at all, or beyond what a scan spends on it."""


class CouldRunError(UnsafeError):
    """A text that makes code."""


Region = tuple[int, int]
"""The offset of bytes in a file, and how many there are."""


@dataclass(frozen=True, slots=True, repr=False)
class Finding(DisplayableResult):
    """``what`` is the reason; ``place`` says which pickle of the file, and where in it.

    ``byte_offset`` and ``byte_length`` are the bytes of the file that are meant, where they are known: an opcode of a
    pickle, a record of an archive, an item of a DCP. They are None for the file as a whole, and in compressed data.
    """

    file: str
    place: str
    danger: Danger
    what: str
    byte_offset: int | None = None
    byte_length: int | None = None

    def __str__(self) -> str:
        return ": ".join(part for part in (self.file, self.place, self.what) if part)


class FindingCollector:
    """Collects findings and what was proved. ``allowed`` are the names that the user vouches for; with
    ``allow_configuration``, configuration is counted and is not a finding.

    ``used_names`` are the allowed names that were met, ``allowable_names`` further ones that could be allowed.
    """

    def __init__(self, allowed: Collection[str] = (), *, allow_configuration: bool = False) -> None:
        self.allowed = frozenset(allowed)
        self._allow_configuration = allow_configuration
        self.findings: list[Finding] = []
        self.num_findings = 0
        self.configurations: set[str] = set()
        self.num_pickles = 0
        self.num_files = 0
        self.num_bytes = 0
        self.used_names: set[str] = set()
        self.allowable_names: dict[str, None] = {}

    def add_finding(
        self, file: str, place: str, danger: Danger, what: str, *, region: Region | None = None, count: int = 1
    ) -> None:
        self.num_findings += count
        if len(self.findings) < MAX_FINDINGS:
            byte_region = region or (None, None)
            self.findings.append(
                Finding(
                    escape_unprintable(file), escape_unprintable(place), danger, escape_unprintable(what), *byte_region
                )
            )

    def add_configuration(self, file: str, place: str, what: str | None) -> None:
        """Add the reason why a file is configuration, if there is one."""
        if what is not None:
            self.configurations.add(file)
            if not self._allow_configuration:
                self.add_finding(file, place, Danger.CONFIGURATION, what)

    def record_proof(self, proof: Proof) -> None:
        """Count a pickle that was read, proven or not; its refusals are findings of their own."""
        self.num_pickles += not proof.refusals
        self.used_names.update(proof.uses_allowed)
        for refusal in proof.refusals:
            if refusal.name and len(self.allowable_names) < MAX_FINDINGS:
                self.allowable_names[escape_unprintable(refusal.name)] = None

    def count_proved_file(self, num_bytes: int) -> None:
        """Count a file of which every byte was accounted for."""
        self.num_files += 1
        self.num_bytes += num_bytes

    @property
    def num_unproved(self) -> int:
        """Findings, and files of configuration."""
        return self.num_findings + len(self.configurations)

    def build_report(self, source: str, excluded: Collection[str]) -> ScanReport:
        """The report on what was found in ``source``."""
        counts = (self.num_files, self.num_bytes, self.num_pickles, len(self.configurations), self.num_findings)
        names = (tuple(sorted(self.used_names)), tuple(self.allowable_names), tuple(map(escape_unprintable, excluded)))
        return ScanReport(source, *counts, tuple(self.findings), *names)


@dataclass(frozen=True, slots=True, repr=False)
class ScanReport(DisplayableResult):
    """Counts of what was proved, and the findings.

    ``num_files`` files of ``num_bytes`` bytes and ``num_pickles`` pickles were proved, and ``num_configurations`` files
    are configuration. ``allowed`` are the names that the user vouched for and that were met. ``names`` are those that
    could be vouched for: what is left is a finding. ``excluded`` are files that were not looked at.
    """

    SHOWN: ClassVar[tuple[str, ...]] = ("source", "clean", "num_findings", "num_pickles", "num_files", "num_bytes")
    JSON_PROPERTIES: ClassVar[tuple[str, ...]] = ("clean",)

    source: str
    num_files: int
    num_bytes: int
    num_pickles: int
    num_configurations: int
    num_findings: int
    findings: tuple[Finding, ...] = field(repr=False)
    allowed: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()

    @property
    def clean(self) -> bool:
        return not self.num_findings

    def to_sarif(self, folder: str = "") -> dict[str, Any]:
        """The findings in the form in which code hosts take results of scanners. The names of files begin with
        ``folder``."""
        from ckpt_tools.verification.sarif import build_log

        properties = {**self.shown(), "allowed": list(self.allowed), "names": list(self.names)}
        rules = {danger.rule_id: about for danger, (_, about) in _SARIF_RULES.items()}
        results = (_build_sarif_result(finding, folder) for finding in self.findings)
        return build_log("ckpt-tools scan", rules, results, properties)


_SARIF_RULES = {
    Danger.RUNS: ("error", "Code that a loader would run or import."),
    Danger.COULD_RUN: ("error", "A program, or a name that is used as no genuine checkpoint uses it."),
    Danger.OUTSIDE: ("error", "A name of a file that leads out of the checkpoint."),
    Danger.CONFIGURATION: ("warning", "Texts with names that the program that reads them may import or call."),
    Danger.NOT_UNDERSTOOD: ("warning", "Data that is not as its format says, or as no writer writes it."),
    Danger.NOT_LOOKED_INTO: ("warning", "Data of a kind that is not read."),
}
"""Levels and descriptions of SARIF's rules."""


def _build_sarif_result(finding: Finding, folder: str) -> dict[str, Any]:
    from ckpt_tools.verification.sarif import build_file_location, build_result

    place_suffix = f" ({finding.place})" if finding.place else ""
    offset, length = finding.byte_offset, finding.byte_length
    region = None if offset is None or length is None else (offset, length)
    level, _ = _SARIF_RULES[finding.danger]
    return build_result(
        finding.danger.rule_id,
        level,
        f"{finding.what}{place_suffix}",
        build_file_location(finding.file, folder, region),
    )

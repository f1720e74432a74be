"""Report of a scan."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from ckpt_tools.core.showing import Shown
from ckpt_tools.verification.scan.findings import Finding, FindingCollector


@dataclass(frozen=True, slots=True, repr=False)
class ScanReport(Shown):
    """Counts of what was proved, and the findings.

    ``num_files`` files of ``num_bytes`` bytes and ``num_pickles`` pickles were proved; ``allowed`` are the names that
    the user vouched for and that were met. ``names`` are those that could be vouched for: what is left is a finding.
    """

    SHOWN: ClassVar[tuple[str, ...]] = ("source", "clean", "num_findings", "num_pickles", "num_files", "num_bytes")
    JSON_PROPERTIES: ClassVar[tuple[str, ...]] = ("clean",)

    source: str
    num_files: int
    num_bytes: int
    num_pickles: int
    num_findings: int
    findings: tuple[Finding, ...] = field(repr=False)
    allowed: tuple[str, ...] = ()
    names: tuple[str, ...] = ()

    @classmethod
    def of(cls, source: str, found: FindingCollector) -> ScanReport:
        """The report of the findings in ``source``."""
        return cls(
            source,
            found.num_files,
            found.num_bytes,
            found.num_pickles,
            found.num_findings,
            tuple(found.findings),
            tuple(sorted(found.met)),
            tuple(found.names),
        )

    @property
    def clean(self) -> bool:
        return not self.num_findings

    def to_sarif(self) -> dict[str, Any]:
        """The findings in the form in which code hosts take results of scanners."""
        from ckpt_tools.verification.scan.sarif import sarif_of

        properties = {**self.shown(), "allowed": list(self.allowed), "names": list(self.names)}
        return sarif_of(self.findings, properties)

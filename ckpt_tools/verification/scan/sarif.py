"""A scan as SARIF 2.1.0, the form in which code hosts take results of scanners."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import quote

from ckpt_tools.verification.scan.findings import Danger, Finding

_LEVELS = {
    Danger.RUNS: "error",
    Danger.COULD_RUN: "error",
    Danger.OUTSIDE: "error",
    Danger.NOT_UNDERSTOOD: "warning",
    Danger.NOT_LOOKED_INTO: "warning",
}
_ABOUT = {
    Danger.RUNS: "Code that a loader would run or import.",
    Danger.COULD_RUN: "A program, or a name that is used as no genuine checkpoint uses it.",
    Danger.OUTSIDE: "A name of a file that leads out of the checkpoint.",
    Danger.NOT_UNDERSTOOD: "Data that is not as its format says, or as no writer writes it.",
    Danger.NOT_LOOKED_INTO: "Data of a kind that is not read.",
}


def sarif_of(findings: Iterable[Finding], properties: Mapping[str, Any]) -> dict[str, Any]:
    """The object that SARIF wants. ``properties`` are what else is to be told of the scan."""
    rules = [{"id": _rule(danger), "shortDescription": {"text": about}} for danger, about in _ABOUT.items()]
    driver = {"name": "ckpt-tools scan", "rules": rules}
    return {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [
            {
                "tool": {"driver": driver},
                "results": [_result(finding) for finding in findings],
                "properties": dict(properties),
            }
        ],
    }


def _rule(danger: Danger) -> str:
    return danger.value.replace(" ", "-")


def _result(finding: Finding) -> dict[str, Any]:
    place = f" ({finding.place})" if finding.place else ""
    return {
        "ruleId": _rule(finding.danger),
        "level": _LEVELS[finding.danger],
        "message": {"text": f"{finding.what}{place}"},
        "locations": [{"physicalLocation": {"artifactLocation": {"uri": quote(finding.file)}}}],
    }

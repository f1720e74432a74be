"""Results as SARIF 2.1.0, the form in which code hosts take results of scanners."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import quote

RuleDescriptions = Mapping[str, str]
"""Descriptions by the id of a rule."""


def build_log(
    tool: str, rules: RuleDescriptions, results: Iterable[dict[str, Any]], properties: Mapping[str, Any]
) -> dict[str, Any]:
    """A log of one run of ``tool``."""
    rule_descriptors = [{"id": name, "shortDescription": {"text": about}} for name, about in rules.items()]
    driver = {"name": tool, "informationUri": "https://github.com/ckpt-tools/ckpt-tools", "rules": rule_descriptors}
    run = {"tool": {"driver": driver}, "results": list(results), "properties": dict(properties)}
    return {"$schema": "https://json.schemastore.org/sarif-2.1.0.json", "version": "2.1.0", "runs": [run]}


def build_result(rule: str, level: str, text: str, location: dict[str, Any]) -> dict[str, Any]:
    """One result. ``level`` is ``error`` or ``warning``."""
    return {"ruleId": rule, "level": level, "message": {"text": text}, "locations": [location]}


def build_file_location(file: str, folder: str, region: tuple[int, int] | None = None) -> dict[str, Any]:
    """The location of ``file``, which is in ``folder``; ``region`` is the start and the number of the bytes meant."""
    path = f"{folder}/{file}" if folder else file
    location: dict[str, Any] = {"artifactLocation": {"uri": quote(path)}}
    if region is not None:
        location["region"] = {"byteOffset": region[0], "byteLength": region[1]}
    return {"physicalLocation": location}


def build_logical_location(name: str) -> dict[str, Any]:
    """The location of what has a name and is in no one file: a tensor, an entry."""
    return {"logicalLocations": [{"fullyQualifiedName": name}]}

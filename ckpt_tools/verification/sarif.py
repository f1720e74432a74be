"""Results as SARIF 2.1.0, the form in which code hosts take results of scanners."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import quote

Rules = Mapping[str, str]
"""Descriptions by the id of a rule."""


def log_of(tool: str, rules: Rules, results: Iterable[dict[str, Any]], properties: Mapping[str, Any]) -> dict[str, Any]:
    """A log of one run of ``tool``."""
    described = [{"id": name, "shortDescription": {"text": about}} for name, about in rules.items()]
    driver = {"name": tool, "informationUri": "https://github.com/ckpt-tools/ckpt-tools", "rules": described}
    run = {"tool": {"driver": driver}, "results": list(results), "properties": dict(properties)}
    return {"$schema": "https://json.schemastore.org/sarif-2.1.0.json", "version": "2.1.0", "runs": [run]}


def result_of(rule: str, level: str, text: str, location: dict[str, Any]) -> dict[str, Any]:
    """One result. ``level`` is ``error`` or ``warning``."""
    return {"ruleId": rule, "level": level, "message": {"text": text}, "locations": [location]}


def in_file(file: str, folder: str, region: tuple[int, int] | None = None) -> dict[str, Any]:
    """The location of ``file``, which is in ``folder``; ``region`` is the start and the number of the bytes meant."""
    path = f"{folder}/{file}" if folder else file
    place: dict[str, Any] = {"artifactLocation": {"uri": quote(path)}}
    if region is not None:
        place["region"] = {"byteOffset": region[0], "byteLength": region[1]}
    return {"physicalLocation": place}


def of_name(name: str) -> dict[str, Any]:
    """The location of what has a name and is in no one file: a tensor, an entry."""
    return {"logicalLocations": [{"fullyQualifiedName": name}]}

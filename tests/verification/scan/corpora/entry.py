"""An entry of a corpus: a test file, or a folder of them, with the label that its project gives it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from tests.verification.scan.generator import Files


class Label(StrEnum):
    MALICIOUS = "malicious"
    INNOCUOUS = "innocuous"
    NO_MODEL = "no model"
    """Data that no loader of models reads."""


@dataclass(frozen=True, slots=True)
class Entry:
    """``advisory`` is the id of the advisory that the entry was made for, or empty."""

    name: str
    label: Label
    files: Files
    advisory: str = ""


def entries(
    label: Label, found: Mapping[str, bytes | Files], advisories: Mapping[str, str] | None = None
) -> list[Entry]:
    """Entries of one ``label``. Bytes are a file of the entry's own name."""
    return [
        Entry(name, label, {name: data} if isinstance(data, bytes) else data, (advisories or {}).get(name, ""))
        for name, data in found.items()
    ]

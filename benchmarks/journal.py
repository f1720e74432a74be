"""Journal of measurements, one JSON object a line, written at once, so that a stopped suite can be resumed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

Record = dict[str, Any]


class Journal:
    """The records of a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        text = path.read_text() if path.exists() else ""
        self.records: list[Record] = [
            json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")
        ]
        if text and not text.endswith("\n"):
            self._rewrite()  # without the last line, which a kill cut short

    def add(self, record: Record) -> Record:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps(record) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.records.append(record)
        return record

    def find(self, **fields: object) -> list[Record]:
        """Records with these fields, in their order."""
        return [record for record in self.records if fields.items() <= record.items()]

    def forget(self, *, keep: Record, **fields: object) -> None:
        """Drop records that have `fields` but not all of `keep`: those of other code or of another size."""
        stale = [record for record in self.find(**fields) if not keep.items() <= record.items()]
        if stale:
            self.records = [record for record in self.records if record not in stale]
            self._rewrite()

    def _rewrite(self) -> None:
        partial = self.path.with_name(f"{self.path.name}.partial")
        partial.write_text("".join(json.dumps(record) + "\n" for record in self.records))
        partial.replace(self.path)

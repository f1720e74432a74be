"""What was measured, one JSON object a line, written at once: a suite that was stopped goes on where it was."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Record = dict[str, Any]


class Journal:
    """The records of a file, and of one code and size at a time what is already done."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records: list[Record] = list(_read(path)) if path.exists() else []
        if path.exists() and not path.read_bytes().endswith(b"\n"):
            self._rewrite()

    def add(self, record: Record) -> Record:
        """Write it down before anything else happens."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps(record) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.records.append(record)
        return record

    def find(self, **fields: object) -> list[Record]:
        """Those that have these fields, in the order in which they were added."""
        return [record for record in self.records if fields.items() <= record.items()]

    def forget(self, *, keep: Record, **fields: object) -> None:
        """Drop those that have `fields` but not all of `keep`: they were measured on other code or another size."""
        stale = [record for record in self.find(**fields) if not keep.items() <= record.items()]
        if stale:
            self.records = [record for record in self.records if record not in stale]
            self._rewrite()

    def _rewrite(self) -> None:
        partial = self.path.with_name(f"{self.path.name}.partial")
        partial.write_text("".join(json.dumps(record) + "\n" for record in self.records))
        partial.replace(self.path)


def _read(path: Path) -> Iterator[Record]:
    """A last line that a kill cut short is left out."""
    for line in path.read_text().splitlines():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            return

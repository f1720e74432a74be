"""Prints the closed list as the table of ``docs/scanning.md``."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from ckpt_tools.serialization.pickle.closed_list import entries


def lines() -> Iterator[str]:
    """The table, line by line."""
    yield "| names | what a pickle may do with them | why that runs nothing |"
    yield "|---|---|---|"
    for entry in entries():
        yield f"| `{entry.names}` | {_cell(entry.may)} | {_cell(entry.reason)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*").replace("_", "\\_").replace("<", "&lt;")


if __name__ == "__main__":
    sys.stdout.write("\n".join(lines()) + "\n")

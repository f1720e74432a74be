"""The pages about training in docs/."""

from __future__ import annotations

from pathlib import Path

PAGES = {path.name: path.read_text() for path in sorted((Path(__file__).parents[2] / "docs").glob("training*.md"))}
ALL = "\n".join(PAGES.values())

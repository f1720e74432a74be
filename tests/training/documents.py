"""The pages about training in docs/, with commands of several lines as one."""

from __future__ import annotations

import re
from pathlib import Path

PAGES = {
    path.name: re.sub(r" \\\n +", " ", path.read_text())
    for path in sorted((Path(__file__).parents[2] / "docs").glob("training*.md"))
}
ALL = "\n".join(PAGES.values())
